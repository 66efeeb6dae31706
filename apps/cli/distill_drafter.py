"""`edgeinfer distill drafter` and `sorted`: tiny models that draft for a target."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.distill_training import (
    add_training_options,
    given,
    report,
    require_free,
    torch_needed,
    working_folder,
)
from edgeinfer.apps.cli.output import Progress, print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.export.training.drafter import DrafterTraining
    from edgeinfer.export.training.sizing import StudentSize
    from edgeinfer.tools.distilling import ModelReplier


_DRAFTER = (
    "Train a tiny drafter for a model, in the size that pays off on this device, on your text and on "
    "text that the model\nwrites. Replies stay exactly the same, since a drafter only makes them "
    "faster.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexamples:\n  edgeinfer distill drafter "
    "my-bundle my-drafter --text texts.jsonl --minutes 30\n  edgeinfer distill drafter my-bundle "
    "my-drafter --text texts.jsonl --into my-bundle-that-drafts\n"
)
_MINUTES = 20.0
# Rows of passes that are timed, and how often: the least counts, as other programs only ever add.
_PASSES, _PAST, _REPEATS = (1, 2, 4, 8, 16), 64, 15
# Milliseconds for a billion weights where nothing was measured; passes over more rows in proportion to one.
_MS_PER_BILLION = 80.0
_NOMINAL = {1: 1.0, 4: 1.1, 8: 1.2, 16: 1.6}
_MEASURED_PROMPTS = 12


def add_drafter_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "drafter", _execute_drafter, _DRAFTER, help="a tiny model that drafts")
    _add_options(parser)
    text = "width and number of layers, such as 128x1 (default: the best for this device, as measured)"
    parser.add_argument("--size", metavar="WxL", help=text)


def _add_options(parser: Parser) -> None:
    """Adds the target, how the drafter is stored and how it is trained."""
    text = "bundle or checkpoint directory, or hub id; tales is the built-in model"
    parser.add_argument("target", metavar="TARGET", help=text)
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory to make")
    text = "also make this bundle, a copy of TARGET that contains the drafter and uses it whenever it is loaded"
    parser.add_argument("--into", type=Path, metavar="BUNDLE", help=text)
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=8, help="bits per weight (default: 8)")
    text = "bits of the embedding, which makes up most of a tiny model (default: same as --bits)"
    parser.add_argument("--head-bits", type=int, choices=(4, 8, 32), help=text)
    text = "with --bits 4, quantize layers of at most 65536 weights to 4 bits too, instead of 8"
    parser.add_argument("--no-keep-small", dest="keep_small", action="store_false", help=text)
    add_training_options(parser, _MINUTES)
    text = "number of tokens that the model writes as training text (default: depends on the time limit)"
    parser.add_argument("--samples", type=int, metavar="N", help=text)
    parser.advanced("--head-bits", "--no-keep-small")
    add_json_option(parser)


def _execute_drafter(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    return _make(args, nested=False)


def _make(args: argparse.Namespace, *, nested: bool) -> int:
    """Trains, exports, measures and reports a drafter, of nested depths or not."""
    source = _checked(args)
    with torch_needed():
        from edgeinfer.export.training.drafter import DrafterOptions, train_drafter
        from edgeinfer.export.training.models import load_target
        from edgeinfer.export.training.text import TextSource
        from edgeinfer.export.training.trainer import find_device

        options = DrafterOptions(size=_size_for(args, source), **given(args), samples=args.samples, nested=nested)
        target = load_target(source, find_device(options.device))
        text = TextSource(tuple(args.text), target)
        with working_folder(args) as work, progress_bar(enabled=not args.json) as bar, repliers(source) as replier:
            trained = train_drafter(target, text, options, work, replier, bar)
            facts = _finish(args, source, trained, bar)
    stages = facts["acceptance"].items()
    rows = [(f"acceptance {name}", f"{a['agreement']:.3f}, {a['mean_accepted_length']:.2f}") for name, a in stages]
    report(
        args, facts, [("size", args.size or f"{trained.size.width}x{trained.size.layers}"), *rows, *speed_rows(facts)]
    )
    return 0


def _checked(args: argparse.Namespace) -> Path:
    """Returns the target's folder; refuses at once what could not be done at the end."""
    source = hub.find(args.target)
    require_free(args.out)
    if args.into is not None:
        require_free(args.into)
        if not hub.is_bundle(source):
            hint = "Export it first, or leave --into out."
            raise UsageError(f"{args.target} is a checkpoint, which cannot contain a drafter.", hint)
    return source


@contextlib.contextmanager
def repliers(source: Path) -> Iterator[ModelReplier | None]:
    """Gives what draws the target's replies: the engine if it is a bundle, much faster than torch; else None."""
    from edgeinfer.tools.distilling import ModelReplier

    if not hub.is_bundle(source):
        yield None
        return
    with edgeinfer.load(source, speculation="off", remember=False) as model:
        yield ModelReplier(model)


def _size_for(args: argparse.Namespace, source: Path) -> StudentSize:
    """Returns the size that was asked for, or the one that pays here."""
    from edgeinfer.bundle.opening import open_bundle
    from edgeinfer.export.source.hf_config import read_config
    from edgeinfer.export.training.sizing import StudentSize, TargetCosts, choose_size

    if args.size is not None:
        return StudentSize.parse(args.size)
    if hub.is_bundle(source):
        manifest = open_bundle(source).manifest
        vocabulary, layers, weights = manifest.geometry.vocab_size, manifest.geometry.num_layers, manifest.parameters
        with edgeinfer.load(source, speculation="off", remember=False) as model:
            times = edgeinfer.tools.measure_passes(model, _PASSES, past=_PAST, repeats=_REPEATS)
        costs = TargetCosts({rows: min(ms) for rows, ms in times.items()}, weights, layers)
    else:
        config = read_config(source)
        vocabulary, layers, width = (
            config.integer(name) for name in ("vocab_size", "num_hidden_layers", "hidden_size")
        )
        weights = vocabulary * width + layers * (2 * width**2 + 3 * width * config.integer("intermediate_size"))
        costs = TargetCosts(
            {m: share * weights * _MS_PER_BILLION / 1e9 for m, share in _NOMINAL.items()}, weights, layers
        )
    choice = choose_size(costs, vocabulary)
    if not args.json:
        size = f"{choice.size.width}x{choice.size.layers}"
        print_note(
            f"A drafter of {size} may make the model {choice.speedup:.2f} times as fast, "
            f"with {choice.acceptance:.0%} of its tokens accepted."
        )
    return choice.size


def _finish(args: argparse.Namespace, source: Path, trained: DrafterTraining, bar: Progress | None) -> dict[str, Any]:
    """Exports what was trained, measures it on the engine and puts it into its target; returns the report."""
    from edgeinfer.bundle.opening import add_figures, exit_figure, nest_drafter, open_bundle
    from edgeinfer.export.exporter import export_checkpoint
    from edgeinfer.export.options import ExportConfig
    from edgeinfer.tools.distilling import measure_drafter

    # At 8 bits the small layers would stay float32, and all layers of a drafter are small.
    keep = args.keep_small and args.bits == 4
    head = args.head_bits or args.bits
    config = ExportConfig(bits=args.bits, head_bits=head, keep_small=keep, name=args.out.name)
    export_checkpoint(trained.checkpoint, args.out, config, bar)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    if trained.depths:
        agreements = {exit_figure(depth): each.agreement for depth, each in trained.depths.items()}
        add_figures(open_bundle(args.out), agreements)
    facts = {"bundle": str(args.out), "bytes": size} | trained.facts()
    if hub.is_bundle(source):
        prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
        figures = measure_drafter(source, args.out, prompts, progress=bar)
        facts["engine"] = asdict(figures)
    if args.into is not None:
        nest_drafter(source, args.out, args.into)
        facts["into"] = str(args.into)
    return facts


def speed_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns what a report's table says of speed on the engine."""
    from edgeinfer.tools.distilling import DraftFigures

    if "engine" not in facts:
        return []
    figures = DraftFigures(**facts["engine"])
    return [
        ("accepted on the engine", f"{figures.acceptance_rate:.3f}, {figures.mean_accepted_length:.2f} tokens a pass"),
        ("tokens per second", f"{figures.plain_tokens_per_second:.0f} plain, {figures.tokens_per_second:.0f} drafted"),
        ("speed-up", f"{figures.speedup:.2f}"),
    ]


_SORTED = (
    "Train a drafter of nested depths. Each of its layers learns to predict tokens, and drafting "
    "goes deeper only where the\nshallower prediction is uncertain. It drafts for every model with "
    "the same tokenizer.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexample:\n  edgeinfer "
    "distill sorted my-bundle my-drafter --size 128x3 --text texts.jsonl --minutes 30\n"
)


def add_sorted_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "sorted", _execute_sorted, _SORTED, help="a drafter with nested depths")
    _add_options(parser)
    parser.add_argument("--size", default="128x3", metavar="WxL", help="width and number of layers (default: 128x3)")


def _execute_sorted(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    return _make(args, nested=True)
