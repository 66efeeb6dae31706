"""The gain of drafting on a data set by given costs instead of a clock: the same on a quiet and on a busy machine.

    python -m tests.tools.priced_drafting BUNDLE DATA [--modes auto,model] [--temps 0,0.7] [--categories tales,gsm8k]

Each mode answers the prompts of every category as `edgeinfer bench spec` does; what a reply takes is reckoned from its
rounds: passes at the quiet curve of docs/figures.md, or at the one given, guesses, tokens read before them, and rounds
at the prices given. A row has a category's mean tokens per pass and speed-up, and the slowest prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import edgeinfer
from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.apps.bench.texts import STORIES, TokenizedPrompt, load_prompts, tokenize_prompts
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.speculation.controller import DraftController
from edgeinfer.runtime.speculation.costs import DeviceCosts, RoundTimings, SessionCosts
from edgeinfer.runtime.speculation.drafters.contract import Drafter, Round

CURVE = PassCosts(
    (
        *((1, 11.05), (2, 12.11), (3, 12.72), (4, 12.52), (5, 14.93), (6, 15.39), (7, 16.01), (8, 16.36)),
        *((10, 20.64), (12, 23.05), (16, 30.62)),
    )
)
# Milliseconds of a guess: of the shipped drafter, of an EAGLE head, of an 8-bit model's high bits; of all lookups.
GUESSES, _LOOKUP = {"model": 0.35, "eagle": 0.5, "bits": 6.0}, 0.01
# Milliseconds of a token that the shipped drafter reads before its first guess.
READING = {"model": 0.01}


@dataclass
class Reckoned:
    """The cost of one reply."""

    tokens: int = 0
    passes: int = 0
    ms: float = 0.0
    plain_ms: float = CURVE.ms(1)

    @property
    def speedup(self) -> float:
        return self.tokens * self.plain_ms / self.ms


@dataclass(frozen=True)
class Pricing:
    """Use given costs in place of measured ones, and price replies by them."""

    passes: PassCosts
    round_ms: float
    now: Reckoned

    def of(self, costs: DeviceCosts, drafters: Sequence[Drafter]) -> SessionCosts:
        guesses = {drafter.name: GUESSES.get(drafter.name, _LOOKUP) for drafter in drafters}
        reading = {drafter.name: READING.get(drafter.name, 0.0) for drafter in drafters}
        return SessionCosts(self.passes, guesses, self.round_ms, self.passes.largest, reading)

    def learn(self, costs: DeviceCosts, timings: RoundTimings) -> None:
        """Given costs do not follow the clock."""

    def observe(self, controller: DraftController, round: Round) -> None:
        rows = 1 + len(round.draft)
        self._count(len(round.committed), 1, self.passes.ms(rows) + controller.guessed_ms + self.round_ms)
        _OBSERVE(controller, round)

    def rested(self, controller: DraftController, steps: int) -> None:
        _RESTED(controller, steps)
        self._count(steps, steps, steps * self.passes.ms(1))

    def _count(self, tokens: int, passes: int, ms: float) -> None:
        self.now.tokens, self.now.passes, self.now.ms = (
            self.now.tokens + tokens,
            self.now.passes + passes,
            self.now.ms + ms,
        )


_OBSERVE, _RESTED = DraftController.observe, DraftController.rested


def _replies(
    model: edgeinfer.Model, prompts: Sequence[TokenizedPrompt], warm_up: int, now: Reckoned, **options: object
) -> dict[str, list[Reckoned]]:
    """Replies by category, by drafters that learnt from the last `warm_up` prompts of every category."""
    by_category: dict[str, list[TokenizedPrompt]] = {}
    for item in prompts:
        by_category.setdefault(item.prompt.category, []).append(item)
    for items in by_category.values():
        for item in items[len(items) - warm_up :]:
            model.generate(list(item.ids), **options)  # type: ignore[arg-type]
    known, found = edgeinfer.tools.drafting_state(model), dict[str, list[Reckoned]]()
    for category, items in by_category.items():
        for item in items[: len(items) - warm_up]:
            edgeinfer.tools.restore_drafting(model, known)
            now.tokens, now.passes, now.ms = 0, 0, 0.0
            model.generate(list(item.ids), **options)  # type: ignore[arg-type]
            if now.tokens > 1:
                found.setdefault(category, []).append(dataclasses.replace(now))
    return found


def _row(name: str, replies: Sequence[Reckoned]) -> tuple[str, ...]:
    length = sum(reply.tokens for reply in replies) / sum(reply.passes for reply in replies)
    speedups = [reply.speedup for reply in replies]
    return name, f"{length:.2f}", f"{fmean(speedups):.2f}", f"{min(speedups):.3f}"


def _points(text: str) -> list[tuple[int, float]]:
    return [(int(rows), float(ms)) for rows, _, ms in (point.partition(":") for point in text.split(","))]


def main() -> None:
    """Prints a table for each mode and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("data", type=Path)
    parser.add_argument("--modes", default="auto")
    parser.add_argument("--temps", default="0")
    parser.add_argument("--categories")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--round-ms", type=float, default=0.5)
    parser.add_argument("--passes", type=_points, help="another curve, such as 1:13.6,4:13.8,8:24.8,16:49.5")
    args = parser.parse_args()
    passes = PassCosts(tuple(args.passes)) if args.passes else CURVE
    pricing = Pricing(passes, args.round_ms, Reckoned(plain_ms=passes.ms(1)))
    replaced = {(DeviceCosts, "of"): pricing.of, (DeviceCosts, "learn"): pricing.learn}
    replaced |= {(DraftController, "observe"): pricing.observe, (DraftController, "rested"): pricing.rested}  # type: ignore[dict-item]
    for (owner, name), method in replaced.items():
        patch.object(owner, name, lambda self, *given, method=method: method(self, *given)).start()
    with edgeinfer.load(args.bundle, threads=1, remember=False) as model:
        found = load_prompts(
            args.data,
            args.per_category + args.warm_up,
            categories=args.categories.split(",") if args.categories else None,
        )
        prompts, fresh = tokenize_prompts(model, found, args.max_tokens), edgeinfer.tools.drafting_state(model)
        for mode in args.modes.split(","):
            for temperature in map(float, args.temps.split(",")):
                edgeinfer.tools.restore_drafting(model, fresh)
                options = {"speculation": mode.replace("+", ","), "temperature": temperature, "seed": 0}
                by_category = _replies(model, prompts, args.warm_up, pricing.now, max_tokens=args.max_tokens, **options)
                means = {name: fmean(reply.speedup for reply in of) for name, of in by_category.items()}
                rows = [_row(name, of) for name, of in by_category.items()]
                geometric = math.exp(fmean(map(math.log, means.values())))
                stories = [means[name] for name in STORIES if name in means]
                rows.append(("geometric mean", "", f"{geometric:.2f}", ""))
                rows += [("story categories", "", f"{fmean(stories):.2f}", "")] if stories else []
                print(f"\n{mode} at temperature {temperature:g}\n")
                print(markdown_table(("category", "tokens a pass", "times plain", "slowest"), rows))


if __name__ == "__main__":
    main()
