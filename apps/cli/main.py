"""The `edgeinfer` command: dispatches, and turns every failure into a line and an exit code.

Exit codes: 0 done, 2 bad usage, 3 model or bundle, 4 does not fit the budget, 5 runtime, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.output import abandon_stdout, print_error
from edgeinfer.apps.cli.process import (
    address_limit,
    begin_start,
    end_start,
    interruptions_wait_for_imports,
    is_refused,
    refusal,
    supervised,
)
from edgeinfer.core.errors import BudgetError, EdgeInferError, StorageError, UsageError
from edgeinfer.core.version import VERSION

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser
    from edgeinfer.core.errors import Setting


INTERRUPTED = 130
# Commands by heading of the help. Each is a module of this package, imported on demand: all of them together take
# seconds on an old machine.
_GROUPS = {
    "use a model": {
        "run": "answer a prompt or continue a text",
        "chat": "chat with a model in a window, the browser or the terminal",
        "serve": "serve a model to other programs through OpenAI's API",
        "launch": "start a coding agent with a model of this machine",
        "mcp": "offer a model to other programs as an MCP server",
        "batch": "answer a file of requests",
        "embed": "make embeddings of texts, or rank documents for a query",
    },
    "choose a model": {
        "models": "list and remove models on this machine, or show a catalog of good ones",
        "pull": "download a model from the Hugging Face hub",
        "plan": "show whether a model fits in memory and how fast it runs",
        "inspect": "show what a model consists of",
    },
    "make a model": {
        "export": "turn a Hugging Face checkpoint into a bundle",
        "convert": "change a bundle's layout or a GGUF file's type",
        "distill": "train a drafter or early exits for a model",
    },
    "measure": {
        "bench": "measure speed, speculation, memory and quality",
        "eval": "measure how well a model predicts a text",
        "tune": "find the fastest settings for this device",
        "devices": "list the devices that models can run on",
        "methods": "list the ways to draft, search and compute less",
    },
    "set up": {"completion": "complete commands, options and models in your shell"},
}
COMMANDS = {name: text for group in _GROUPS.values() for name, text in group.items()}
# Commands that share the module of another.
_SHARED = {"pull": "models", "devices": "plan", "convert": "export", "completion": "parser"}
# Names of commands in other programs.
_ELSEWHERE = {
    **{"ask": "run", "generate": "run", "complete": "run", "talk": "chat", "ui": "chat", "app": "chat"},
    **{"server": "serve", "api": "serve", "download": "pull", "fetch": "pull", "get": "pull", "show": "inspect"},
    **{"list": "models", "ls": "models", "catalog": "models --catalog", "rm": "models rm", "delete": "models rm"},
    **{"info": "inspect", "fit": "plan", "quantize": "export", "train": "distill", "benchmark": "bench"},
    **{"perplexity": "eval", "version": "--version"},
}
# Errors of a full disk, a quota or a size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_GREETING = """\
edgeinfer runs language models on this machine, within a memory budget that you set.

  edgeinfer chat -m qwen2.5-0.5b     download a model once, and chat with it
  edgeinfer models --catalog         other models that suit small machines
  edgeinfer run "Once upon a time"   a story by the small built-in model

edgeinfer --help lists all commands.
"""
_ABOUT = """\
usage: edgeinfer COMMAND [options]

Run language models on this machine, within a memory budget that you set.
"""
_MORE = """
edgeinfer COMMAND --help explains a command; edgeinfer --version prints the version.
"""


def build_parser(only: str | None = None, *, all_names: bool = False) -> Parser:
    """Build the parser of the command `only`, or of all. `all_names` adds the names of the others."""
    from edgeinfer.apps.cli.parser import Parser

    parser = Parser("edgeinfer")
    parser.add_argument("--version", action="version", version=f"edgeinfer {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        if only in (None, command):
            module = import_module(f"edgeinfer.apps.cli.{_SHARED.get(command, command)}")
            getattr(module, f"add_{command}")(commands)
        elif all_names:
            commands.add_parser(command, help=COMMANDS[command])
    return parser


def _overview() -> str:
    groups = [
        "".join([f"\n{title}:\n", *(f"  {name:<12}{text}\n" for name, text in commands.items())])
        for title, commands in _GROUPS.items()
    ]
    return "".join([_ABOUT, *groups, _MORE])


def _answer_at_once(arguments: list[str]) -> str | None:
    """The answer to a line without a command; None if there is one."""
    match arguments:
        case []:
            return _GREETING
        case ["-h" | "--help" | "--help-all" | "help"]:
            return _overview()
        case ["-V" | "--version", *_]:
            return f"edgeinfer {VERSION}\n"
    first = arguments[0]
    if first in COMMANDS:
        return None
    if first.startswith("-"):
        raise UsageError(f"There is no command before {first}.", f"Write one first, such as: edgeinfer run {first}")
    from edgeinfer.core.options import nearest

    meant = _ELSEWHERE.get(first) or nearest(first, COMMANDS)
    hint = f"Did you mean {meant}?" if meant else "edgeinfer --help lists all commands."
    raise UsageError(f"No such command: {first}.", hint)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without `argv`, with the process's own arguments."""
    if argv is None and "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        from edgeinfer.apps.cli.parser import complete

        complete(build_parser)
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    limit = address_limit() if argv is None else None
    try:
        if limit is not None:
            code = supervised(limit)
            if code is not None:
                return code
        if argv is None:
            begin_start()
        return _execute(arguments)
    except BudgetError as error:
        return _report(arguments, error)
    except BrokenPipeError:
        # The reader has what it wanted (`| head`).
        abandon_stdout()
        return 0
    finally:
        end_start()


def _prepare_streams() -> None:
    _fill_places()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller (`>&-`): discard the output
            # Stays open to the end of the process, like the stream it replaces.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper) and name == "stdout":
            # A console that lacks a character shows "?".
            stream.reconfigure(errors="replace")


def _fill_places() -> None:
    """Open standard streams that were closed: a file in their place would receive what libraries print."""
    for place in range(3):
        try:
            os.fstat(place)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _execute(arguments: list[str]) -> int:
    try:
        with interruptions_wait_for_imports(sys._getframe()):
            if arguments[:1] == ["help"] and len(arguments) > 1:
                arguments = [*arguments[1:], "--help"]
            answer = _answer_at_once(arguments)
            if answer is None:
                args = build_parser(arguments[0]).parse_args(arguments)
                if not getattr(args, "ends_start", False):
                    end_start()
                code: int = args.execute(args)
            else:
                sys.stdout.write(answer)
                code = 0
            sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse, after --help or --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # the last resort: the user gets one line
        return _report(arguments, error)


def _report(arguments: list[str], error: Exception) -> int:
    """Print an error in one line and return the exit code."""
    if isinstance(error, OSError) and error.errno in _FULL:
        # Files are written under `storage_errors`, so this came from stdout.
        abandon_stdout()
        print_error(f"The output cannot be written: {error.strerror}. Free some space or send it to another place.")
        return StorageError.exit_code
    if "--debug" in arguments:  # not a parsed option: parsing may be what failed
        traceback.print_exc()
    if is_refused(error):
        error = refusal(address_limit())
    elif isinstance(error, ModuleNotFoundError):
        from edgeinfer.apps.cli.parser import missing_extra

        error = missing_extra(error)
    if isinstance(error, EdgeInferError):
        print_error(error.text(functools.partial(_flag, arguments)))
        return error.exit_code
    print_error(f"unexpected {type(error).__name__}: {error}. Run again with --debug for the traceback.")
    return EdgeInferError.exit_code


def _flag(arguments: list[str], setting: Setting) -> str:
    from edgeinfer.apps.cli.options import as_flag  # slow to import, so only for messages with options
    from edgeinfer.apps.cli.parser import own_flag

    flag = as_flag(setting)
    known = flag != str(setting) or arguments[0] not in COMMANDS
    return flag if known else own_flag(build_parser(arguments[0]), arguments, setting) or flag


if __name__ == "__main__":
    sys.exit(main())
