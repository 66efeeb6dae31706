"""`edgeinfer bench memory`: plans against what is measured, and what budgets cost, each in a process of its own."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeinfer.apps.bench import memory_budgets, memory_kv, memory_plans, memory_timed
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, option
from edgeinfer.apps.bench.memory_budgets import BudgetPeer
from edgeinfer.apps.bench.memory_plans import SIZES, PlanRun, PlansResults, draw_cases, find_subjects
from edgeinfer.apps.bench.memory_sections import (
    chat_section,
    kv_section,
    plans_section,
    smallest_section,
    spec_memory_section,
)
from edgeinfer.apps.bench.model_files import default_folder
from edgeinfer.apps.bench.prompts import builtin_prompts, load_prompts
from edgeinfer.apps.bench.texts import read_stories
from edgeinfer.config import parse_size
from edgeinfer.errors import UsageError

# Help and description of `edgeinfer bench memory` itself.
GROUP = (
    "memory: plans against what is measured, and what budgets cost",
    """\
Measure what models take in memory, each in a process of its own, inside limits that the system enforces.

examples:
  edgeinfer bench memory plans --runs 200 --json plans.json
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1
""",
)
_ENFORCE = "do not have the system enforce the budgets"
_WORK, _BUDGETS, _PEERS = "workload", "budgets", "other engines, measured the same way"


@dataclass(frozen=True)
class PlansOptions:
    """Which plans are drawn."""

    runs: int = option("--runs N", default=200, help="number of plans, each in its own process")
    first: int = option("--from N", default=0, help="number of the first plan to run; those before it are only drawn")
    seed: int = option("--seed N", default=0, help="random seed")
    shapes: tuple[str, ...] = option(
        "--shapes LIST", default=SIZES, help="shapes of random models, besides the built-in one"
    )
    work: Path | None = option("--work PATH", default=None, help="folder for these models; the largest takes 3 GB")
    no_limits: bool = option("--no-limits", default=False, help=_ENFORCE)

    def __post_init__(self) -> None:
        if self.runs < 1 or self.first < 0:
            raise UsageError("There are no such plans.", "Give --runs from 1 on, and --from from 0 on.")


@dataclass(frozen=True)
class BudgetOptions:
    """Under which budgets a model is run."""

    steps: int = option("--steps N", default=8, group=_BUDGETS, help="number of budgets, evenly spaced")
    rounds: int = option("--rounds N", default=3, help="number of processes per budget, whose medians are reported")
    halvings: int = option(
        "--halvings N",
        default=4,
        help="number of further budgets, halving towards the smallest one that keeps the speed",
    )
    no_limits: bool = option("--no-limits", default=False, help=_ENFORCE)


@dataclass(frozen=True)
class SpecMemoryOptions(BudgetOptions):
    """And what it is asked."""

    data: Path | None = option(
        "--data PATH",
        default=None,
        group=_WORK,
        help="folder with tales_dialogues/, mtbench/ and others (default: a dozen built-in prompts)",
    )
    categories: tuple[str, ...] | None = option("--categories LIST", default=None, help="categories or sources to use")
    per_category: int = option("--per-category N", default=4, help="number of prompts per category")
    max_tokens: int = option("-n", "--max-tokens N", default=96, help="reply length in tokens")
    budgets: tuple[str, ...] = option(
        "--budgets LIST", default=(), group=_BUDGETS, help="these instead of evenly spaced ones, such as 360MB,350MB"
    )


@dataclass(frozen=True)
class SmallestOptions(BudgetOptions):
    """And which engines are measured beside it."""

    llamacpp: Path | None = option("--llamacpp FILE", default=None, group=_PEERS, help="GGUF file for llama.cpp")
    genai: Path | None = option("--genai PATH", default=None, help="model for onnxruntime-genai")
    genai_python: str | None = option(
        "--genai-python PATH", default=None, help="Python interpreter that has onnxruntime-genai"
    )


@dataclass(frozen=True)
class ChatLoopOptions:
    """How long the chats are."""

    turns: int = option("--turns N", default=200, help="total number of turns in both chats")
    max_tokens: int = option("-n", "--max-tokens N", default=32, help="reply length in tokens")


@dataclass(frozen=True)
class CacheTypesOptions:
    """What is read, by which model."""

    text: Path = option("--text FILE", help="stories to read")
    model: str | None = option(
        "-m",
        "--model MODEL",
        default=None,
        help="bundle directory or hub id ORG/NAME (default: the small built-in story model)",
    )
    stories: int = option("--stories N", default=40, help="number of stories, counted from the end")


def _run_plans(options: PlansOptions, context: BenchContext) -> BenchResult:
    runs: list[PlanRun] = []
    finished, progress = True, context.stage("plans")
    work = options.work or default_folder()
    subjects = find_subjects(context.resolve(None), work, options.shapes, context.stage("bundles"))
    drawn = draw_cases(subjects, options.first + options.runs, options.seed)
    cases = itertools.islice(drawn, options.first, None)
    try:
        for run in memory_plans.run_cases(cases, enforce=not options.no_limits):
            runs.append(run)
            progress(len(runs), options.runs)
    except KeyboardInterrupt:
        finished = False
    results = PlansResults(options.seed, tuple(runs))
    return BenchResult(results.to_dict(), finished, passed=len(results.of("kept")) == len(runs))


def _run_spec(options: SpecMemoryOptions, context: BenchContext) -> BenchResult:
    if options.data is None:
        prompts = builtin_prompts(options.per_category, options.categories)
    else:
        prompts = load_prompts(options.data, options.per_category, categories=options.categories)
    results = memory_budgets.measure_spec_memory(
        str(context.resolve(context.model)),
        context.load,
        prompts,
        max_tokens=options.max_tokens,
        steps=options.steps,
        rounds=options.rounds,
        halvings=options.halvings,
        budgets=[parse_size(size) for size in options.budgets],
        enforce=not options.no_limits,
        progress=context.stage("processes"),
    )
    return BenchResult(results.to_dict())


def _run_smallest(options: SmallestOptions, context: BenchContext) -> BenchResult:
    peers = [BudgetPeer("llamacpp", options.llamacpp)] if options.llamacpp else []
    peers += [BudgetPeer("genai", options.genai, options.genai_python)] if options.genai else []
    results = memory_budgets.measure_smallest(
        str(context.resolve(context.model)),
        context.load,
        steps=options.steps,
        rounds=options.rounds,
        halvings=options.halvings,
        peers=peers,
        enforce=not options.no_limits,
        progress=context.stage("processes"),
    )
    return BenchResult(results.to_dict())


def _run_chat(options: ChatLoopOptions, context: BenchContext) -> BenchResult:
    results = memory_timed.measure_chat(context.model, context.load, options.turns, options.max_tokens)
    return BenchResult(results.to_dict(), passed=results.flat)


def _run_kv(options: CacheTypesOptions, context: BenchContext) -> BenchResult:
    found = memory_kv.compare_caches(options.model, read_stories(options.text, options.stories))
    return BenchResult({"caches": [asdict(each) for each in found]})


MEMORY = (
    Benchmark(
        "memory plans",
        "random plans against what is measured",
        "Make random plans, and check whether they are kept and how close they are to measured "
        "memory.\n\nexample:\n  edgeinfer bench memory plans --runs 20 --shapes tiny,15m\n",
        PlansOptions,
        _run_plans,
        plans_section,
    ),
    Benchmark(
        "memory spec",
        "the smallest budget at which drafting pays as much",
        """\
What speculation takes besides the weights, and the smallest budget at which it is as fast.

example:
  edgeinfer bench memory spec -m BUNDLE --data DATA --categories tales/retell,mtbench -t 1
""",
        SpecMemoryOptions,
        _run_spec,
        spec_memory_section,
        loads=True,
    ),
    Benchmark(
        "memory smallest",
        "speed against budget",
        """\
Speed against budget, from all that a model takes down to the smallest budget in which it runs.

example:
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1 --llamacpp MODEL.gguf
""",
        SmallestOptions,
        _run_smallest,
        smallest_section,
        loads=True,
    ),
    Benchmark(
        "memory chat",
        "memory over many turns",
        """\
Does memory stay flat over many turns?

example:
  edgeinfer bench memory chat --turns 200 --prefix-cache 8MB
""",
        ChatLoopOptions,
        _run_chat,
        chat_section,
        loads=True,
    ),
    Benchmark(
        "memory kv",
        "what quantized caches cost in quality",
        """\
What quantized caches do to a model's predictions.

example:
  edgeinfer bench memory kv -m BUNDLE --text STORIES
""",
        CacheTypesOptions,
        _run_kv,
        kv_section,
    ),
)
