"""`edgeinfer bench quality`: what fewer bits cost in predictions and answers; knows nothing of how it is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import names, numbers, require_place, write_results, write_text
from edgeinfer.apps.cli.output import progress_bar
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.bench.quality import Material
    from edgeinfer.apps.bench.quality_variants import Family
    from edgeinfer.apps.cli.parser import Parser, Subparsers

__all__ = ["add_quality_parser"]

_DESCRIPTION = """\
Compare smaller forms of a model with the model itself, against bytes: perplexity, Kullback-Leibler divergence, how
often the same next token is likeliest, and questions with one right answer. The table is Markdown.

examples:
  edgeinfer bench quality
  edgeinfer bench quality --checkpoint CHECKPOINT --bits 8,4,2 --kv int8,int4 --data DATA
  edgeinfer bench quality -m BUNDLE-8BIT -m MODEL.gguf --reference BUNDLE-32BIT --text BUILTIN_STORIES
"""
_TEXT = "tinystories/tinystories_train_part0.txt"


def add_quality_parser(kinds: Subparsers) -> None:
    """Adds the benchmark."""
    parser = add_command(kinds, "quality", _execute, "what fewer bits cost in predictions and answers", _DESCRIPTION)
    group = parser.add_argument_group("models (default: the built-in one with quantized caches)")
    text = "bundle directory, .gguf file or hub id; may be given several times"
    group.add_argument("-m", "--model", action="append", default=[], metavar="MODEL", help=text)
    text = "what the models are compared with (default: the first of them)"
    group.add_argument("--reference", metavar="MODEL", help=text)
    text = "export this in fewer bits, and compare with it in 32; may be given several times"
    group.add_argument("--checkpoint", action="append", type=Path, default=[], metavar="PATH", help=text)
    text = "of --checkpoint: 8, 4, 2, and 4small, 2small where layers of few weights are not kept wider (default: 8,4)"
    group.add_argument("--bits", type=names, default=("8", "4"), metavar="LIST", help=text)
    text = "mean bits per weight that an integer programme spends by a calibration text; needs --text or --data"
    group.add_argument("--budget-bits", type=_budgets, default=(), metavar="LIST", help=text)
    text = "of quantizing --bits: rtn, hqq; awq, gptq, which need --text or --data (default: the exporter's choice)"
    group.add_argument("--methods", type=names, default=(None,), metavar="LIST", help=text)
    text = "of llama.cpp's types, as Q4_0,Q4_K_M, with importance by a calibration text; needs --text or --data"
    group.add_argument("--types", type=names, default=(), metavar="LIST", help=text)
    text = "types of caches, with the first of --bits (default: none; of the built-in model int8,int4)"
    group.add_argument("--kv", type=names, metavar="LIST", help=text)
    text = "of --checkpoint's weights: 32, 64, 128 (default: the exporter's choice)"
    group.add_argument("--group-sizes", type=numbers, default=(None,), metavar="LIST", help=text)
    text = "of --checkpoint's weights: native, portable (default: the best there is)"
    group.add_argument("--layouts", type=names, default=(None,), metavar="LIST", help=text)
    _add_material(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw divergence against bytes")


def _add_material(parser: Parser) -> None:
    group = parser.add_argument_group("texts and questions (default: a few that are built in)")
    text = f"folder with {_TEXT} to read and tales_dialogues/ to answer"
    group.add_argument("--data", type=Path, metavar="PATH", help=text)
    group.add_argument("--text", type=Path, metavar="FILE", help="stories to read, between <|endoftext|>")
    group.add_argument("--stories", type=int, default=40, metavar="N", help="how many, from the end (default: 40)")
    group.add_argument("--skip", type=int, default=0, metavar="N", help="stories left out at the end (default: 0)")
    text = "stories from the beginning that --budget-bits calibrates by (default: 200)"
    group.add_argument("--calibration", type=int, default=200, metavar="N", help=text)
    group.add_argument("--calibration-tokens", type=int, metavar="N", help="of these stories (default: 16384)")
    text = "questions of each kind, 0 for none (default: 5)"
    group.add_argument("--questions", type=int, default=5, metavar="N", help=text)


def _budgets(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.quality import QualityResults, measure_family
    from edgeinfer.apps.bench.quality_report import quality_chart, quality_section
    from edgeinfer.apps.bench.render import section_markdown

    require_place(args.json, args.svg)
    families, (material, said) = _families(args), _material(args)
    results = QualityResults(text=said)
    with progress_bar() as bar:
        for family in families:
            results += measure_family(family, material, bar)
    data = results.to_dict()
    print(section_markdown(quality_section(data)), end="")
    write_results(args.json, "quality", data)
    if args.svg:
        from edgeinfer.apps.bench.plots import chart_svg

        write_text(args.svg, chart_svg(quality_chart(data["subjects"])))
    return 0


def _families(args: argparse.Namespace) -> list[Family]:
    from edgeinfer.apps.bench.quality_variants import builtin_family, checkpoint_family, given_family

    if args.reference and not args.model:
        raise UsageError("--reference is what models are compared with.", "Give some with -m.")
    families = [
        checkpoint_family(
            path.resolve(),
            args.bits,
            budgets=args.budget_bits,
            methods=args.methods,
            types=args.types,
            caches=args.kv or (),
            group_sizes=args.group_sizes,
            layouts=args.layouts,
        )
        for path in args.checkpoint
    ]
    families += [given_family(args.model, args.reference, args.kv or ())] if args.model else []
    return families or [builtin_family(*([args.kv] if args.kv else []))]


def _material(args: argparse.Namespace) -> tuple[Material, str]:
    """What is read and asked, and the name of what is read."""
    from edgeinfer.apps.bench.prompts import exact_prompts
    from edgeinfer.apps.bench.quality import Material
    from edgeinfer.apps.bench.texts import BUILTIN_STORIES, all_stories, read_stories

    if args.stories < 1 or min(args.skip, args.questions, args.calibration) < 0:
        raise UsageError("There must be at least one story.", "Give --stories 1 or more, other numbers 0 or more.")
    questions = tuple(exact_prompts(args.data, args.questions)) if args.questions else ()
    path = args.text or (args.data / _TEXT if args.data else None)
    calibrated = _calibrated(args)
    if path is None:
        if calibrated:
            raise UsageError(f"{calibrated} calibrates by a text.", "Give --text or --data.")
        stories = tuple(story.text for story in BUILTIN_STORIES)[: args.stories]
        return Material(stories, questions=questions), f"{len(stories)} built-in stories"
    stories = tuple(read_stories(path, args.stories, args.skip))
    calibration = tuple(all_stories(path)[: args.calibration]) if calibrated else ()
    if set(calibration) & set(stories):
        raise UsageError(f"{path} is too short to read and to calibrate by.", "Ask for fewer --stories.")
    return Material(stories, calibration, args.calibration_tokens, questions), f"{len(stories)} stories of {path.name}"


def _calibrated(args: argparse.Namespace) -> str:
    """The option that calibrates by a text; empty where none does."""
    if args.budget_bits:
        return "--budget-bits"
    return "--types" if args.types else "--methods" if {*args.methods} - {None, "rtn", "hqq"} else ""
