"""`edgeinfer chat`: the chat app, or the chat in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from edgeinfer import hub
from edgeinfer.apps.cli.inputs import prepared, utf8
from edgeinfer.apps.cli.options import (
    add_generation_options,
    add_load_options,
    as_flag,
    generation_options,
    load_model,
    load_options,
)
from edgeinfer.apps.cli.parser import add_command, add_hide_option, missing_extra
from edgeinfer.apps.desktop.settings import CONVERSATIONAL
from edgeinfer.apps.mcp.servers import ToolServers, usual_file
from edgeinfer.apps.terminal.app import TerminalChat
from edgeinfer.core.errors import EdgeInferError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Talk to a model, in a window of its own or in the browser. Conversations stay on this machine, and no network is needed.

With --terminal, talk in the terminal: Ctrl-C ends a thought, then stops the reply; Ctrl-D leaves, /help lists commands.
Lines piped in are answered one by one. Replies are sampled at temperature 0.7 and top-p 0.9 unless you or the model's
makers say otherwise.

examples:
  edgeinfer chat
  edgeinfer chat -m my-bundle --memory 600MB --system "Answer in one sentence."
  edgeinfer chat --terminal
"""

_OF_THE_WINDOW = ("data", "models", "port", "no_window")


def add_chat(commands: Subparsers) -> None:
    parser = add_command(commands, "chat", execute, _DESCRIPTION)
    parser.add_argument("--system", metavar="TEXT", help="system message that tells the model how to behave")
    parser.add_argument("--terminal", action="store_true", help="chat in the terminal")
    text = "file of MCP servers, whose tools the model may call"
    parser.add_argument("--mcp", type=Path, metavar="FILE", help=text)
    add_hide_option(parser)
    _add_window_options(parser)
    parser.advanced("--hide-thinking", "--data", "--models", "--port")
    add_load_options(parser, remote=True)
    add_generation_options(parser, usual={name: f"{value}, or the model's" for name, value in CONVERSATIONAL.items()})


def _add_window_options(parser: Parser) -> None:
    group = parser.add_argument_group("window")
    text = "folder for conversations and settings (default: the user's data folder)"
    group.add_argument("--data", type=Path, metavar="FOLDER", help=text)
    text = "additional folder to search for models; can be repeated"
    group.add_argument("--models", type=Path, action="append", metavar="FOLDER", help=text)
    text = "port on 127.0.0.1 (default: a free one)"
    group.add_argument("--port", type=int, metavar="N", help=text)
    text = "print the address instead of opening a window"
    group.add_argument("--no-window", action="store_true", default=None, help=text)


def execute(args: argparse.Namespace) -> int:
    system = None if args.system is None else utf8(args.system, "--system")
    if args.mcp is not None and not args.mcp.exists():
        raise UsageError(f"There is no file {args.mcp}.", "Name a JSON file with mcpServers.")
    return _in_terminal(args, system) if args.terminal else _in_window(args, system)


def _in_terminal(args: argparse.Namespace, system: str | None) -> int:
    for name in _OF_THE_WINDOW:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} belongs to the window.", "Leave out either it or --terminal.")
    given, loading = generation_options(args), load_options(args)
    with _servers(args.mcp) as servers, _SwitchedModel(args.model, loading) as models:
        options = {**CONVERSATIONAL, **models.model.sampling, **given}
        chat = TerminalChat(
            models,
            servers=servers,
            system=system,
            options=options,
            say=as_flag,
            thoughts=not args.hide_thinking,
        )
        chat.run()
    return 0


@contextlib.contextmanager
def _servers(given: Path | None) -> Iterator[ToolServers | None]:
    """The MCP servers of a chat in the terminal, which start while the model is loading; None where there are none."""
    if given is None and not usual_file().exists():
        yield None
        return
    with ToolServers(given or usual_file()) as servers:
        try:
            servers.reload()
        except ModuleNotFoundError as error:
            raise missing_extra(error) from error
        yield servers


class _SwitchedModel:
    """The loaded model of a chat, which can be replaced."""

    def __init__(self, name: str | None, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, options
        self.model = load_model(name, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def switch(self, name: str) -> None:
        """Load another model; if that fails, load the former one again and raise the error."""
        prepared(name, self._options)  # if it is missing, nothing changes
        self.model.close()
        try:
            self.model = load_model(name, self._options)
            self._name = name
        except EdgeInferError:
            self.model = load_model(self._name, self._options)
            raise


def _in_window(args: argparse.Namespace, system: str | None) -> int:
    try:
        from edgeinfer.apps.desktop.app import DesktopConfig, run
    except ModuleNotFoundError as error:
        if isinstance(missing_extra(error), UsageError):
            message = f"The chat app needs {error.name}, which is not installed."
            hint = "pip install 'edgeinfer[desktop]', or chat in the terminal: edgeinfer chat --terminal"
            raise UsageError(message, hint) from error
        raise
    options = generation_options(args)
    model, loading = prepared(args.model, load_options(args))
    given: dict[str, Any] = {"memory": loading.pop("memory", None), "context": loading.pop("context", None)}
    given |= {"model": _local(model), "system": system, "options": options or None}
    config = DesktopConfig(
        data=args.data,
        port=args.port or 0,
        window=not args.no_window,
        settings={name: value for name, value in given.items() if value is not None},
        options=loading,
        models=tuple(args.models or ()),
        mcp=args.mcp,
    )
    run(config, partial(print, flush=True))
    return 0


def _local(model: str | None) -> str | None:
    """The model as the app remembers it: an absolute path, or the id of a download."""
    if model is None:
        return None
    path = hub.resolve(model)
    return str(path.absolute()) if Path(model).expanduser().exists() else model
