"""`edgeinfer distill eagle`, `dflash` and `hydra-plus`: modules that read a model's states, in a bundle with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import hub
from edgeinfer.apps.cli.distill_drafter import repliers, speed_rows
from edgeinfer.apps.cli.distill_training import (
    add_training_options,
    given,
    report,
    require_free,
    torch_needed,
    working_folder,
)
from edgeinfer.apps.cli.output import Progress, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.tools.distilling import require_native

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.export.training.models import Target
    from edgeinfer.export.training.module_training import ModuleTraining
    from edgeinfer.export.training.samples import Replier
    from edgeinfer.export.training.text import TextSource

    Train = Callable[[Target, TextSource, Path, Replier | None, Progress | None], ModuleTraining]


_EAGLE = (
    "Train an EAGLE-3 head for a model: one layer that reads the model's hidden states and drafts from "
    "them. OUT is a bundle of\nthe model with the head inside, which drafts whenever it is loaded. Replies "
    "stay exactly the same.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexamples:\n  edgeinfer "
    "distill eagle my-bundle my-bundle-with-head --text texts.jsonl --minutes 60\n  edgeinfer distill "
    "eagle CHECKPOINT my-bundle --text texts.jsonl --bits 4\n"
)
_DFLASH = (
    "Train a DFlash drafter for a model: a few layers that read the model's hidden states and draft a whole "
    "block of tokens in\none pass. OUT is a bundle of the model with the drafter inside, which drafts whenever "
    "it is loaded. Replies stay exactly\nthe same.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexamples:\n"
    "  edgeinfer distill dflash my-bundle my-bundle-with-drafter --text texts.jsonl --minutes 60\n  edgeinfer "
    "distill dflash CHECKPOINT my-bundle --text texts.jsonl --layers 2 --block 8\n"
)
_HYDRA = (
    "Train a Hydra++ module for a model: a layer that reads the model's hidden states, and for each token of a draft a "
    "small\nhead, which also sees the tokens before its own. OUT is a bundle of the model with the module inside, "
    "which drafts\nwhenever it is loaded. Replies stay exactly the same.\nNeeds an extra: pip install "
    "'edgeinfer[train]'.\n\nexample:\n  edgeinfer distill hydra-plus my-bundle my-bundle-with-heads --text "
    "texts.jsonl --minutes 60\n"
)
_MINUTES = 30.0
_MEASURED_PROMPTS = 12
_EAGLE_OPTIONS, _DFLASH_OPTIONS = ("tokens", "depth", "samples"), ("layers", "block", "glancing", "samples")
_HYDRA_OPTIONS = ("tokens", "count", "layers", "samples")
_TOKENS = "number of tokens that it can draft, the most frequent ones (default: 32000, or half of all)"


def add_module_parsers(commands: Subparsers) -> None:
    """Adds the subcommands."""
    parser = add_command(
        commands, "eagle", _execute_eagle, _EAGLE, help="an EAGLE-3 head, which reads a model's states"
    )
    _add_model(parser, "head")
    parser.add_argument("--tokens", type=int, metavar="N", help=_TOKENS)
    text = "number of tokens that the head learns to draft one after the other (default: 5)"
    parser.add_argument("--depth", type=int, metavar="N", help=text)
    _add_training(parser)
    parser.advanced("--tokens", "--depth")
    parser = add_command(commands, "dflash", _execute_dflash, _DFLASH, help="a drafter of whole blocks of tokens")
    _add_model(parser, "drafter")
    parser.add_argument("--layers", type=int, metavar="N", help="number of the drafter's layers (default: 1)")
    text = "number of tokens of a block, of which all but the first are drafted (default: 8)"
    parser.add_argument("--block", type=int, metavar="N", help=text)
    text = "share of wrong tokens that are shown to the drafter while it learns, at first (default: 0; Falcon has 0.4)"
    parser.add_argument("--glancing", type=float, metavar="SHARE", help=text)
    _add_training(parser)
    parser.advanced("--glancing")
    parser = add_command(commands, "hydra-plus", _execute_hydra, _HYDRA, help="heads over a layer that reads the text")
    _add_model(parser, "module")
    parser.add_argument("--count", type=int, metavar="N", help="number of heads, one for each token (default: 4)")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers of each head (default: 4)")
    parser.add_argument("--tokens", type=int, metavar="N", help=_TOKENS)
    _add_training(parser)
    parser.advanced("--tokens", "--layers")


def _add_model(parser: Parser, what: str) -> None:
    """Adds the model, the bundle to make and the bits."""
    text = "bundle or checkpoint directory, or hub id; tales is the built-in model"
    parser.add_argument("target", metavar="MODEL", help=text)
    text = "bundle directory to make: a copy of MODEL, or its export where it is a checkpoint"
    parser.add_argument("out", metavar="OUT", type=Path, help=text)
    text = f"bits per weight of the {what}, and of the model where it is a checkpoint (default: 4)"
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=4, help=text)


def _add_training(parser: Parser) -> None:
    """Adds how a module is trained and reported."""
    add_training_options(parser, _MINUTES)
    text = "number of tokens that the model writes as training text (default: depends on the time limit)"
    parser.add_argument("--samples", type=int, metavar="N", help=text)
    add_json_option(parser)


def _execute_eagle(args: argparse.Namespace) -> int:
    """Runs the subcommand."""

    def prepare() -> Train:
        from edgeinfer.export.training.eagle import EagleOptions, train_eagle

        options = EagleOptions(**given(args, _EAGLE_OPTIONS))
        return lambda target, text, work, replier, bar: train_eagle(target, text, options, work, replier, bar)

    return _make(args, "eagle", prepare)


def _execute_dflash(args: argparse.Namespace) -> int:
    """Runs the subcommand."""

    def prepare() -> Train:
        from edgeinfer.export.training.dflash import DflashOptions, train_dflash

        options = DflashOptions(**given(args, _DFLASH_OPTIONS))
        return lambda target, text, work, replier, bar: train_dflash(target, text, options, work, replier, bar)

    return _make(args, "dflash", prepare)


def _execute_hydra(args: argparse.Namespace) -> int:
    """Runs the subcommand."""

    def prepare() -> Train:
        from edgeinfer.export.training.hydra import HydraOptions, train_hydra

        options = HydraOptions(**given(args, _HYDRA_OPTIONS))
        return lambda target, text, work, replier, bar: train_hydra(target, text, options, work, replier, bar)

    return _make(args, "hydra-plus", prepare)


def _make(args: argparse.Namespace, drafter: str, prepare: Callable[[], Train]) -> int:
    """Trains a module, makes the bundle, measures and reports."""
    source = hub.find(args.target)
    require_free(args.out)
    require_native()
    with torch_needed():
        from edgeinfer.bundle.opening import open_bundle
        from edgeinfer.export.drafters.opening import require_attachable
        from edgeinfer.export.training.models import load_target
        from edgeinfer.export.training.text import TextSource
        from edgeinfer.export.training.trainer import find_device

        if hub.is_bundle(source):
            require_attachable(open_bundle(source))
        train = prepare()
        target = load_target(source, find_device(args.device or "auto"), any_family=True)
        text = TextSource(tuple(args.text), target)
        with working_folder(args) as work, progress_bar(enabled=not args.json) as bar:
            with repliers(source) as replier:
                trained = train(target, text, work, replier, bar)
            facts = _finish(args, source, drafter, trained, bar)
    report(args, facts, [*_place_rows(trained.before, trained.after), *speed_rows(facts)])
    return 0


def _place_rows(before: Sequence[float], after: Sequence[float]) -> list[tuple[str, ...]]:
    """Returns what a report's table says of the tokens of a draft."""
    places = enumerate(zip(before, after, strict=True), 1)
    rows = [(f"drafted token {place}", f"{old:.3f}", f"{new:.3f}") for place, (old, new) in places]
    return [("right behind right ones", "before", "after"), *rows]


def _finish(
    args: argparse.Namespace, source: Path, drafter: str, trained: ModuleTraining, bar: Progress | None
) -> dict[str, Any]:
    """Makes the bundle, measures what the module brings on the engine, and returns the report."""
    from edgeinfer.bundle.opening import NESTED, open_bundle
    from edgeinfer.export.drafters.opening import attach_drafter
    from edgeinfer.export.exporter import export_checkpoint
    from edgeinfer.export.options import ExportConfig
    from edgeinfer.tools.distilling import measure_drafter

    if hub.is_bundle(source):
        attach_drafter(open_bundle(source), trained.checkpoint, args.out, ExportConfig(bits=args.bits), bar)
    else:
        export_checkpoint(source, args.out, ExportConfig(bits=args.bits, drafter=trained.checkpoint), bar)
    size = sum(file.stat().st_size for file in (args.out / NESTED).iterdir())
    prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
    figures = measure_drafter(args.out, None, prompts, who=drafter, progress=bar)
    return {"bundle": str(args.out), "bytes": size} | trained.facts() | {"engine": asdict(figures)}
