"""`edgeinfer distill eagle`: an EAGLE-3 head for a model, in a bundle with it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.distill_drafter import repliers, speed_rows
from edgeinfer.apps.cli.distill_training import (
    add_training_options,
    find_model,
    given,
    report,
    require_free,
    torch_needed,
    working_folder,
)
from edgeinfer.apps.cli.output import Progress, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.hub import is_bundle

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers
    from edgeinfer.export.training.eagle import EagleTraining

__all__ = ["add_eagle_parser"]

_EAGLE = (
    "Train an EAGLE-3 head for a model: one layer that reads the model's hidden states and drafts from "
    "them. OUT is a bundle of\nthe model with the head inside, which drafts whenever it is loaded. Replies "
    "stay exactly the same.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexamples:\n  edgeinfer "
    "distill eagle my-bundle my-bundle-with-head --text texts.jsonl --minutes 60\n  edgeinfer distill "
    "eagle CHECKPOINT my-bundle --text texts.jsonl --bits 4\n"
)
_MINUTES = 30.0
_MEASURED_PROMPTS = 12


def add_eagle_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "eagle", _execute, _EAGLE, help="an EAGLE-3 head, which reads a model's states")
    text = "bundle or checkpoint directory, or hub id; tales is the built-in model"
    parser.add_argument("target", metavar="MODEL", help=text)
    text = "bundle directory to make: a copy of MODEL, or its export where it is a checkpoint"
    parser.add_argument("out", metavar="OUT", type=Path, help=text)
    text = "bits per weight of the head, and of the model where it is a checkpoint (default: 4)"
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=4, help=text)
    text = "number of tokens that the head can draft, the most frequent ones (default: 32000, or half of all)"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "number of tokens that the head learns to draft one after the other (default: 5)"
    parser.add_argument("--depth", type=int, metavar="N", help=text)
    add_training_options(parser, _MINUTES)
    text = "number of tokens that the model writes as training text (default: depends on the time limit)"
    parser.add_argument("--samples", type=int, metavar="N", help=text)
    parser.advanced("--tokens", "--depth")
    add_json_option(parser)


def _execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    source = find_model(args.target)
    require_free(args.out)
    with torch_needed():
        from edgeinfer.bundle import open_bundle
        from edgeinfer.export.drafters.attaching import require_attachable
        from edgeinfer.export.training.eagle import EagleOptions, train_eagle
        from edgeinfer.export.training.models import load_target
        from edgeinfer.export.training.text import TextSource
        from edgeinfer.export.training.trainer import find_device

        if is_bundle(source):
            require_attachable(open_bundle(source))
        own = {name: getattr(args, name) for name in ("tokens", "depth", "samples")}
        options = EagleOptions(**given(args), **{name: value for name, value in own.items() if value is not None})
        target = load_target(source, find_device(options.device), any_family=True)
        text = TextSource(tuple(args.text), target)
        with working_folder(args) as work, progress_bar(enabled=not args.json) as bar:
            with repliers(source) as replier:
                trained = train_eagle(target, text, options, work, replier, bar)
            facts = _finish(args, source, trained, bar)
    rows: list[tuple[str, ...]] = [("right behind right ones", "before", "after")]
    places = enumerate(zip(trained.before, trained.after, strict=True), 1)
    rows += [(f"drafted token {place}", f"{before:.3f}", f"{after:.3f}") for place, (before, after) in places]
    report(args, facts, [*rows, *speed_rows(facts)])
    return 0


def _finish(args: argparse.Namespace, source: Path, trained: EagleTraining, bar: Progress | None) -> dict[str, Any]:
    """Makes the bundle, measures what the head brings on the engine, and returns the report."""
    from edgeinfer.bundle import open_bundle
    from edgeinfer.bundle.nesting import NESTED
    from edgeinfer.export import ExportConfig, export_checkpoint
    from edgeinfer.export.drafters.attaching import attach_drafter
    from edgeinfer.tools.distilling import measure_drafter

    if is_bundle(source):
        attach_drafter(open_bundle(source), trained.checkpoint, args.out, ExportConfig(bits=args.bits), bar)
    else:
        export_checkpoint(source, args.out, ExportConfig(bits=args.bits, drafter=trained.checkpoint), bar)
    size = sum(file.stat().st_size for file in (args.out / NESTED).iterdir())
    prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
    figures = measure_drafter(args.out, None, prompts, who="eagle", progress=bar)
    return {"bundle": str(args.out), "bytes": size} | trained.facts() | {"engine": asdict(figures)}
