"""`edgeinfer bench compute`: what replies lose and gain by taking less compute; knows nothing of how it is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.bench_files import require_place, write_results, write_text
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import progress_bar
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.bench.compute import ComputeMaterial
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_compute_parser"]

_DESCRIPTION = """\
Take less compute by every policy at several levels, and measure how far predictions diverge from the whole model's, how
many answers are still right, and how much faster replies are. Entropy is compared with chance at the same share of the
large model, calibrated sets of blocks with evenly spaced layers, and floors are tried on texts of their own.

examples:
  edgeinfer bench compute --data DATA --quick
  edgeinfer bench compute -m BUNDLE --draft-model SMALL-BUNDLE --data DATA --json compute.json
  edgeinfer bench compute --checkpoint LARGE --draft-checkpoint SMALL --expand 4 --data DATA --quick

With --expand speeds are those of cost-expanded models: small trained checkpoints at the sizes of larger ones.
"""
_TEXT = "tinystories/tinystories_train_part0.txt"


def add_compute_parser(kinds: Subparsers) -> None:
    """Adds the benchmark."""
    parser = add_command(kinds, "compute", _execute, "quality against speed where less is computed", _DESCRIPTION)
    add_load_options(parser)
    group = parser.add_argument_group("texts and questions (default: a few that are built in)")
    text = f"folder with {_TEXT} to read and tales_dialogues/ to answer"
    group.add_argument("--data", type=Path, metavar="PATH", help=text)
    group.add_argument("--stories", type=int, default=24, metavar="N", help="to read (default: 24)")
    group.add_argument("--questions", type=int, default=6, metavar="N", help="of each kind (default: 6)")
    text = "a third of the stories and questions, and fewer levels"
    group.add_argument("--quick", action="store_true", help=text)
    group = parser.add_argument_group("cost-expanded models")
    text = "a small Llama checkpoint (Hugging Face, safetensors), instead of -m"
    group.add_argument("--checkpoint", type=Path, metavar="PATH", help=text)
    group.add_argument("--draft-checkpoint", type=Path, metavar="PATH", help="the same, instead of --draft-model")
    text = "times as wide, and twice as deep"
    group.add_argument("--expand", type=int, metavar="FACTOR", help=text)
    group.add_argument("--work", type=Path, metavar="PATH", help="where these files are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw divergence against speed")


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.compute import LEVELS, QUICK, measure_compute
    from edgeinfer.apps.bench.compute_report import compute_chart, print_compute

    options = {"remember": False} | load_options(args)
    require_place(args.json, args.svg)
    _check(args)
    material, bundle = _material(args), _expanded(args, options)
    # Layers that cost expansion added compute nothing: skipped alone, they would be saved for nothing.
    limits: dict[str, Any] = {"granularity": 2, "evaluations": 60} if args.expand else {}
    limits |= {"evaluations": 60 if args.expand else 250, "repeats": 1} if args.quick else {}
    drafter = options.get("draft_model")
    with progress_bar() as bar, load_model(bundle, options) as model:
        levels = QUICK if args.quick else LEVELS
        own = "its own drafter" if "draft_model" in model.plan.terms else None
        name = Path(drafter).name if drafter else own
        results = measure_compute(model, material, levels, drafter=name, told=bar, **limits)
    data = results.to_dict() | {"expanded": args.expand}
    if args.expand:
        small = args.draft_checkpoint
        data |= {"model": f"{args.checkpoint.name} x{args.expand}", "drafter": small and f"{small.name} x{args.expand}"}
    print_compute(data)
    write_results(args.json, "compute", data)
    if args.svg:
        from edgeinfer.apps.bench.plots import chart_svg

        write_text(args.svg, chart_svg(compute_chart(data)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what cannot be measured."""
    if min(args.stories, args.questions) < 1:
        raise UsageError("There must be something to read and to answer.", "Give --stories and --questions from 1 on.")
    if (args.expand is None) != (args.checkpoint is None) or (args.draft_checkpoint and not args.checkpoint):
        raise UsageError("--expand needs a checkpoint, nothing else does.", "Give --checkpoint and --expand, or -m.")
    if args.checkpoint and (args.model or args.draft_model):
        raise UsageError("A bundle cannot be expanded.", "Give checkpoints, and neither -m nor --draft-model.")


def _expanded(args: argparse.Namespace, options: dict[str, Any]) -> str | None:
    """The bundle to load; the draft model goes into the options."""
    if args.checkpoint is None:
        return None if args.model is None else str(args.model)
    from edgeinfer.apps.bench.model_files import default_folder, expanded_bundle

    folder = args.work or default_folder()
    if args.draft_checkpoint:
        options["draft_model"] = str(expanded_bundle(args.draft_checkpoint.resolve(), args.expand, folder))
    return str(expanded_bundle(args.checkpoint.resolve(), args.expand, folder))


def _material(args: argparse.Namespace) -> ComputeMaterial:
    from edgeinfer.apps.bench.compute import ComputeMaterial
    from edgeinfer.apps.bench.prompts import exact_prompts
    from edgeinfer.apps.bench.texts import BUILTIN_STORIES, all_stories

    part = 3 if args.quick else 1
    stories, questions = max(2, args.stories // part), max(1, args.questions // part)
    asked = tuple(exact_prompts(args.data, questions))
    if args.data is None:
        told = tuple(story.text for story in BUILTIN_STORIES)
        half = len(told) // 2
        return ComputeMaterial(told[half:][:stories], told[:half], asked, "built-in stories")
    found = all_stories(args.data / _TEXT)
    if len(found) < stories + 8:
        raise UsageError(f"{args.data / _TEXT} has too few stories.", "Read fewer (--stories).")
    text = f"{stories} stories of {Path(_TEXT).name}"
    return ComputeMaterial(tuple(found[-stories:]), tuple(found[:8]), asked, text)
