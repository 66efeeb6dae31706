"""What speculation takes in memory, and the smallest budget at which it pays as much: SpecMemo's experiment.

Knows nothing of tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.memory_timed import (
    Replies,
    Setup,
    Timed,
    TimedRun,
    Told,
    budgets_between,
    narrow,
    time_setups,
)
from edgeinfer.apps.bench.prompts import Prompt, tokenize_prompts
from edgeinfer.errors import UsageError

__all__ = ["DEFAULT", "KEPT_SHARE", "UNCONSTRAINED", "SpecMemoResults", "measure_spec_memory"]

# Of the unconstrained speed, what a budget has to keep.
KEPT_SHARE = 0.96
UNCONSTRAINED, DEFAULT = "unconstrained", "default"
# Contexts are rounded up to this.
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class SpecMemoResults:
    """Setups with their speed and what they take besides the weights.

    Attributes:
        context: tokens that the prompts need, for which budgets are planned.
        timed: without limits first, then by falling budget.
    """

    model: str
    context: int
    prompts: tuple[str, ...]
    timed: tuple[Timed, ...]

    def speed(self, timed: Timed) -> float:
        """Tokens a second over all prompts."""
        return timed.speed(range(len(self.prompts)))

    def named(self, name: str) -> Timed:
        """The setup of that name."""
        return next(timed for timed in self.timed if timed.setup.name == name)

    def share(self, timed: Timed) -> float:
        """Of the unconstrained speed."""
        return timed.share(self.named(UNCONSTRAINED), range(len(self.prompts)))

    def keeps(self, timed: Timed) -> bool:
        """Whether that is enough."""
        return self.share(timed) >= KEPT_SHARE

    @property
    def smallest(self) -> Timed | None:
        """The smallest budget that keeps `KEPT_SHARE` of the unconstrained speed."""
        kept = [timed for timed in self.timed if timed.setup.budget and self.keeps(timed)]
        return min(kept, key=lambda timed: timed.setup.budget or 0, default=None)

    def cut(self, timed: Timed, baseline: str, *, planned: bool, alone: bool) -> float:
        """The share of a baseline's generation memory that a setup does without; arguments as `generation_bytes`."""

        def size(run: TimedRun) -> float:
            return run.generation_bytes(planned=planned, alone=alone)

        return 1 - timed.median(size) / self.named(baseline).median(size)

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        setups = []
        for timed in self.timed:
            figures: dict[str, Any] = {"tokens_per_second": self.speed(timed), "share": self.share(timed)}
            if not timed.reason:
                figures["generation_bytes"] = {
                    f"{'planned' if planned else 'measured'}{'_alone' if alone else ''}": timed.median(
                        lambda run, p=planned, a=alone: run.generation_bytes(planned=p, alone=a)  # type: ignore[misc]
                    )
                    for planned in (True, False)
                    for alone in (True, False)
                }
            setups.append(asdict(timed) | figures)
        smallest = self.smallest.setup.budget if self.smallest else None
        return {"model": self.model, "context": self.context, "prompts": list(self.prompts)} | {
            "smallest_budget": smallest,
            "setups": setups,
        }


def measure_spec_memory(
    model: str,
    options: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    steps: int,
    rounds: int,
    halvings: int = 0,
    enforce: bool = True,
    told: Told | None = None,
) -> SpecMemoResults:
    """Replies with speculation and the model's whole context, as loaded by default, and under falling budgets.

    Budgets are planned for the context that the prompts need, as SpecMemo reserves no more than is used.

    Args:
        model: a bundle's folder.
        options: of `edgeinfer.load`, less context and budget.
        steps, rounds: budgets, evenly spaced, and processes for each setup.
        halvings: further budgets, nearer and nearer to the smallest that keeps the speed.
        told: called with the processes done and their number.

    Raises:
        UsageError: there are no prompts.
    """
    if not prompts:
        raise UsageError("There are no prompts.", "Name other categories.")
    longest = _longest_context(model)
    # Nothing is learnt from one process to the next, as what one learns would be an advantage of the later ones.
    fixed = {"remember": False, **options}
    with edgeinfer.load(model, **fixed) as loaded:
        items, name = tokenize_prompts(loaded, prompts, max_tokens), loaded.info.name
    replies = Replies(tuple(item.ids for item in items), max_tokens)
    needed = max(len(item.ids) for item in items) + max_tokens
    context = min(-(-needed // _CONTEXT_STEP) * _CONTEXT_STEP, longest)
    sized = {**fixed, "context": context}
    setups = [Setup(UNCONSTRAINED, {**fixed, "context": longest}), Setup(DEFAULT, fixed)]
    setups += [Setup(str(size), {**sized, "memory": size}) for size in budgets_between(model, sized, steps)]
    timed = time_setups(model, setups, replies, rounds, enforce=enforce, told=told)
    results = SpecMemoResults(name, context, tuple(item.prompt.name for item in items), tuple(timed))
    narrowed = narrow(model, timed, replies, rounds, halvings, results.keeps, enforce=enforce)
    return replace(results, timed=tuple(narrowed))


def _longest_context(model: str) -> int:
    manifest = json.loads((Path(model) / "edgeinfer.json").read_text("utf-8"))
    return int(manifest["geometry"]["max_positions"])
