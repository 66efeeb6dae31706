"""`edgeinfer launch`: starts a coding agent with a model of this machine, or prints the settings that it needs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.output import print_note, print_table
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.core.errors import EdgeInferError, RemoteError, StorageError, UsageError
from edgeinfer.core.user_files import user_data

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Start a coding agent that talks to a model of this machine. It uses the server that runs on the port, or starts one and
ends it with the agent. Settings are given as environment variables and options of the agent's command; where an agent
reads them only from a file, they are added to it, and the file as it was is kept next to it. What follows -- goes to
the agent. Without a name the agents are listed.

examples:
  edgeinfer launch
  edgeinfer launch claude -m qwen3-4b --context 32768
  edgeinfer launch codex --print
  edgeinfer launch aider -m qwen2.5-coder-7b -- --no-git
"""
_PROBE_S = 2.0
_ENOUGH = 16_384  # tokens: what agents send before the first question is 10,000 or more
_KEY = "EDGEINFER_API_KEY"


def add_launch(commands: Subparsers) -> None:
    parser = add_command(commands, "launch", execute, _DESCRIPTION)
    parser.add_argument("agent", nargs="?", choices=sorted(_agents()), metavar="AGENT", help="one of the list")
    parser.add_argument("-m", "--model", metavar="MODEL", help="model (default: the one that is served)")
    parser.add_argument("--memory", metavar="SIZE", help="memory budget of a server that is started")
    parser.add_argument("--context", type=int, metavar="N", help="context of a server that is started, in tokens")
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="port of the server (default: 8080)")
    text = "print the settings and the command, and start nothing"
    parser.add_argument("--print", action="store_true", dest="only_print", help=text)
    _leave_rest(parser)


def _leave_rest(parser: Parser) -> None:
    """Have what follows -- left to the agent; argparse would take options of ours among it."""
    parse = parser.parse_known_args

    def split(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        found, unknown = parse(given[:end], namespace)
        found.arguments = given[end + 1 :]
        return found, unknown

    parser.parse_known_args = split  # type: ignore[method-assign]  # of this command alone


def _agents() -> Mapping[str, Any]:
    text = resources.files("edgeinfer.apps.cli").joinpath("agents.json").read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True)
class _Served:
    """A server that answers, and the model that it has loaded."""

    url: str
    model: str
    context: int


def execute(args: argparse.Namespace) -> int:
    agents = _agents()
    if args.agent is None:
        rows = [
            (name, agent["title"], "installed" if shutil.which(agent["command"][0]) else "not found")
            for name, agent in agents.items()
        ]
        print_table(rows, header=("agent", "", ""))
        return 0
    served = _probe(args.port, args.model)
    if args.only_print:
        url = f"http://127.0.0.1:{args.port}"
        _print(agents[args.agent], served or _Served(url, args.model or "built-in", args.context or _ENOUGH), args)
        return 0
    program = shutil.which(agents[args.agent]["command"][0])
    if program is None:
        command = agents[args.agent]["command"][0]
        raise UsageError(
            f"{agents[args.agent]['title']} is not installed: there is no command {command}.", "Install it."
        )
    with contextlib.nullcontext(served) if served is not None else _server(args) as using:
        if using.context < _ENOUGH:
            print_note(f"The context is {using.context:,} tokens; agents use {_ENOUGH:,} and more: --context N.")
        filled = _filled(agents[args.agent], using)
        for path, settings in filled.get("files", {}).items():
            _merge(Path(path).expanduser(), settings)
        return _run([program, *filled["command"][1:], *args.arguments], filled["env"])


def _probe(port: int, model: str | None) -> _Served | None:
    """The server on a port, with the model that is wanted or that it has; None where none answers."""
    url = f"http://127.0.0.1:{port}"
    key = os.environ.get(_KEY)
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_S) as answer:
            listed = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        hint = f"Set {_KEY} to its key, or name another port with --port."
        raise RemoteError(f"The server at {url} refuses: {error.code} {error.reason}.", hint) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    loaded = [_Served(url, each["id"], size) for each in listed if (size := each.get("meta", {}).get("n_ctx"))]
    if model is not None:
        return _Served(url, model, loaded[0].context if loaded else _ENOUGH)
    if not loaded:
        raise RemoteError(f"The server at {url} has no model loaded.", "Name one with -m.")
    return loaded[0]


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[_Served]:
    """A server of its own, with what it says in a file, until the block ends. Ctrl-C is the agent's."""
    given = {"--model": args.model, "--memory": args.memory, "--context": args.context}
    options = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    command = [sys.executable, "-m", "edgeinfer", "serve", "--port", str(args.port), "--json", *options]
    log = user_data() / "edgeinfer" / "launch.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    print_note(f"Starting edgeinfer serve (its messages: {log}).")
    with log.open("w") as file:
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, **apart) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line:
                    process.wait()
                    said = log.read_text("utf-8", "replace").strip().splitlines()
                    raise RemoteError("The server did not start.", " ".join(said[-2:]) or f"See {log}.")
                data = json.loads(line)
                yield _Served(data["url"], data["model"], data["context"])
            finally:
                process.terminate()


def _filled(value: Any, served: _Served) -> Any:
    """Settings with the server's address, key, model and sizes in their places."""
    key = os.environ.get(_KEY) or "local"
    sizes = {"{context}": served.context, "{output}": max(served.context // 4, 1)}
    if isinstance(value, dict):
        return {_filled(name, served): _filled(each, served) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, served) for each in value]
    if value in sizes:
        return sizes[value]
    for name, text in {"{url}": served.url, "{key}": key, "{model}": served.model, **sizes}.items():
        value = value.replace(name, str(text))
    return value


def _texts(env: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(each) if isinstance(each, dict) else str(each) for name, each in env.items()}


def _print(agent: Mapping[str, Any], served: _Served, args: argparse.Namespace) -> None:
    filled = _filled(agent, served)
    lines = [f"# {path}\n{json.dumps(settings, indent=1)}" for path, settings in filled.get("files", {}).items()]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in _texts(filled["env"]).items()]
    lines.append(shlex.join(map(str, [*filled["command"], *args.arguments])))
    sys.stdout.write("\n".join(lines) + "\n")


def _merge(path: Path, settings: Mapping[str, Any]) -> None:
    """Add settings to a JSON file; the file as it was stays next to it."""
    try:
        old = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if not isinstance(old, dict):
            raise ValueError("it is no object")
        made = _merged(old, settings)
        if made == old:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            shutil.copy2(path, path.with_name(f"{path.name}.before-edgeinfer"))
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n", "utf-8")
        temporary.replace(path)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be changed: {error}.", "Mend it, or take the settings from --print."
        ) from error


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(old)
    for name, value in new.items():
        before = made.get(name)
        made[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return made


def _run(command: list[Any], env: Mapping[str, Any]) -> int:
    """Run the agent in the terminal; Ctrl-C reaches it and not this process."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(list(map(str, command)), env={**os.environ, **_texts(env)}, check=False).returncode
    except OSError as error:
        raise EdgeInferError(f"{command[0]} cannot be started: {error.strerror}.", "Start it by hand.") from error
    finally:
        signal.signal(signal.SIGINT, previous)
