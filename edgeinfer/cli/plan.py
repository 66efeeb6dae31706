"""`edgeinfer plan`: what a model would need before any of it is loaded; knows nothing of how it is reckoned."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import edgeinfer
from edgeinfer.cli.options import (
    add_command,
    add_drafting_options,
    add_json_option,
    add_memory_options,
    add_model_option,
    add_native_option,
)
from edgeinfer.cli.output import print_json, print_table
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import BudgetError

if TYPE_CHECKING:
    from edgeinfer.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Show what a model needs in memory, term by term, without loading it. Exits with 4 if it does not fit.

example:
  edgeinfer plan -m my-bundle --memory 600MB -c 4096
"""

_OPTIONS = ("memory", "context", "speculation", "draft_model", "draft_max")


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "plan", execute, "does it fit, and what does it cost", _DESCRIPTION)
    add_model_option(parser)
    add_memory_options(parser)
    add_native_option(parser)
    add_drafting_options(parser)
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    given |= {"native": False} if args.no_native else {}
    LoadConfig(**given)
    plan = edgeinfer.plan(args.model, **given)
    if args.json:
        print_json(plan.to_dict())
    else:
        rows = [(name.replace("_", " "), format_size(size)) for name, size in plan.terms.items()]
        rows.append(("planned", format_size(plan.planned_bytes)))
        rows.append(("smallest budget", format_size(plan.minimum_bytes)))
        if plan.budget_bytes is not None:
            rows.append(("budget", format_size(plan.budget_bytes)))
            rows.append(("fits", "yes" if plan.fits else "no"))
        print_table(rows, title=f"{plan.context} tokens of context, {plan.layout} layout")
    return 0 if plan.fits else BudgetError.exit_code
