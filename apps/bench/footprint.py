"""Measures memory of exporting, chatting and loading, what processes share, and the engine's time around session calls.

python -m edgeinfer.apps.bench.footprint export|chat|overhead|load|share [--json]

What is measured runs in a fresh process of its own; knows the public face and commands, nothing below.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.artifacts import LAYOUTS, Artifacts, BundleKind, default_folder, export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.shapes import SHAPES, find_shape
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.apps.bench.watch import Watched, mapped_memory, run_watched
from edgeinfer.config import format_size
from edgeinfer.errors import BackendError, EdgeInferError

__all__ = ["main"]


def _export(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint = _artifacts(args).checkpoint()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        # Running the model afterwards takes what running takes.
        options = (*_kind(args).options, "--no-kv-scales")
        command = export_command(checkpoint, Path(folder) / "bundle", options)
        watched = run_watched(command, child_environment())
    return {"shape": args.shape, "source_bytes": (checkpoint / "model.safetensors").stat().st_size, **_memory(watched)}


def _chat(args: argparse.Namespace) -> dict[str, Any]:
    request = {**_model(args), "context": args.context, "memory": args.memory}
    watched = _in_child("chat", request)
    return {"model": request["model"], **json.loads(watched.stdout), **_memory(watched)}


def _overhead(args: argparse.Namespace) -> dict[str, Any]:
    request = {"model": args.model, "threads": args.threads, "tokens": args.tokens, "past": args.past}
    found: dict[str, Any] = json.loads(_in_child("overhead", request).stdout)
    return found


def _load(args: argparse.Namespace) -> dict[str, Any]:
    request = {**_model(args), "context": args.context, "prompt": args.prompt}
    # The first run fills the system's cache of the files.
    runs = [json.loads(_in_child("load", request).stdout) for _ in range(args.repeats + 1)][1:]
    alone = [{"load_without_tokenizer_ms": run["load_ms"] - run["tokenizer_ms"], **run} for run in runs]
    return {"model": request["model"], **{name: asdict(Spread.of([run[name] for run in alone])) for name in alone[0]}}


def _share(args: argparse.Namespace) -> dict[str, Any]:
    request = _model(args)
    weights = Path(request["model"]) / "weights.bin"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_holding(request))
        alone = mapped_memory(first.pid, weights)
        second = stack.enter_context(_holding(request))
        together = [mapped_memory(process.pid, weights) for process in (first, second)]
    return {"model": request["model"], "weights_bytes": weights.stat().st_size} | {
        f"{who}_{name}": value
        for who, mapped in zip(("alone", "first_of_two", "second_of_two"), (alone, *together), strict=True)
        for name, value in asdict(mapped).items()
    }


@contextlib.contextmanager
def _holding(request: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that has loaded a model and used all its weights."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(_job("hold", request), env=child_environment(), stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "holding\n":
            raise BackendError("The measured process ended early.", "Its own message is above.")
        yield process
    finally:
        process.communicate()


def _artifacts(args: argparse.Namespace) -> Artifacts:
    return Artifacts(args.work, find_shape(args.shape), rebuild=args.rebuild)


def _kind(args: argparse.Namespace) -> BundleKind:
    return BundleKind(args.layout, args.bits, args.group_size, args.head_bits)


def _model(args: argparse.Namespace) -> dict[str, Any]:
    """The bundle to load and how."""
    bundle = args.model or str(_artifacts(args).bundle(_kind(args)))
    return {"model": bundle, "threads": args.threads, "native": args.layout == "native"}


def _memory(watched: Watched) -> dict[str, Any]:
    return {name: value for name, value in asdict(watched).items() if name != "stdout"}


def _in_child(job: str, request: dict[str, Any]) -> Watched:
    return run_watched(_job(job, request), child_environment())


def _job(name: str, request: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "edgeinfer.apps.bench.jobs", name, json.dumps(request)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.footprint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    export = commands.add_parser("export", help="peak memory of exporting a random checkpoint")
    chat = commands.add_parser("chat", help="peak memory of a chat that fills the context")
    overhead = commands.add_parser("overhead", help="engine time around the session call, per token")
    load = commands.add_parser("load", help="time and anonymous memory of loading, and after a prompt")
    share = commands.add_parser("share", help="pages of the weights that two processes have in common")
    for command in (export, chat, load, share):
        command.add_argument("--shape", default="qwen2.5-0.5b", help=f"one of {', '.join(SHAPES)}")
        command.add_argument("--layout", choices=LAYOUTS, default="native", help="of the weights (%(default)s)")
        command.add_argument("--bits", type=int, choices=(2, 4, 8), default=4)
        command.add_argument("--group-size", type=int, choices=(32, 64, 128), default=128)
        command.add_argument("--head-bits", type=int, choices=(2, 4, 8), help="default: as --bits")
        command.add_argument("--work", type=Path, default=default_folder(), help="model files, kept (%(default)s)")
        command.add_argument("--rebuild", action="store_true", help="export the bundle again")
    for command in (chat, load):
        command.add_argument("-c", "--context", type=int, default=2048)
    chat.add_argument("--memory", help="budget to load with, such as 430MB")
    overhead.add_argument("--tokens", type=int, default=64, help="decoded tokens")
    overhead.add_argument("--past", type=int, default=128, help="tokens in the cache before them")
    load.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    load.add_argument("--repeats", type=int, default=7, help="processes, one after the other")
    for command in (chat, overhead, load, share):
        command.add_argument("-m", "--model", help="bundle (default: overhead: built-in; others: made from --shape)")
        command.add_argument("-t", "--threads", type=int, default=1)
    jobs = ((export, _export), (chat, _chat), (overhead, _overhead), (load, _load), (share, _share))
    for command, execute in jobs:
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(execute=execute)
    return parser


def _print(found: dict[str, Any]) -> None:
    for name, value in found.items():
        write = format_size if name.endswith("_bytes") else _plain
        if isinstance(value, dict):
            median, p25, p75 = (write(value[part]) for part in ("median", "p25", "p75"))
            print(f"{name:<34} {median} [{p25} - {p75}]")
        else:
            print(f"{name:<34} {write(value)}")


def _plain(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        found = args.execute(args)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
