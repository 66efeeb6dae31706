"""`edgeinfer eval`: how well a model predicts a text, alone or compared with a reference."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.inputs import read_paragraphs, read_text
from edgeinfer.apps.cli.options import add_model_option, add_options, given_options
from edgeinfer.apps.cli.output import Progress, print_result, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.errors import PromptError, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import LoadOptions

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.tools import Divergence, Evaluation


_DESCRIPTION = """\
Measure how well a model predicts a text, and what quantization did to it.
  ppl     perplexity
  kld     Kullback-Leibler divergence of its predictions from a reference's, in nats
  agree   how often it predicts the same next token as the reference

The reference is usually the checkpoint that the model was made from, which is exported to a temporary 32-bit bundle.

example:
  edgeinfer eval kld -m my-bundle --reference my-checkpoint --text book.txt
"""
_WHAT = ("ppl", "kld", "agree")
_OPTIONS = ("memory", "kv", "threads", "backend", "native", "device")


def add_eval(commands: Subparsers) -> None:
    parser = add_command(commands, "eval", execute, _DESCRIPTION)
    parser.add_argument("what", choices=_WHAT, help="what to measure")
    add_model_option(parser)
    text = "model to compare with, with the same tokenizer: bundle directory, checkpoint directory or hub id"
    parser.add_argument("--reference", metavar="MODEL", help=text)
    _add_text_options(parser)
    text = "number of likeliest tokens whose overlap is counted (default: 10)"
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help=text)
    text = "memory budget for the model, such as 600MB; the reference comes on top"
    add_options(
        parser, LoadOptions, _OPTIONS, help={"memory": text, "kv": "KV cache data type of the model (default: floats)"}
    )
    add_json_option(parser)


def _add_text_options(parser: Parser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to predict")
    parts = group.add_mutually_exclusive_group()
    text = "text that separates documents, which are read independently (default: <|endoftext|>)"
    parts.add_argument("--separator", default="<|endoftext|>", metavar="TEXT", help=text)
    text = "read every paragraph independently, with empty lines between them"
    parts.add_argument("--paragraphs", action="store_true", help=text)
    text = "context window in tokens (default: 2048, or less if a model's is smaller)"
    group.add_argument("-c", "--context", type=int, metavar="N", help=text)
    group.add_argument(
        "--tokens", type=int, metavar="N", help="maximum number of tokens to read (default: the whole text)"
    )


def execute(args: argparse.Namespace) -> int:
    if args.reference is None and args.what != "ppl":
        raise UsageError(f"eval {args.what} needs a reference model.", "Name the original model with --reference.")
    options = given_options(args, _OPTIONS)
    LoadOptions(**options)
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
    title = args.model or hub.BUILTIN
    return print_result(args, result.to_dict(), lambda: print_table(_rows(args.what, result), title=title))


def _texts(args: argparse.Namespace) -> list[str]:
    if args.paragraphs:
        return read_paragraphs(args.text)
    if not args.separator:
        raise UsageError("--separator is empty.", "Leave it out, or use --paragraphs.")
    texts = [text.strip() for text in read_text(args.text).split(args.separator) if text.strip()]
    if not texts:
        raise PromptError(f"{args.text} contains no text.", "Name a file that contains text.")
    return texts


@contextmanager
def _reference(source: str | None, progress: Progress | None) -> Iterator[Path | None]:
    """Give the bundle to compare with; a checkpoint is exported in float32 and removed afterwards."""
    found = None if source is None else hub.find(source)
    if found is None or hub.is_bundle(found):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="edgeinfer-eval-") as folder:
        from edgeinfer.export.exporter import export_checkpoint
        from edgeinfer.export.options import ExportConfig

        yield export_checkpoint(found, Path(folder) / "reference", ExportConfig(bits=32), progress)


def _rows(what: str, result: Evaluation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    if result.divergence is not None and what != "ppl":
        rows += (_divergence_rows if what == "kld" else _agreement_rows)(result.divergence)
    rows.append(("perplexity", f"{result.perplexity:.4f} ± {result.perplexity_error:.4f}"))
    if result.divergence is not None:
        base = result.divergence.reference_perplexity
        rows.append(("  of the reference", f"{base:.4f} ({result.perplexity / base - 1:+.2%})"))
    windows = "1 window" if result.windows == 1 else f"{result.windows:,} windows"
    rows.append(("tokens predicted", f"{len(result.logprobs):,} in {windows}"))
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
    shared = (f"overlap of the {divergence.top} likeliest", f"{figures['top_overlap']:.2%}")
    return [("same next token", same), shared, ("KL divergence", f"{divergence.mean:.6f} nats")]
