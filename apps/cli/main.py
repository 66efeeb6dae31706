"""Entry point of the `edgeinfer` command: dispatches, and turns every way to fail into a line and an exit code.

Exit codes: 0 done, 2 bad usage, 3 model or bundle, 4 does not fit the budget, 5 runtime, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.output import print_error
from edgeinfer.apps.cli.process import address_limit, interruptions_wait_for_imports, is_refused, refusal, supervised
from edgeinfer.errors import BudgetError, EdgeInferError, StorageError
from edgeinfer.version import VERSION

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser

__all__ = ["COMMANDS", "build_parser", "main"]

INTERRUPTED = 130
# Modules of this package, in the order that --help has. Each is imported where it is asked for: all of them together
# take seconds on an old machine.
COMMANDS = (
    *("run", "chat", "serve", "export", "convert", "inspect", "plan", "pull"),
    *("bench", "eval", "tune", "distill", "devices"),
)
# What writing to a full disk, past a quota or past a size limit ends in.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_DESCRIPTION = """\
Run a language model on this device, inside a memory budget that you state.

example:
  edgeinfer run -p "Once upon a time"
"""
_EPILOG = "Each command explains itself: edgeinfer COMMAND --help"


def build_parser(only: str | None = None) -> Parser:
    """Builds the parser of all commands, or of the command `only` if there is one of that name."""
    from edgeinfer.apps.cli.parser import Parser

    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser("edgeinfer", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"edgeinfer {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (only,) if only in COMMANDS else COMMANDS:
        import_module(f"edgeinfer.apps.cli.{command}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    limit = address_limit() if argv is None else None
    try:
        if limit is not None:
            code = supervised(limit)
            if code is not None:
                return code
        return _execute(arguments)
    except BudgetError as error:
        return _report(arguments, error)
    except BrokenPipeError:
        # The reader has what it wanted (`| head`).
        _abandon_stdout()
        return 0


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as `>&-` does: what is said goes nowhere
            # Left open to the end of the process, as the streams it stands for.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper) and name == "stdout":
            # A console that lacks a character shows "?" rather than ending the story.
            stream.reconfigure(errors="replace")


def _abandon_stdout() -> None:
    """Drops what stdout did not take, or Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _execute(arguments: list[str]) -> int:
    try:
        with interruptions_wait_for_imports(sys._getframe()):
            args = build_parser(arguments[0] if arguments else None).parse_args(arguments)
            code: int = args.execute(args)
            sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse, after --help or --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # the last resort of a program: whatever it is, the user gets one line
        return _report(arguments, error)


def _report(arguments: list[str], error: Exception) -> int:
    """Prints what went wrong in one line and returns the exit code."""
    if isinstance(error, OSError) and error.errno in _FULL:
        # Files are written under `storage_errors`, so it was stdout that did not take all of its text.
        _abandon_stdout()
        print_error(f"The output cannot be written: {error.strerror}. Free some space or send it to another place.")
        return StorageError.exit_code
    _show_traceback(arguments)
    if is_refused(error):
        error = refusal(address_limit())
    if isinstance(error, EdgeInferError):
        print_error(str(error))
        return error.exit_code
    print_error(f"unexpected {type(error).__name__}: {error}. Run again with --debug for the traceback.")
    return EdgeInferError.exit_code


def _show_traceback(arguments: list[str]) -> None:
    # Not a parsed option: parsing may be what failed.
    if "--debug" in arguments:
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
