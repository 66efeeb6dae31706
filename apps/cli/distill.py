"""`edgeinfer distill`: makes drafters and what else is trained for a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer import hub
from edgeinfer.apps.cli.distill_drafter import add_drafter_parser, add_sorted_parser
from edgeinfer.apps.cli.distill_heads import add_heads_parsers
from edgeinfer.apps.cli.distill_modules import add_module_parsers
from edgeinfer.apps.cli.distill_training import (
    add_training_options,
    given,
    report,
    require_free,
    torch_needed,
    working_folder,
)
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = (
    "Train what makes a model faster: a tiny drafter, early exits, and more.\nNeeds an extra: pip "
    "install 'edgeinfer[train]'. Run the same command again to resume an interrupted "
    "training.\n\nexample:\n  edgeinfer distill drafter my-bundle my-drafter --text texts.jsonl "
    "--minutes 30 --into my-bundle-2\n"
)


def add_distill(commands: Subparsers) -> None:
    """Adds the subcommand with its own subcommands."""
    parser = commands.add_parser("distill", description=_DESCRIPTION)
    kinds = parser.add_subparsers(title="what to make", metavar="KIND", required=True)
    for add in (add_drafter_parser, add_module_parsers, _add_exits_parser, add_sorted_parser, add_heads_parsers):
        add(kinds)


_EXITS = (
    "Train a small checkpoint so that its early layers predict what the whole model does. It can "
    "then draft for itself, or\nanswer with fewer layers, while the whole model stays close to its "
    "original predictions. The result is a checkpoint for\nedgeinfer export.\nNeeds an extra: pip "
    "install 'edgeinfer[train]'.\n\nexample:\n  edgeinfer distill exits my-checkpoint tuned --text "
    "texts.jsonl --steps 500\n"
)


def _add_exits_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "exits", _execute_exits, _EXITS, help="early exits for a checkpoint")
    text = "checkpoint directory or hub id; a bundle works too, with its rounded weights"
    parser.add_argument("target", metavar="CHECKPOINT", help=text)
    parser.add_argument("out", metavar="OUT", type=Path, help="checkpoint directory to make")
    add_training_options(parser)
    text = "layer dropout rate of the last layer; it is lower for earlier layers (default: 0.1)"
    parser.add_argument("--dropout", type=float, metavar="P", help=text)
    text = "weight of the exits' loss relative to the whole model's (default: 1)"
    parser.add_argument("--exit-weight", type=float, metavar="X", help=text)
    text = "weight of the loss that keeps the whole model close to its original predictions (default: 1)"
    parser.add_argument("--guard", type=float, metavar="X", help=text)
    text = "speed-ups of --compute unified to train for as well, with as few layers as they leave, such as 1.2,1.5"
    parser.add_argument("--speedups", metavar="X,X", help=text)
    add_json_option(parser)


def _execute_exits(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    source = hub.find(args.target)
    require_free(args.out)
    with torch_needed():
        from edgeinfer.export.training.exits import ExitsOptions, tune_exits
        from edgeinfer.export.training.models import load_target
        from edgeinfer.export.training.text import TextSource
        from edgeinfer.export.training.trainer import find_device

        own = {name: getattr(args, name) for name in ("dropout", "exit_weight", "guard")}
        own["speedups"] = None if args.speedups is None else _speedups(args.speedups)
        options = ExitsOptions(**given(args), **{name: value for name, value in own.items() if value is not None})
        target = load_target(source, find_device(options.device))
        with working_folder(args) as work, progress_bar(enabled=not args.json) as bar:
            tuned = tune_exits(target, TextSource(tuple(args.text), target), options, args.out, work, bar)
    rows = [(f"exit after {n}", f"{tuned.before[n]:.3f}", f"{tuned.after[n]:.3f}") for n in tuned.before]
    rows += [
        (f"evenly skipped for {speedup:g}x", f"{share:.3f}", f"{tuned.skipped_after[speedup]:.3f}")
        for speedup, share in tuned.skipped_before.items()
    ]
    whole = ("perplexity of the whole model", f"{tuned.perplexity_before:.3f}", f"{tuned.perplexity_after:.3f}")
    report(args, tuned.facts(), [("agreement with the whole model", "before", "after"), *rows, whole])
    if not args.json:
        print_note(f"Export it: edgeinfer export {args.out} BUNDLE")
    return 0


def _speedups(text: str) -> tuple[float, ...]:
    """Reads numbers between commas."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise UsageError(f"--speedups {text} is no list of numbers.", "Give such as 1.2,1.5.") from error
