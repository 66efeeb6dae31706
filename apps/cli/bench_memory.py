"""`edgeinfer bench memory`: whether plans are kept and what budgets cost; knows nothing of how it is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import names, require_place, write_results
from edgeinfer.apps.cli.options import add_load_options, load_options
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.hub import resolve

if TYPE_CHECKING:
    from edgeinfer.apps.cli.output import Progress
    from edgeinfer.apps.cli.parser import Parser, Subparsers

__all__ = ["add_memory_parsers"]

_DESCRIPTION = """\
Measure what models take in memory, each in a process of its own, inside limits that the system enforces.

examples:
  edgeinfer bench memory plans --runs 200 --json plans.json
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1
"""
_PLANS = """\
Random plans: are they kept, and how near are they to what is measured?

example:
  edgeinfer bench memory plans --runs 20 --shapes tiny,15m
"""
_SPEC = """\
What speculation takes besides the weights, and the smallest budget at which it is as fast.

example:
  edgeinfer bench memory spec -m BUNDLE --data DATA --categories tales/retell,mtbench -t 1
"""
_SMALLEST = """\
Speed against budget, from all that a model takes down to the smallest budget in which it runs.

example:
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1 --llamacpp MODEL.gguf
"""
_CHAT = """\
Does memory stay flat over many turns?

example:
  edgeinfer bench memory chat --turns 200 --prefix-cache 8MB
"""
_KV = """\
What quantized caches do to a model's predictions.

example:
  edgeinfer bench memory kv -m BUNDLE --text STORIES
"""

Told = Callable[[int, int], None]


def add_memory_parsers(kinds: Subparsers) -> None:
    """Adds the benchmark and its parts."""
    layout = argparse.RawDescriptionHelpFormatter
    text = "memory: plans against what is measured, and what budgets cost"
    parser = kinds.add_parser("memory", help=text, description=_DESCRIPTION, formatter_class=layout, allow_abbrev=False)
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True)
    _add_plans(add_command(parts, "plans", _execute_plans, "random plans against what is measured", _PLANS))
    _add_spec(add_command(parts, "spec", _execute_spec, "the smallest budget at which drafting pays as much", _SPEC))
    _add_smallest(add_command(parts, "smallest", _execute_smallest, "speed against budget", _SMALLEST))
    _add_chat(add_command(parts, "chat", _execute_chat, "memory over many turns", _CHAT))
    _add_kv(add_command(parts, "kv", _execute_kv, "what quantized caches cost in quality", _KV))
    for part in parts.choices.values():
        part.add_argument("--json", type=Path, metavar="FILE", help="write everything, samples included")


def _add_plans(parser: Parser) -> None:
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="plans, a process each (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    text = "random models, besides the built-in one (default: tiny,15m,60m,qwen2.5-0.5b)"
    parser.add_argument("--shapes", type=names, metavar="LIST", help=text)
    parser.add_argument("--work", type=Path, metavar="PATH", help="where these are kept; the largest takes 3 GB")
    _add_enforcement(parser)


def _add_spec(parser: Parser) -> None:
    add_load_options(parser)
    group = parser.add_argument_group("workload")
    text = "folder with tales_dialogues/, mtbench/ and others (default: a dozen built-in prompts)"
    group.add_argument("--data", type=Path, metavar="PATH", help=text)
    group.add_argument("--categories", type=names, metavar="LIST", help="only these, or all of a source")
    group.add_argument("--per-category", type=int, default=4, metavar="N", help="prompts of each (default: 4)")
    group.add_argument("-n", "--max-tokens", type=int, default=96, metavar="N", help="of a reply (default: 96)")
    _add_budgets(parser)


def _add_smallest(parser: Parser) -> None:
    add_load_options(parser)
    _add_budgets(parser)
    group = parser.add_argument_group("other engines, measured the same way")
    group.add_argument("--llamacpp", type=Path, metavar="FILE", help="a GGUF file for llama.cpp")
    group.add_argument("--genai", type=Path, metavar="PATH", help="a model for onnxruntime-genai")
    group.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai")


def _add_budgets(parser: Parser) -> None:
    group = parser.add_argument_group("budgets")
    group.add_argument("--steps", type=int, default=8, metavar="N", help="budgets, evenly spaced (default: 8)")
    text = "processes for each; figures are their medians (default: 3)"
    group.add_argument("--rounds", type=int, default=3, metavar="N", help=text)
    text = "further budgets, nearer and nearer to the smallest that keeps the speed (default: 4)"
    group.add_argument("--halvings", type=int, default=4, metavar="N", help=text)
    _add_enforcement(parser)


def _add_enforcement(parser: Parser) -> None:
    parser.add_argument("--no-limits", action="store_true", help="do not have the system enforce the budgets")


def _add_chat(parser: Parser) -> None:
    add_load_options(parser)
    parser.add_argument("--turns", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("-n", "--max-tokens", type=int, default=32, metavar="N", help="of a reply (default: 32)")


def _add_kv(parser: Parser) -> None:
    text = "bundle directory or hub id ORG/NAME (default: the small built-in story model)"
    parser.add_argument("-m", "--model", metavar="MODEL", help=text)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="stories to read")
    parser.add_argument("--stories", type=int, default=40, metavar="N", help="how many, from the end (default: 40)")


def _execute_plans(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.memory_plans import PlanRun, PlansResults, draw_cases, run_cases
    from edgeinfer.apps.bench.memory_report import print_plans
    from edgeinfer.apps.bench.memory_subjects import SIZES, find_subjects
    from edgeinfer.apps.bench.model_files import default_folder

    require_place(args.json)
    runs: list[PlanRun] = []
    finished = True
    with progress_bar() as progress:
        work, shapes = args.work or default_folder(), args.shapes or SIZES
        subjects = find_subjects(resolve(None), work, shapes, _stage(progress, "bundles"))
        told = _stage(progress, "plans")
        try:
            for run in run_cases(draw_cases(subjects, args.runs, args.seed), enforce=not args.no_limits):
                runs.append(run)
                if told:
                    told(len(runs), args.runs)
        except KeyboardInterrupt:
            finished = False
    results = PlansResults(args.seed, tuple(runs))
    print_plans(results)
    write_results(args.json, "memory-plans", results.to_dict())
    if not finished:
        print_note("Interrupted: the figures are of the plans that were run.")
        return 130
    return 0 if len(results.of("kept")) == len(runs) else 1


def _execute_spec(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.memory_report import print_spec
    from edgeinfer.apps.bench.memory_spec import measure_spec_memory
    from edgeinfer.apps.bench.prompts import builtin_prompts, load_prompts

    require_place(args.json)
    if args.data is None:
        prompts = builtin_prompts(args.per_category, args.categories)
    else:
        prompts = load_prompts(args.data, args.per_category, categories=args.categories)
    with progress_bar() as progress:
        results = measure_spec_memory(
            str(resolve(args.model)),
            load_options(args),
            prompts,
            max_tokens=args.max_tokens,
            steps=args.steps,
            rounds=args.rounds,
            halvings=args.halvings,
            enforce=not args.no_limits,
            told=_stage(progress, "processes"),
        )
    print_spec(results)
    write_results(args.json, "memory-spec", results.to_dict())
    return 0


def _execute_smallest(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.memory_report import print_smallest
    from edgeinfer.apps.bench.memory_smallest import Peer, measure_smallest

    require_place(args.json)
    peers = [Peer("llamacpp", args.llamacpp)] if args.llamacpp else []
    peers += [Peer("genai", args.genai, args.genai_python)] if args.genai else []
    with progress_bar() as progress:
        results = measure_smallest(
            str(resolve(args.model)),
            load_options(args),
            steps=args.steps,
            rounds=args.rounds,
            halvings=args.halvings,
            peers=peers,
            enforce=not args.no_limits,
            told=_stage(progress, "processes"),
        )
    print_smallest(results)
    write_results(args.json, "memory-smallest", results.to_dict())
    return 0


def _execute_chat(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.memory_chat import measure_chat
    from edgeinfer.apps.bench.memory_report import print_chat

    require_place(args.json)
    results = measure_chat(args.model, load_options(args), args.turns, args.max_tokens)
    print_chat(results)
    write_results(args.json, "memory-chat", results.to_dict())
    return 0 if results.flat else 1


def _execute_kv(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from edgeinfer.apps.bench.kv_quality import compare_caches
    from edgeinfer.apps.bench.memory_report import print_kv
    from edgeinfer.apps.bench.texts import read_stories

    require_place(args.json)
    results = compare_caches(args.model, read_stories(args.text, args.stories))
    print_kv(results)
    write_results(args.json, "memory-kv", {"caches": [asdict(result) for result in results]})
    return 0


def _stage(progress: Progress | None, name: str) -> Told | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
