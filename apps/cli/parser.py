"""What the parsers of all commands have in common: errors in one line, --debug, --json, and hints at missing extras."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    Subparsers = argparse._SubParsersAction["Parser"]

__all__ = ["Parser", "add_command", "add_json_option", "command_line", "missing_extra"]

# What the extras bring.
_EXTRAS = {
    "onnx": "export",
    "safetensors": "export",
    "ml_dtypes": "export",
    "scipy": "export",
    "starlette": "server",
    "uvicorn": "server",
    "llguidance": "structured",
    "markdown_it": "desktop",
    "gguf": "gguf",
    "llama_cpp": "gguf",
    "optimum": "optimum",
    "torch": "optimum",
    "transformers": "optimum",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a UsageError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", f"See: {self.prog} --help")


def add_command(
    commands: Subparsers, name: str, execute: Callable[[argparse.Namespace], int], help: str, description: str
) -> Parser:
    """Adds a subcommand; its description ends in an example and is shown as written."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, description=description, formatter_class=layout, allow_abbrev=False)
    parser.set_defaults(execute=execute)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_json_option(parser: Parser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def command_line() -> str:
    """Returns the running command as a shell takes it, for figures that others want to reproduce."""
    return shlex.join(["edgeinfer", *sys.argv[1:]])


def missing_extra(error: ModuleNotFoundError) -> Exception:
    """Returns the error for a missing module: a hint if an extra brings it, else the error itself, which is a bug."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return UsageError(f"This needs {error.name}, which is not installed.", f"pip install 'edgeinfer[{extra}]'")
