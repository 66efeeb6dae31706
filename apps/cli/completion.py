"""`edgeinfer completion`: what a shell needs to complete commands, options, their values and models' names."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.parser import add_command, missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Print the script that makes a shell complete edgeinfer's commands, options and models.
Needs the extra: pip install 'edgeinfer[completion]'.

examples:
  eval "$(edgeinfer completion bash)"                                       in ~/.bashrc
  eval "$(edgeinfer completion zsh)"                                        in ~/.zshrc, after compinit
  edgeinfer completion fish > ~/.config/fish/completions/edgeinfer.fish     once
"""
_SHELLS = ("bash", "zsh", "fish", "powershell")
# Arguments that name a model which runs.
_MODELS = ("model", "draft_model", "reference")


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "completion", execute, _DESCRIPTION)
    parser.add_argument("shell", choices=_SHELLS, help="the shell that the script is for")


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    sys.stdout.write(shellcode(["edgeinfer"], shell=args.shell))
    return 0


def complete(build_parser: Callable[..., Parser]) -> None:
    """Tells a shell how the line that it asks about can go on, and ends the process.

    argcomplete reads the line from the environment and writes to a file descriptor that the shell opened.
    """
    import argcomplete

    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", sys.maxsize))]
    words = line.split()
    # The word that is being typed is none yet.
    command = words[1] if len(words) > 2 or (len(words) == 2 and line[-1:].isspace()) else ""
    parser = build_parser(command, beside=True)
    _name_models(parser)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _name_models(parser: Parser) -> None:
    """Has models' names proposed where a model is asked for."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _name_models(each)
        elif action.dest in _MODELS:
            action.completer = _models  # type: ignore[attr-defined]  # argcomplete's own attribute


def _models(prefix: str, **_: Any) -> list[str]:
    """Models that are here, those of the catalog, and paths."""
    import argcomplete

    from edgeinfer import hub  # and not the face, which would import what models run on

    names = [hub.BUILTIN, *(model.source.name for model in hub.converted_models())]
    names += [*(model.name for model in hub.cached_models()), *(model.name for model in hub.catalog())]
    return [*dict.fromkeys(names), *argcomplete.completers.FilesCompleter()(prefix)]
