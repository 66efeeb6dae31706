"""`edgeinfer distill sorted`: a drafter that goes as deep as each token needs; knows nothing of how it is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.distilling.drafter import add_options, make
from edgeinfer.apps.cli.options import add_command

if TYPE_CHECKING:
    from edgeinfer.apps.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Make a drafter of nested depths: each of its layers learns to guess, and when it drafts it goes deeper only where the
shallower guess is unsure. It drafts for every model with the same tokenizer.
Needs the extra: pip install 'edgeinfer[train]'.

example:
  edgeinfer distill sorted my-bundle my-drafter --size 128x3 --text texts.jsonl --minutes 30
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "sorted", execute, "a drafter of nested depths", _DESCRIPTION)
    add_options(parser)
    parser.add_argument("--size", default="128x3", metavar="WxL", help="width and layers (default: 128x3)")


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    return make(args, nested=True)
