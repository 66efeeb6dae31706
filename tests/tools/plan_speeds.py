"""Predicted against measured speed of plans: random ones, and what budgets choose against all that fits in them.

    XDG_CACHE_HOME=EMPTY python -m tests.tools.plan_speeds -m MODEL --plans 100 --budgets 10 --out FILE

A device is measured as it is in use: some replies by default options, then every way to run. All of it goes by the
processor's time, what passes and guesses cost as well as what replies take, so with one thread: by a busy machine's
clock costs and replies would be of different moments. Speeds drift all the same, so each measured one is taken beside
plain decoding, and predictions are held against it as if the machine were as fast as at first.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import edgeinfer
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.prompts import Prompt, builtin_prompts, load_prompts, tokenize_prompts
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.apps.bench.timing import percentile
from edgeinfer.errors import EdgeInferError, UsageError

# What is drawn; streaming is seldom, as it is slow.
_KV = (None, "float16", "int8", "int4")
_WEIGHTS = (None, None, None, "streamed")
_SPECULATION = ("off", "auto", "auto", "copy", "copy,ngram", "copy,ngram,recycle", "copy,model", "model")
_MOST_DRAFTED = (None, 1, 3, 7)
# All ways of one context, of which a budget gets one.
_EVERY_KV = (None, "float16", "int8")
_EVERY_SPECULATION = ("off", "auto", "copy", "copy,ngram", "copy,ngram,recycle", "model")
_EVERY_MOST = (3, 15)
# A cache of so many bits is worth this share of the speed to a plan (runtime/planning/search.py).
_WORTH = {"float32": 1.0, "float16": 0.98, "int8": 0.85, "int4": 0.7}
# Rounds of replies by default options, by which the device is measured; and of all enumerated ways, in turns.
_WARM, _TURNS = 4, 3


@dataclass(frozen=True)
class PlanSpeed:
    """A plan and what became of it.

    Attributes:
        options: of `edgeinfer.load`.
        known: whether passes of this kind had been timed before.
        predicted, measured: tokens a second, the latter as if the machine were as fast as at first.
        least: bytes of the smallest budget that has room for it.
        tried: tokens a second that are predicted once it has run.
    """

    options: Mapping[str, Any]
    known: bool
    predicted: float
    measured: float
    least: int = 0
    tried: float = 0.0

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class BudgetChoice:
    """What a budget gets.

    Attributes:
        chosen: the way that predictions prefer among those that fit.
        best: the one that measurements prefer.
        share: of the best one's measured worth that the chosen one has.
    """

    budget: int
    chosen: Mapping[str, Any]
    best: Mapping[str, Any]
    share: float


class PlanTimer:
    """Times replies of one model, beside plain decoding by its default options.

    Args:
        prompts: of the replies.
        max_tokens: of each.
        common: options of all loads.
    """

    def __init__(
        self, model: str | None, prompts: Sequence[Prompt], max_tokens: int, common: Mapping[str, Any]
    ) -> None:
        self._model, self._prompts, self._max = model, prompts, max_tokens
        self._common = dict(common)
        self._first = self._before = 0.0

    def learn(self, rounds: int) -> None:
        """Has this device measure passes and drafts, as use does."""
        for _ in range(rounds):
            self._replies({})
        self._first = self._before = self._plain()

    def has(self, options: Mapping[str, Any]) -> bool:
        """Whether the model can run this way: it may have no draft model, or not this type of cache."""
        try:
            plan = self._planned(options)
        except UsageError:
            return False
        return plan.configuration.draft_model or "model" not in options["speculation"]

    def timed(self, options: Mapping[str, Any]) -> PlanSpeed:
        """A way to run: planned by what is known so far, then timed."""
        plan, speed = self._planned(options), self._measured(options)
        return PlanSpeed(options, plan.speed.measured, plan.speed.tokens_per_second, speed, plan.planned_bytes)

    def timed_in_turns(self, ways: Sequence[Mapping[str, Any]], turns: int) -> list[PlanSpeed]:
        """Ways to run: planned by what is known before any of them ran, timed so often, and planned once more."""
        plans = [self._planned(way) for way in ways]
        runs = [[self._measured(way) for way in ways] for _ in range(turns)]
        speeds = [statistics.median(each) for each in zip(*runs, strict=True)]
        return [
            PlanSpeed(
                way,
                plan.speed.measured,
                plan.speed.tokens_per_second,
                speed,
                plan.planned_bytes,
                self._planned(way).speed.tokens_per_second,
            )
            for way, plan, speed in zip(ways, plans, speeds, strict=True)
        ]

    def _planned(self, options: Mapping[str, Any]) -> edgeinfer.MemoryPlan:
        return edgeinfer.plan(self._model, **self._common | dict(options))

    def _measured(self, options: Mapping[str, Any]) -> float:
        """Tokens a second between two looks at plain decoding, as if that were as fast as at first."""
        speed, before, self._before = self._replies(options), self._before, self._plain()
        return speed * self._first / statistics.mean((before, self._before))

    def _plain(self) -> float:
        return self._replies({}, speculation="off")

    def _replies(self, options: Mapping[str, Any], **reply: Any) -> float:
        """Tokens a second of the processor's time over all replies, their first tokens aside."""
        tokens = seconds = 0.0
        with edgeinfer.load(self._model, **self._common | dict(options)) as model:
            for item in tokenize_prompts(model, self._prompts, self._max):
                with model.stream(list(item.ids), max_tokens=self._max, ignore_eos=True, **reply) as stream:
                    next(stream)
                    started = time.process_time()
                    done = stream.complete()
                    seconds += time.process_time() - started
                tokens += len(done.token_ids) - 1
        return tokens / seconds


def draw_ways(count: int, seed: int) -> list[dict[str, Any]]:
    """So many ways to run, drawn with their drafters."""
    drawing = random.Random(seed)
    found = []
    for _ in range(count):
        way = {"kv": drawing.choice(_KV), "weights": drawing.choice(_WEIGHTS), "context": drawing.choice((256, 512))}
        speculation = drawing.choice(_SPECULATION)
        way |= {"speculation": speculation, "prefill_chunk": drawing.choice((None, 16, 32))}
        if speculation != "off":
            way["draft_max"] = drawing.choice(_MOST_DRAFTED)
        if "model" not in speculation:
            way["draft_model"] = drawing.choice((None, "off"))
        found.append(way)
    return found


def enumerated_ways() -> list[dict[str, Any]]:
    """All ways to run in a context of 512: types of cache, drafters, lengths of drafts, the draft model or none."""
    ways: list[dict[str, Any]] = []
    for kv in _EVERY_KV:
        for speculation in _EVERY_SPECULATION:
            base = {"kv": kv, "context": 512, "speculation": speculation}
            if speculation == "off":
                ways.append(base | {"draft_model": "off"})
                continue
            models = (None,) if speculation == "model" else (None, "off") if speculation == "auto" else ("off",)
            ways += [base | {"draft_max": most, "draft_model": model} for most in _EVERY_MOST for model in models]
    return ways


def choices_within(ways: Sequence[PlanSpeed], budgets: int, *, tried: bool = False) -> list[BudgetChoice]:
    """What so many budgets, evenly spaced from the smallest way to the largest, get of these.

    Args:
        tried: they are chosen by what is predicted once all have run, not before.
    """
    sizes = [way.least for way in ways]
    step = (max(sizes) - min(sizes)) / max(budgets - 1, 1)
    found = []
    for number in range(budgets):
        budget = round(min(sizes) + step * number)
        fitting = [way for way in ways if way.least <= budget]
        chosen = max(fitting, key=lambda way: (way.tried if tried else way.predicted) * _worth(way))
        best = max(fitting, key=lambda way: way.measured * _worth(way))
        share = chosen.measured * _worth(chosen) / (best.measured * _worth(best))
        found.append(BudgetChoice(budget, chosen.options, best.options, share))
    return found


def _worth(way: PlanSpeed) -> float:
    return _WORTH[way.options["kv"] or "float32"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plan_speeds", description=__doc__)
    parser.add_argument("-m", "--model", help="as for edgeinfer run; the built-in one without it")
    parser.add_argument("--draft-model", help="as for edgeinfer run")
    parser.add_argument("--plans", type=int, default=100, help="random plans")
    parser.add_argument(
        "--budgets", type=int, default=10, help="budgets whose choice is compared with all ways; 0 is none"
    )
    parser.add_argument("--data", type=Path, help="folder of prompts (default: a dozen built-in ones)")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


@contextlib.contextmanager
def _by_processor_time() -> Iterator[None]:
    """Has everything in this process that is timed go by the processor's time."""
    with mock.patch.multiple(time, perf_counter=time.process_time, perf_counter_ns=time.process_time_ns):
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    try:
        if options.data is None:
            prompts = builtin_prompts(options.per_category)
        else:
            prompts = load_prompts(options.data, options.per_category, categories=("tales/retell", "mtbench"))
        common = {"threads": 1} | ({"draft_model": options.draft_model} if options.draft_model else {})
        watch = PlanTimer(options.model, prompts, options.max_tokens, common)
        with _by_processor_time():
            watch.learn(_WARM)
            drawn = [watch.timed(way) for way in draw_ways(options.plans, options.seed) if watch.has(way)]
            ways = [way for way in enumerated_ways() if watch.has(way)] if options.budgets else []
            every = watch.timed_in_turns(ways, _TURNS)
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    choices = [choices_within(every, options.budgets, tried=tried) for tried in (False, True)] if every else []
    _print(drawn, *choices)
    if options.out:
        figures = {"plans": [asdict(each) | {"error": each.error} for each in drawn]}
        figures |= {"ways": [asdict(each) for each in every]}
        figures |= {name: [asdict(e) for e in each] for name, each in zip(("untried", "tried"), choices, strict=False)}
        options.out.write_text(script_json("plan-speeds", figures), "utf-8")
    return 0


def _print(
    drawn: Sequence[PlanSpeed], untried: Sequence[BudgetChoice] = (), tried: Sequence[BudgetChoice] = ()
) -> None:
    groups = {
        "all": drawn,
        "passes timed before": [each for each in drawn if each.known],
        "not timed before": [each for each in drawn if not each.known],
        "no drafts": [each for each in drawn if each.options["speculation"] == "off"],
        "auto": [each for each in drawn if each.options["speculation"] == "auto"],
        "drafters named": [each for each in drawn if each.options["speculation"] not in ("off", "auto")],
        "streamed": [each for each in drawn if each.options["weights"] == "streamed"],
    }
    rows = []
    for name, each in groups.items():
        errors = [plan.error for plan in each]
        shown = [f"{percentile(errors, percent):.1%}" for percent in (50, 90)] if errors else ["-", "-"]
        bias = f"{statistics.median(plan.predicted / plan.measured for plan in each):.2f}" if errors else "-"
        rows.append([name, str(len(errors)), *shown, bias])
    print_table(
        Table("Predicted against measured speed", ("plans", "number", "median", "90%", "predicted/measured"), rows)
    )
    for when, choices in (("before any of these ran", untried), ("after", tried)):
        if choices:
            near = sum(each.share >= 0.95 for each in choices)
            print(f"{near} of {len(choices)} budgets get a plan within 5% of the best that fits, by costs from {when}.")


if __name__ == "__main__":
    sys.exit(main())
