"""`edgeinfer plan`: what a model would need before any of it is loaded."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import edgeinfer
from edgeinfer.apps.cli.fetching import prepared
from edgeinfer.apps.cli.options import CONVERTING, DRAFTING, MEMORY, add_model_option, add_options, given_options
from edgeinfer.apps.cli.output import print_json, print_table
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import BudgetError

if TYPE_CHECKING:
    from edgeinfer import MemoryPlan
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Show what a model needs in memory, term by term, without loading it. Exits with 4 if it does not fit.

example:
  edgeinfer plan -m my-bundle --memory 600MB -c 4096
"""
_PLANNED = (*MEMORY, *CONVERTING, "native", "device", *DRAFTING)


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "plan", execute, _DESCRIPTION)
    add_model_option(parser)
    add_options(parser, LoadConfig, _PLANNED)
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    model, options = prepared(args.model, given_options(args, _PLANNED))
    plan = edgeinfer.plan(model, **options)
    if args.json:
        print_json(plan.to_dict())
    else:
        _print_terms(plan)
        _print_ways(plan)
    return 0 if plan.fits else BudgetError.exit_code


def _print_terms(plan: MemoryPlan) -> None:
    rows = [(name.replace("_", " "), format_size(size), _kind(plan, name)) for name, size in plan.terms.items() if size]
    rows.append(("planned", format_size(plan.planned_bytes), "" if plan.counted == "resident" else "anonymous only"))
    rows.append(("smallest budget", format_size(plan.minimum_bytes), ""))
    if plan.budget_bytes is not None:
        rows.append(("budget", format_size(plan.budget_bytes), "fits" if plan.fits else "does not fit"))
    choice = plan.configuration
    # A model file that brings its tokenizer, GGUF, has no layouts.
    layout = "" if choice.tokenizer == "model" else f", {plan.layout} layout"
    title = f"{choice.context} tokens of context, cache in {choice.kv}{layout}, {choice.weights} weights"
    print_table(rows, title=title)
    if plan.footprint.device:
        own = [(name, format_size(size)) for name, size in plan.footprint.device.items()]
        title = f"in {plan.device}'s own memory, which is not counted, nor is what its driver takes in the process"
        print_table(own, title=title)
    elif plan.device != "cpu":
        print_table([("device", plan.device)])


def _kind(plan: MemoryPlan, term: str) -> str:
    if not plan.footprint.file.get(term):
        return ""
    return "of files" if not plan.footprint.anonymous.get(term) else "partly of files"


def _print_ways(plan: MemoryPlan) -> None:
    """Prints the expected speed, what was given up, and the alternatives."""
    known = "measured here" if plan.speed.measured else "estimated until the model has run here"
    rows = [("speed", f"{plan.speed.tokens_per_second:.1f} tokens/s ({known})"), ("threads", _tuned(plan, "threads"))]
    rows.append(("prompts in chunks of", _tuned(plan, "prefill_chunk")))
    print_table(rows)
    if plan.given_up:
        print_table([("given up", "; ".join(plan.given_up))])
    ways = [
        (way.name, format_size(way.planned_bytes), f"{way.speed.tokens_per_second:.1f}", "" if way.fits else "no")
        for way in plan.alternatives
    ]
    if ways:
        print_table(ways, title="instead", header=("", "needs", "tokens/s", "fits"))


def _tuned(plan: MemoryPlan, name: str) -> str:
    return f"{getattr(plan, name)}{' (tuned)' if name in plan.tuned else ''}"
