"""`edgeinfer distill`: makes drafters and what else is trained for a model; knows nothing of how any one is made."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.distilling import drafter, exits, heads, sorted_drafter

if TYPE_CHECKING:
    from edgeinfer.apps.cli.options import Subparsers

__all__ = ["add_parser"]

_DESCRIPTION = """\
Train what makes a model faster: a tiny drafter, early exits, and more.
Needs the extra: pip install 'edgeinfer[train]'. An interrupted training goes on when the same command is given again.

example:
  edgeinfer distill drafter my-bundle my-drafter --text texts.jsonl --minutes 30 --into my-bundle-2
"""
_KINDS = (drafter, exits, sorted_drafter, heads)


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand with its own subcommands."""
    layout = argparse.RawDescriptionHelpFormatter
    text = "train a drafter, or exits, for a model"
    parser = commands.add_parser("distill", help=text, description=_DESCRIPTION, formatter_class=layout)
    kinds = parser.add_subparsers(title="what to make", metavar="KIND", required=True)
    for kind in _KINDS:
        kind.add_parser(kinds)
