"""`edgeinfer chat`: opens the terminal chat; knows nothing of what is said there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edgeinfer.apps.terminal.app import TerminalChat
from edgeinfer.cli.loading import load_model
from edgeinfer.cli.options import (
    add_command,
    add_generation_options,
    add_load_options,
    generation_options,
    load_options,
    utf8,
)

if TYPE_CHECKING:
    from edgeinfer.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Talk to a model in the terminal. Ctrl-C stops a reply, Ctrl-D leaves, /help lists commands.
Lines piped in are answered one by one. Replies are sampled at temperature 0.7 and top-p 0.9 unless you say otherwise;
--temp 0 gives the most likely reply, --seed the same reply again.

example:
  edgeinfer chat -m my-bundle --memory 600MB --system "Answer in one sentence."
"""

# The most likely reply tends to repeat itself, which is no pleasure to talk to; small models above all.
_CONVERSATIONAL = {"temperature": 0.7, "top_p": 0.9}


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "chat", execute, "talk to a model", _DESCRIPTION)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should behave")
    parser.add_argument("--terminal", action="store_true", help="chat in the terminal (the default)")
    add_load_options(parser)
    add_generation_options(parser, max_tokens=None)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    system = None if args.system is None else utf8(args.system, "--system")
    options = _CONVERSATIONAL | generation_options(args)
    with load_model(args.model, load_options(args)) as model:
        TerminalChat(model, system=system, options=options).run()
    return 0
