"""`edgeinfer distill`: trains drafters, and whatever else makes a model faster."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.output import Progress, print_json, print_note, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.bundle.writing import write_file
from edgeinfer.core.errors import StorageError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.export.training.distill import Distilled
    from edgeinfer.export.training.drafter import DrafterTraining, StudentSize
    from edgeinfer.export.training.models import Target
    from edgeinfer.export.training.text import TextSource
    from edgeinfer.tools.distilling import ModelReplier


_EXTRA = "Needs an extra: pip install 'edgeinfer[train]'."
_DESCRIPTION = f"""\
Train what makes a model faster: a tiny drafter, early exits, and more.
{_EXTRA} Run the same command again to resume an interrupted training.

example:
  edgeinfer distill drafter my-bundle my-drafter --text texts.jsonl --minutes 30 --into my-bundle-2
"""
_DRAFTER = f"""\
Train a tiny drafter for a model, in the size that pays off on this device, on your text and on text that the model
writes. Replies stay exactly the same, since a drafter only makes them faster.
{_EXTRA}

examples:
  edgeinfer distill drafter my-bundle my-drafter --text texts.jsonl --minutes 30
  edgeinfer distill drafter my-bundle my-drafter --text texts.jsonl --into my-bundle-that-drafts
"""
_SORTED = f"""\
Train a drafter of nested depths. Each of its layers learns to predict tokens, and drafting goes deeper only where the
shallower prediction is uncertain. It drafts for every model with the same tokenizer.
{_EXTRA}

example:
  edgeinfer distill sorted my-bundle my-drafter --size 128x3 --text texts.jsonl --minutes 30
"""
_EAGLE = f"""\
Train an EAGLE-3 head for a model: one layer that reads the model's hidden states and drafts from them. OUT is a bundle
of the model with the head inside, which drafts whenever it is loaded. Replies stay exactly the same.
{_EXTRA}

examples:
  edgeinfer distill eagle my-bundle my-bundle-with-head --text texts.jsonl --minutes 60
  edgeinfer distill eagle CHECKPOINT my-bundle --text texts.jsonl --bits 4
"""
_DFLASH = f"""\
Train a DFlash drafter for a model: a few layers that read the model's hidden states and draft a whole block of tokens
in one pass. OUT is a bundle of the model with the drafter inside, which drafts whenever it is loaded. Replies stay
exactly the same.
{_EXTRA}

examples:
  edgeinfer distill dflash my-bundle my-bundle-with-drafter --text texts.jsonl --minutes 60
  edgeinfer distill dflash CHECKPOINT my-bundle --text texts.jsonl --layers 2 --block 8
"""
_HYDRA_PLUS = f"""\
Train a Hydra++ module for a model: a layer that reads the model's hidden states, and for each token of a draft a small
head, which also sees the tokens before its own. OUT is a bundle of the model with the module inside, which drafts
whenever it is loaded. Replies stay exactly the same.
{_EXTRA}

example:
  edgeinfer distill hydra-plus my-bundle my-bundle-with-heads --text texts.jsonl --minutes 60
"""
_HEADS = f"""\
Train small heads that predict further tokens from a model's hidden states: Medusa heads, one per position, or Hydra
heads, which also see the tokens drafted so far. They become part of the bundle and draft whenever it is loaded. Replies
stay exactly the same.
{_EXTRA}

example:
  edgeinfer distill heads my-bundle my-bundle-with-heads --kind hydra --text texts.jsonl
"""
_ROUTERS = f"""\
Train routers that decide from a prompt which layers its reply needs (FiRST), for --compute routers. Replies that skip
layers are faster, but differ from the whole model's.
{_EXTRA}

example:
  edgeinfer distill routers my-bundle my-bundle-2 --text texts.jsonl --keep 0.75
"""
_EXITS = f"""\
Train a small checkpoint so that its early layers predict what the whole model does. It can then draft for itself, or
answer with fewer layers, while the whole model stays close to its original predictions. The result is a checkpoint for
edgeinfer export.
{_EXTRA}

example:
  edgeinfer distill exits my-checkpoint tuned --text texts.jsonl --steps 500
"""
_TRAIN = ("torch", "transformers", "safetensors", "onnx", "scipy")
# Rows of timed passes, their context and repetitions: the least time counts, as other programs only ever add.
_PASSES, _PAST, _REPEATS = (1, 2, 4, 8, 16), 64, 15
# Milliseconds for a billion weights where nothing was measured; passes over more rows in proportion to one.
_MS_PER_BILLION = 80.0
_NOMINAL = {1: 1.0, 4: 1.1, 8: 1.2, 16: 1.6}
_MEASURED_PROMPTS = 12


def add_distill(commands: Subparsers) -> None:
    """Add the subcommand with its own subcommands."""
    parser = commands.add_parser("distill", description=_DESCRIPTION)
    kinds = parser.add_subparsers(title="what to make", metavar="KIND", required=True)
    drafter = add_command(kinds, "drafter", _distill_drafter, _DRAFTER, help="a tiny model that drafts")
    _add_drafter_options(drafter)
    text = "width and number of layers, such as 128x1 (default: the best for this device, as measured)"
    drafter.add_argument("--size", metavar="WxL", help=text)
    _add_module_parsers(kinds)
    _add_exits_parser(kinds)
    nested = add_command(kinds, "sorted", _distill_drafter, _SORTED, help="a drafter with nested depths")
    _add_drafter_options(nested)
    nested.add_argument("--size", default="128x3", metavar="WxL", help="width and number of layers (default: 128x3)")
    nested.set_defaults(nested=True)
    _add_heads_parsers(kinds)


def _add_drafter_options(parser: Parser) -> None:
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
    _add_training_options(parser, 20.0, "depends on the time limit")
    parser.advanced("--head-bits", "--no-keep-small")


def _add_module_parsers(kinds: Subparsers) -> None:
    tokens = "number of tokens that it can draft, the most frequent ones (default: 32000, or half of all)"
    parser = _module_parser(kinds, "eagle", "head", _EAGLE, "an EAGLE-3 head, which reads a model's states")
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    text = "number of tokens that the head learns to draft one after the other (default: 5)"
    parser.add_argument("--depth", type=int, metavar="N", help=text)
    parser.advanced("--tokens", "--depth")
    parser = _module_parser(kinds, "dflash", "drafter", _DFLASH, "a drafter of whole blocks of tokens")
    parser.add_argument("--layers", type=int, metavar="N", help="number of the drafter's layers (default: 1)")
    text = "number of tokens of a block, of which all but the first are drafted (default: 8)"
    parser.add_argument("--block", type=int, metavar="N", help=text)
    parser = _module_parser(kinds, "hydra-plus", "module", _HYDRA_PLUS, "heads over a layer that reads the text")
    parser.add_argument("--count", type=int, metavar="N", help="number of heads, one for each token (default: 4)")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers of each head (default: 4)")
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    parser.advanced("--tokens", "--layers")


def _module_parser(kinds: Subparsers, kind: str, what: str, description: str, help: str) -> Parser:
    parser = add_command(kinds, kind, _distill_module, description, help=help)
    text = "bundle or checkpoint directory, or hub id; tales is the built-in model"
    parser.add_argument("target", metavar="MODEL", help=text)
    text = "bundle directory to make: a copy of MODEL, or its export where it is a checkpoint"
    parser.add_argument("out", metavar="OUT", type=Path, help=text)
    text = f"bits per weight of the {what}, and of the model where it is a checkpoint (default: 4)"
    parser.add_argument("--bits", type=int, choices=(4, 8, 32), default=4, help=text)
    _add_training_options(parser, 30.0, "depends on the time limit")
    parser.set_defaults(kind=kind)
    return parser


def _add_heads_parsers(kinds: Subparsers) -> None:
    parser = add_command(kinds, "heads", _distill_heads, _HEADS, help="heads that draft from a model's hidden states")
    parser.add_argument("--kind", choices=("medusa", "hydra"), required=True, help="what to train: medusa or hydra")
    parser.add_argument("--count", type=int, metavar="N", help="number of tokens to predict ahead (default: 3)")
    text = "number of tokens to choose from, the most frequent ones (default: all; with hydra 1024)"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    routers = add_command(kinds, "routers", _distill_heads, _ROUTERS, help="routers that choose layers for each prompt")
    routers.add_argument("--keep", type=float, metavar="X", help="average share of layers to keep (default: 0.75)")
    routers.set_defaults(kind="routers")
    for each, samples in ((parser, "a tenth of what the training reads"), (routers, "none")):
        text = "bundle directory, or hub id, of the model (tales is the built-in one)"
        each.add_argument("target", metavar="TARGET", help=text)
        text = "bundle directory to make, a copy of TARGET; or TARGET itself, to replace what it has"
        each.add_argument("out", metavar="OUT", type=Path, help=text)
        _add_training_options(each, None, samples)


def _add_exits_parser(kinds: Subparsers) -> None:
    parser = add_command(kinds, "exits", _distill_exits, _EXITS, help="early exits for a checkpoint")
    text = "checkpoint directory or hub id; a bundle works too, with its rounded weights"
    parser.add_argument("target", metavar="CHECKPOINT", help=text)
    parser.add_argument("out", metavar="OUT", type=Path, help="checkpoint directory to make")
    _add_training_options(parser)
    text = "layer dropout rate of the last layer; it is lower for earlier layers (default: 0.1)"
    parser.add_argument("--dropout", type=float, metavar="P", help=text)
    text = "weight of the exits' loss relative to the whole model's (default: 1)"
    parser.add_argument("--exit-weight", type=float, metavar="X", help=text)
    text = "weight of the loss that keeps the whole model close to its original predictions (default: 1)"
    parser.add_argument("--guard", type=float, metavar="X", help=text)


def _add_training_options(parser: Parser, minutes: float | None = None, samples: str = "") -> None:
    """Add the options of every training; `minutes` is None where one goes by steps only, `samples` empty where the
    model writes nothing."""
    group = parser.add_argument_group("training")
    text = 'training text similar to real use: UTF-8 .txt files, or .jsonl files with "text" or "messages" on each line'
    group.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    length = group.add_mutually_exclusive_group()
    if minutes is not None:
        text = f"time limit for the whole training, in minutes (default: {minutes:g})"
        length.add_argument("--minutes", type=float, metavar="M", help=text)
    length.add_argument("--steps", type=int, metavar="N", help="number of training steps, instead of a time limit")
    group.add_argument("--learning-rate", type=float, metavar="X", help="peak learning rate")
    group.add_argument("--rows", type=int, metavar="N", help="batch size, in sequences")
    group.add_argument("--length", type=int, metavar="N", help="sequence length in tokens")
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")
    text = "device to train on (default: CUDA if available)"
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help=text)
    text = "number of CPU threads; the same number makes results reproducible (default: PyTorch's)"
    group.add_argument("-t", "--threads", type=int, metavar="N", help=text)
    text = "folder for checkpoints of the training, to resume it (default: OUT.work, removed at the end)"
    group.add_argument("--work", type=Path, metavar="DIR", help=text)
    text = "file to write all figures to as JSON, losses included"
    group.add_argument("--report", type=Path, metavar="FILE", help=text)
    parser.advanced("--learning-rate", "--rows", "--length", "--seed", "--report")
    if samples:
        text = f"number of tokens that the model writes as training text (default: {samples})"
        parser.add_argument("--samples", type=int, metavar="N", help=text)
    add_json_option(parser)


@contextlib.contextmanager
def _torch_needed() -> Iterator[None]:
    """Name the extra to install where a module is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TRAIN:
            raise
        hint = "pip install 'edgeinfer[train]'"
        raise UsageError(f"Training needs {error.name}, which is not installed.", hint) from None


def _given(args: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """The fields of a training's options that the user gave."""
    found = {field.name: getattr(args, field.name, None) for field in fields(options) if field.name != "size"}
    return {name: value for name, value in found.items() if value is not None}


def _options(args: argparse.Namespace, *kinds: Any) -> Any:
    """The options of the training that the user named."""
    kind = next(each for each in kinds if each.kind == args.kind)
    return kind(**_given(args, kind))


def _require_free(out: Path) -> None:
    """Refuse, before hours of work, a path that could not be written after them."""
    if out.exists():
        raise StorageError(f"{out} already exists.", "Choose another name, or remove it.")


@contextlib.contextmanager
def _training(
    args: argparse.Namespace, source: Path, device: str, *, any_family: bool = False
) -> Iterator[tuple[Target, TextSource, Path, Progress | None]]:
    """Yield target, text, working folder and progress; the folder is removed at the end, unless the user named it."""
    from edgeinfer.export.training.models import load_target
    from edgeinfer.export.training.text import TextSource
    from edgeinfer.export.training.trainer import find_device

    target = load_target(source, find_device(device), any_family=any_family)
    text = TextSource(tuple(args.text), target)
    folder = args.work or args.out.with_name(f"{args.out.name}.work")
    with progress_bar(enabled=not args.json) as bar:
        yield target, text, folder, bar
    if args.work is None:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _replier(source: Path) -> Iterator[ModelReplier | None]:
    """Yield an engine that draws the target's replies where it is a bundle, which is much faster than torch."""
    from edgeinfer.tools.distilling import ModelReplier

    if not hub.is_bundle(source):
        yield None
        return
    with edgeinfer.load(source, speculation="off", remember=False) as model:
        yield ModelReplier(model)


def _report(args: argparse.Namespace, facts: Mapping[str, Any], rows: list[tuple[str, ...]]) -> None:
    """Write and print the results; losses of single steps go to the file only."""
    if args.report is not None:
        import json

        write_file(args.report, (json.dumps(facts, indent=1) + "\n").encode())
    if args.json:
        print_json({name: value for name, value in facts.items() if name != "losses"})
    else:
        print_table(rows)


def _engine_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if "engine" not in facts:
        return []
    found = facts["engine"]
    accepted = f"{found['acceptance_rate']:.3f}, {found['mean_accepted_length']:.2f} tokens a pass"
    plain, drafted = found["plain_tokens_per_second"], found["tokens_per_second"]
    return [
        ("accepted on the engine", accepted),
        ("tokens per second", f"{plain:.0f} plain, {drafted:.0f} drafted"),
        ("speed-up", f"{found['speedup']:.2f}"),
    ]


def _figure_rows(before: Mapping[Any, float], after: Mapping[Any, float], name: str = "{}") -> list[tuple[str, ...]]:
    rows = [(name.format(key), f"{value:.3f}", f"{after[key]:.3f}") for key, value in before.items()]
    return [("on validation text", "before", "after"), *rows]


def _distill_drafter(args: argparse.Namespace) -> int:
    """Trains, exports, measures and reports a drafter, of nested depths or not."""
    source = hub.find(args.target)
    _require_free(args.out)
    if args.into is not None:
        _require_free(args.into)
        if not hub.is_bundle(source):
            hint = "Export it first, or leave --into out."
            raise UsageError(f"{args.target} is a checkpoint, which cannot contain a drafter.", hint)
    with _torch_needed():
        from edgeinfer.export.training.drafter import DrafterOptions, train_drafter

        options = DrafterOptions(size=_drafter_size(args, source), **_given(args, DrafterOptions))
        with _training(args, source, options.device) as (target, text, work, bar), _replier(source) as replier:
            trained = train_drafter(target, text, options, work, replier, bar)
            facts = _export_drafter(args, source, trained, bar)
    stages = facts["acceptance"].items()
    rows = [(f"acceptance {name}", f"{a['agreement']:.3f}, {a['mean_accepted_length']:.2f}") for name, a in stages]
    size = ("size", f"{trained.size.width}x{trained.size.layers}")
    _report(args, facts, [size, *rows, *_engine_rows(facts)])
    return 0


def _drafter_size(args: argparse.Namespace, source: Path) -> StudentSize:
    """The size that the user gave, or the one that pays on this device."""
    from edgeinfer.bundle.opening import open_bundle
    from edgeinfer.export.source.hf_config import read_config
    from edgeinfer.export.training.drafter import StudentSize, TargetCosts, choose_size

    if args.size is not None:
        return StudentSize.parse(args.size)
    if hub.is_bundle(source):
        manifest = open_bundle(source).manifest
        vocabulary, layers, weights = manifest.geometry.vocab_size, manifest.geometry.num_layers, manifest.parameters
        with edgeinfer.load(source, speculation="off", remember=False) as model:
            times = edgeinfer.tools.measure_passes(model, _PASSES, past=_PAST, repeats=_REPEATS)
        costs = {rows: min(ms) for rows, ms in times.items()}
    else:
        config = read_config(source)
        names = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size")
        vocabulary, layers, width, inner = map(config.integer, names)
        weights = vocabulary * width + layers * (2 * width**2 + 3 * width * inner)
        costs = {rows: share * weights * _MS_PER_BILLION / 1e9 for rows, share in _NOMINAL.items()}
    choice = choose_size(TargetCosts(costs, weights, layers), vocabulary)
    if not args.json:
        print_note(
            f"A drafter of {choice.size.width}x{choice.size.layers} may make the model {choice.speedup:.2f} times as "
            f"fast, with {choice.acceptance:.0%} of its tokens accepted."
        )
    return choice.size


def _export_drafter(
    args: argparse.Namespace, source: Path, trained: DrafterTraining, bar: Progress | None
) -> dict[str, Any]:
    """Export a drafter, measure it on the engine and nest it in its target; return the report."""
    from edgeinfer.bundle.opening import add_figures, exit_figure, nest_drafter, open_bundle
    from edgeinfer.export.exporter import export_checkpoint
    from edgeinfer.export.options import ExportConfig
    from edgeinfer.tools.distilling import measure_drafter

    # At 8 bits the small layers would stay float32, and all layers of a drafter are small.
    keep = args.keep_small and args.bits == 4
    head = args.head_bits or args.bits
    config = ExportConfig(bits=args.bits, head_bits=head, keep_small=keep, calibration="none", name=args.out.name)
    export_checkpoint(trained.checkpoint, args.out, config, bar)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    if trained.depths:
        agreements = {exit_figure(depth): each.agreement for depth, each in trained.depths.items()}
        add_figures(open_bundle(args.out), agreements)
    facts = {"bundle": str(args.out), "bytes": size} | trained.facts()
    if hub.is_bundle(source):
        prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
        facts["engine"] = asdict(measure_drafter(source, args.out, prompts, progress=bar))
    if args.into is not None:
        nest_drafter(source, args.out, args.into)
        facts["into"] = str(args.into)
    return facts


def _distill_module(args: argparse.Namespace) -> int:
    """Train a module that reads hidden states, make the bundle with it, measure and report."""
    from edgeinfer.tools.distilling import measure_drafter, require_native

    source = hub.find(args.target)
    _require_free(args.out)
    require_native()
    with _torch_needed():
        from edgeinfer.bundle.opening import NESTED, open_bundle
        from edgeinfer.export.drafters.opening import attach_drafter, require_attachable
        from edgeinfer.export.exporter import export_checkpoint
        from edgeinfer.export.options import ExportConfig
        from edgeinfer.export.training.dflash import DflashOptions
        from edgeinfer.export.training.distill import distill
        from edgeinfer.export.training.eagle import EagleOptions
        from edgeinfer.export.training.hydra_plus import HydraPlusOptions
        from edgeinfer.export.training.modules import ModuleTask

        if hub.is_bundle(source):
            require_attachable(open_bundle(source))
        options = _options(args, EagleOptions, DflashOptions, HydraPlusOptions)
        with _training(args, source, options.device, any_family=True) as (target, text, work, bar):
            with _replier(source) as replier:
                trained: Distilled[ModuleTask] = distill(target, text, options, work, replier, bar)
            checkpoint = work / "checkpoint"
            trained.task.save(checkpoint)
            if hub.is_bundle(source):
                attach_drafter(open_bundle(source), checkpoint, args.out, ExportConfig(bits=args.bits), bar)
            else:
                export_checkpoint(
                    source, args.out, ExportConfig(args.bits, calibration="none", drafter=checkpoint), bar
                )
            prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
            figures = measure_drafter(args.out, None, prompts, who=args.kind, progress=bar)
    size = sum(file.stat().st_size for file in (args.out / NESTED).iterdir())
    facts = {"bundle": str(args.out), "bytes": size, "shape": trained.task.shape.facts} | trained.facts()
    facts["engine"] = asdict(figures)
    _report(args, facts, [*_figure_rows(trained.before, trained.after), *_engine_rows(facts)])
    return 0


def _distill_heads(args: argparse.Namespace) -> int:
    """Train heads or routers, add them to the bundle or to a copy, measure heads and report."""
    from edgeinfer.bundle.additions import add_heads, copy_with_heads
    from edgeinfer.tools.distilling import measure_drafter

    source = hub.find(args.target)
    if not hub.is_bundle(source):
        raise UsageError(f"{args.target} is not a bundle, and only bundles can contain heads.", "Export it first.")
    in_place = args.out.exists() and args.out.resolve() == source.resolve()
    if not in_place:
        _require_free(args.out)
    with _torch_needed():
        from edgeinfer.export.training.distill import distill
        from edgeinfer.export.training.heads import HydraOptions, MedusaOptions
        from edgeinfer.export.training.routers import RoutersOptions

        options = _options(args, MedusaOptions, HydraOptions, RoutersOptions)
        with _training(args, source, options.device) as (target, text, work, bar), _replier(source) as replier:
            trained = distill(target, text, options, work, replier, bar)
            notes = {name: f"{value:.4f}" for name, value in trained.after.items()} | {"target": target.digest}
            heads = trained.task.heads(notes)
            if in_place:
                add_heads(args.out, heads)
            else:
                copy_with_heads(source, args.out, heads)
    facts = {"bundle": str(args.out), "kind": args.kind, "bytes": len(heads.to_bytes())} | trained.facts()
    if args.kind != "routers":
        prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
        facts["engine"] = asdict(measure_drafter(args.out, None, prompts, who=args.kind))
    _report(args, facts, [*_figure_rows(trained.before, trained.after), *_engine_rows(facts)])
    if args.kind == "routers" and not args.json:
        print_note(f"Use them: edgeinfer run -m {args.out} --compute routers PROMPT")
    return 0


def _distill_exits(args: argparse.Namespace) -> int:
    """Train early exits of a checkpoint."""
    source = hub.find(args.target)
    _require_free(args.out)
    with _torch_needed():
        from edgeinfer.export.training.exits import ExitsOptions, tune_exits

        options = ExitsOptions(**_given(args, ExitsOptions))
        with _training(args, source, options.device) as (target, text, work, bar):
            tuned = tune_exits(target, text, options, args.out, work, bar)
    rows = _figure_rows(tuned.before, tuned.after, "agreement after layer {}")
    rows.append(("perplexity of the whole model", f"{tuned.perplexity_before:.3f}", f"{tuned.perplexity_after:.3f}"))
    _report(args, tuned.facts(), rows)
    if not args.json:
        print_note(f"Export it: edgeinfer export {args.out} BUNDLE")
    return 0
