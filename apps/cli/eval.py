"""`edgeinfer eval`: how well a model predicts a text, alone or beside a reference."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.options import add_model_option, add_options, given_options
from edgeinfer.apps.cli.output import Progress, print_json, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option, missing_extra
from edgeinfer.apps.cli.text_files import read_paragraphs, read_text
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import PromptError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.tools import Divergence, Evaluation

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Measure how well a model predicts a text, and what quantization did to it.
  ppl     perplexity
  kld     how far its predictions are from a reference's: Kullback-Leibler divergence, in nats
  agree   how often it expects the same next token as the reference

The reference is usually the checkpoint that the model was made from: it is exported to a temporary 32-bit bundle.

example:
  edgeinfer eval kld -m my-bundle --reference my-checkpoint --text book.txt
"""
_WHAT = ("ppl", "kld", "agree")
_OPTIONS = ("memory", "kv", "threads", "backend", "native", "device")


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "eval", execute, _DESCRIPTION)
    parser.add_argument("what", choices=_WHAT, help="what to measure")
    add_model_option(parser)
    text = "bundle directory, checkpoint directory or hub id with the same tokenizer"
    parser.add_argument("--reference", metavar="MODEL", help=text)
    _add_text_options(parser)
    text = "likeliest tokens whose overlap is counted (default: 10)"
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help=text)
    text = "plan the model for this budget, such as 600MB; the reference comes on top of it"
    add_options(
        parser, LoadConfig, _OPTIONS, help={"memory": text, "kv": "type of the model's cache (default: floats)"}
    )
    add_json_option(parser)


def _add_text_options(parser: Parser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to read")
    parts = group.add_mutually_exclusive_group()
    text = "read the text between two of these by itself (default: <|endoftext|>)"
    parts.add_argument("--separator", default="<|endoftext|>", metavar="TEXT", help=text)
    text = "read every paragraph by itself; empty lines separate them"
    parts.add_argument("--paragraphs", action="store_true", help=text)
    text = "read texts in windows of this many tokens (default: 2048, or less if the models hold less)"
    group.add_argument("-c", "--context", type=int, metavar="N", help=text)
    group.add_argument(
        "--tokens", type=int, metavar="N", help="read no more tokens than this (default: the whole text)"
    )


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    if args.reference is None and args.what != "ppl":
        raise UsageError(f"eval {args.what} compares with a reference.", "Give --reference with the original model.")
    options = given_options(args, _OPTIONS)
    LoadConfig(**options)
    texts = _texts(args)
    with progress_bar(enabled=not args.json) as progress, _reference(args.reference, progress) as reference:
        result = edgeinfer.evaluate(
            args.model,
            texts,
            reference=reference,
            context=args.context,
            tokens=args.tokens,
            top=args.top_k,
            progress=progress,
            **options,
        )
    if args.json:
        print_json(result.to_dict())
    else:
        print_table(_rows(args.what, result), title=args.model or hub.BUILTIN)
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    if args.paragraphs:
        return read_paragraphs(args.text)
    if not args.separator:
        raise UsageError("The separator is empty.", "Leave it out, or give --paragraphs.")
    texts = [text.strip() for text in read_text(args.text).split(args.separator) if text.strip()]
    if not texts:
        raise PromptError(f"{args.text} has no text.", "Give a file with some.")
    return texts


@contextmanager
def _reference(source: str | None, progress: Progress | None) -> Iterator[Path | None]:
    """Gives the bundle to compare with; a checkpoint is exported in float32 and removed afterwards.

    Raises:
        UsageError: a checkpoint cannot be exported, as the extra for it is not installed.
    """
    found = None if source is None else hub.find(source)
    if found is None or hub.is_bundle(found):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="edgeinfer-eval-") as folder:
        try:
            from edgeinfer.export import ExportConfig, export_checkpoint

            bundle = export_checkpoint(found, Path(folder) / "reference", ExportConfig(bits=32), progress)
        except ModuleNotFoundError as error:
            raise missing_extra(error) from error
        yield bundle


def _rows(what: str, result: Evaluation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    if result.divergence is not None and what != "ppl":
        rows += (_divergence_rows if what == "kld" else _agreement_rows)(result.divergence)
    rows.append(("perplexity", f"{result.perplexity:.4f} ± {result.perplexity_error:.4f}"))
    if result.divergence is not None:
        base = result.divergence.reference_perplexity
        rows.append(("  of the reference", f"{base:.4f} ({result.perplexity / base - 1:+.2%})"))
    rows.append(("tokens predicted", f"{len(result.logprobs):,} in {result.windows:,} windows"))
    if result.weight_bytes is not None:
        rows.append(("weights", f"{format_size(result.weight_bytes)}, {result.bits_per_weight:.3f} bits each"))
    return rows


def _divergence_rows(divergence: Divergence) -> list[tuple[str, ...]]:
    figures: dict[str, Any] = divergence.to_dict()
    mean = f"{figures['mean']:.6f} ± {figures['standard_error']:.6f} nats"
    others = [(f"  {name}", f"{figures[name]:.6f}") for name in ("median", "p90", "p95", "p99", "max")]
    return [("KL divergence", mean), *others, ("same next token", f"{divergence.agreement:.2%}")]


def _agreement_rows(divergence: Divergence) -> list[tuple[str, ...]]:
    figures: dict[str, Any] = divergence.to_dict()
    same = f"{figures['same_top']:.2%} ± {figures['same_top_standard_error']:.2%}"
    shared = (f"{divergence.top} likeliest shared", f"{figures['top_overlap']:.2%}")
    return [("same next token", same), shared, ("KL divergence", f"{divergence.mean:.6f} nats")]
