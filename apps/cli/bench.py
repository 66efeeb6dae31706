"""`edgeinfer bench`: a subcommand for each benchmark, generated from the options that it declares."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.bench_compute import add_compute_parser
from edgeinfer.apps.cli.bench_files import names, require_place, write_results, write_text
from edgeinfer.apps.cli.bench_memory import add_memory_parsers
from edgeinfer.apps.cli.bench_peers import add_peers_parser
from edgeinfer.apps.cli.bench_quality import add_quality_parser
from edgeinfer.apps.cli.bench_report import add_report_parser
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, command_line

if TYPE_CHECKING:
    from edgeinfer.apps.bench.benchmark import Benchmark
    from edgeinfer.apps.bench.spec_run import SpecOptions
    from edgeinfer.apps.cli.parser import Parser, Subparsers

__all__ = ["add_parser"]

_DESCRIPTION = """\
Measure on this device.

examples:
  edgeinfer bench speed
  edgeinfer bench curve --svg curve.svg
  edgeinfer bench spec
  edgeinfer bench memory plans
  edgeinfer bench quality --json quality.json
  edgeinfer bench report speed.json quality.json --out report.html
"""
_SPEC_DESCRIPTION = """\
Compare speculation with plain decoding: the same prompts, model and process, mode after mode in turns.

examples:
  edgeinfer bench spec --modes off,copy,copy+recycle,auto -t 1
  edgeinfer bench spec --data DATA --per-category 10 --json spec.json
  edgeinfer bench spec --checkpoint CHECKPOINT --expand --llamacpp -t 1

With --expand the figures are those of a cost-expanded model: a small trained checkpoint at the sizes of a larger one.
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand and its own."""
    from edgeinfer.apps.bench.registry import BENCHMARKS, GROUPS

    layout = argparse.RawDescriptionHelpFormatter
    text = "measure speed, what speculation gains, memory and quality"
    parser = commands.add_parser(
        "bench", help=text, description=_DESCRIPTION, formatter_class=layout, allow_abbrev=False
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    groups: dict[str, Subparsers] = {}
    for benchmark in BENCHMARKS:
        group, _, name = benchmark.name.rpartition(" ")
        if group and group not in groups:
            text, description = GROUPS[group]
            inner = kinds.add_parser(
                group, help=text, description=description, formatter_class=layout, allow_abbrev=False
            )
            groups[group] = inner.add_subparsers(title="parts", metavar="PART", required=True)
        _add_benchmark(groups[group] if group else kinds, name, benchmark)
    spec = add_command(kinds, "spec", execute_spec, "speculation against plain decoding", _SPEC_DESCRIPTION)
    add_load_options(spec)
    _add_workload(spec)
    _add_model_files(spec)
    spec.add_argument("--json", type=Path, metavar="FILE", help="write everything, samples included")
    add_memory_parsers(kinds)
    add_quality_parser(kinds)
    add_compute_parser(kinds)
    add_peers_parser(kinds)
    add_report_parser(kinds)


def _add_benchmark(commands: Subparsers, name: str, benchmark: Benchmark) -> None:
    from edgeinfer.apps.bench.benchmark import add_declared

    parser = add_command(commands, name, lambda args: _execute(benchmark, args), benchmark.help, benchmark.description)
    if benchmark.loads:
        add_load_options(parser)
    add_declared(parser, benchmark.options)
    if benchmark.files:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, samples included")
    if benchmark.chart:
        parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures")


def _execute(benchmark: Benchmark, args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.benchmark import BenchContext, options_from
    from edgeinfer.apps.bench.plots import chart_svg
    from edgeinfer.apps.bench.render import print_section, result_json

    options = options_from(benchmark.options, args)
    out, written, drawn = (getattr(args, name, None) for name in ("out", "json", "svg"))
    require_place(out, written, drawn)
    model, load = (args.model, load_options(args)) if benchmark.loads else (None, {})
    with progress_bar() as bar:
        shown: dict[str, Any] = {} if bar is None else {"progress": bar}
        context = BenchContext(model, load, load_model, command=command_line(), **shown)
        result = benchmark.run(options, context)
    text = benchmark.text(options, result.data) if benchmark.text else None
    data = result.data if text is not None else json.loads(result_json(benchmark.key, command_line(), result.data))
    if text is None:
        print_section(benchmark.section(data))
    elif out:
        write_text(out, text)
    else:
        sys.stdout.write(text)
    if written:
        write_text(written, result_json(benchmark.key, command_line(), result.data))
    if drawn and benchmark.chart:
        write_text(drawn, chart_svg(benchmark.chart(data)))
    if not result.finished:
        print_note("Interrupted: the figures are of what was done.")
        return 130
    return 0 if result.passed else 1


def _add_workload(parser: Parser) -> None:
    group = parser.add_argument_group("workload")
    text = "off, auto, or drafters joined by +, separated by commas; off is always measured (default: off,auto)"
    group.add_argument("--modes", type=names, default=("off", "auto"), metavar="LIST", help=text)
    group.add_argument("--control", action="store_true", help="measure off twice: how far it is from itself is noise")
    text = (
        "folder with tales_dialogues/, mtbench/, specbench/, gsm8k/, summarization/ (default: a dozen built-in prompts)"
    )
    group.add_argument("--data", type=Path, metavar="PATH", help=text)
    text = "only these, or all of a source: tales/retell,gsm8k"
    group.add_argument("--categories", type=names, metavar="LIST", help=text)
    group.add_argument("--per-category", type=int, default=4, metavar="N", help="prompts of each (default: 4)")
    text = "further prompts of each that drafters learn from first, untimed (default: 0)"
    group.add_argument("--warm-up", type=int, default=0, metavar="N", help=text)
    group.add_argument("-n", "--max-tokens", type=int, default=128, metavar="N", help="of a reply (default: 128)")
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="a prompt's figure is their median (default: 3)"
    )
    text = "0 takes the likeliest token each time (default: 0)"
    group.add_argument("--temp", "--temperature", dest="temperature", type=float, default=0.0, metavar="T", help=text)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the replies where --temp is above 0")


def _add_model_files(parser: Parser) -> None:
    group = parser.add_argument_group("cost-expanded model and llama.cpp")
    text = "a small Llama checkpoint (Hugging Face, safetensors)"
    group.add_argument("--checkpoint", type=Path, metavar="PATH", help=text)
    text = "measure the checkpoint cost-expanded to this shape (qwen2.5-0.5b), instead of -m"
    group.add_argument("--expand", nargs="?", const="qwen2.5-0.5b", metavar="SHAPE", help=text)
    text = "bits of the bundle that --expand makes (default: 4)"
    group.add_argument("--bits", type=int, choices=(4, 8), default=4, help=text)
    text = "measure llama.cpp too, on the checkpoint in Q4_0: plainly and with its prompt lookup"
    group.add_argument("--llamacpp", action="store_true", help=text)
    group.add_argument("--work", type=Path, metavar="PATH", help="where these files are kept")
    group.add_argument("--rebuild", action="store_true", help="export the bundle again")


def execute_spec(args: argparse.Namespace) -> int:
    """Runs `edgeinfer bench spec`."""
    from edgeinfer.apps.bench.spec_report import print_results
    from edgeinfer.apps.bench.spec_run import run_spec

    options = _options(args)
    require_place(args.json)
    with progress_bar() as progress:
        results, finished = run_spec(options, load_model, progress)
    print_results(results)
    write_results(args.json, "spec", results.to_dict())
    if not finished:
        print_note("Interrupted: the figures are of the prompts that were done.")
    return 0 if finished else 130


def _options(args: argparse.Namespace) -> SpecOptions:
    from edgeinfer.apps.bench.spec import SpecConfig
    from edgeinfer.apps.bench.spec_modes import Sampling
    from edgeinfer.apps.bench.spec_results import CONTROL
    from edgeinfer.apps.bench.spec_run import SpecOptions

    modes = (*args.modes, *((CONTROL,) if args.control else ()))
    sampling = Sampling(args.max_tokens, args.temperature, args.seed)
    placed: dict[str, Any] = {} if args.work is None else {"work": args.work}
    return SpecOptions(
        config=SpecConfig(modes, sampling, args.repeats),
        model=args.model,
        load=load_options(args),
        data=args.data,
        per_category=args.per_category,
        warm_up=args.warm_up,
        categories=args.categories,
        checkpoint=args.checkpoint,
        expand=args.expand,
        bits=args.bits,
        llamacpp=args.llamacpp,
        rebuild=args.rebuild,
        **placed,
    )
