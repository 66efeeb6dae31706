"""Finds the best way to run a model within a budget.

The best way has the fastest turn of a chat, where half of the context is worth as much as a third of the speed, and a
lossless cache as much as a sixth. What the caller fixed is never changed; a plan that cannot fit says what would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgeinfer.bundle.kv_types import find_kv_type
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.runtime.planning.candidates import configurations, modest_configurations
from edgeinfer.runtime.planning.configuration import Configuration, Footprint
from edgeinfer.runtime.planning.memory_model import GROWTH_BYTES, MemoryModel
from edgeinfer.runtime.planning.plan import Alternative, MemoryPlan
from edgeinfer.runtime.planning.plan_input import PlanInput
from edgeinfer.runtime.planning.speed_model import SpeedModel

__all__ = ["search"]

# What half of the context is worth, and a cache of 8 or 4 bits instead of floats, as a share of the speed.
_HALF_CONTEXT = 0.7
_KV_WORTH = {8: 0.85, 4: 0.7}
_Freed = tuple[str, Callable[[LoadConfig], LoadConfig], Callable[[LoadConfig], bool]]


@dataclass(frozen=True)
class _Candidate:
    configuration: Configuration
    footprint: Footprint
    bytes: int


def search(
    plan_input: PlanInput,
    config: LoadConfig,
    memory: MemoryModel,
    speed: SpeedModel,
    *,
    all_ways: bool,
    among: Callable[[Configuration], bool] | None = None,
) -> MemoryPlan:
    """The plan for a request; without a budget, the one without concessions.

    Args:
        all_ways: list alternatives.
        among: which configurations there are to choose from; None takes all.

    Raises:
        ContextLengthError, UsageError: as `configurations`.
    """
    budget = config.memory
    open_ways = (each for each in configurations(plan_input, config) if among is None or among(each))
    first = next(open_ways)
    ways = [first] if budget is None and not all_ways else [first, *open_ways]
    worth = _worth(speed, first)
    # Speeds take less to predict than bytes do. Of equals the first, which gives up least.
    best = [first] if budget is None else sorted(ways, key=worth, reverse=True)
    candidates = (_candidate(each, memory, config) for each in best)
    chosen = next((each for each in candidates if budget is None or each.bytes <= budget), None)
    # The smallest tells the least that would do. Of all that are open it is one of the most modest.
    if chosen is None or all_ways or among is not None:
        every = [_candidate(each, memory, config) for each in ways]
    else:
        every = [chosen, *(_candidate(each, memory, config) for each in modest_configurations(plan_input, config))]
    smallest = min(reversed(every), key=lambda each: each.bytes)
    chosen = chosen or smallest
    plan = MemoryPlan(
        configuration=chosen.configuration,
        layout=plan_input.layout,
        overflow=config.overflow,
        prefix_cache=config.prefix_cache,
        budget_bytes=budget,
        counted=config.counted,
        footprint=chosen.footprint,
        speed=speed.speed(chosen.configuration),
        smallest_bytes=smallest.bytes,
        given_up=_given_up(first, chosen.configuration, speed),
        threads=plan_input.threads,
        tuned=_tuned(plan_input, chosen.configuration),
        device=plan_input.device.name,
        device_note=plan_input.device_note,
    )
    if not plan.fits:
        plan = dataclasses.replace(plan, hints=tuple(_hints(plan_input, config, memory, plan)))
    if all_ways:
        plan = dataclasses.replace(plan, alternatives=tuple(_alternatives(chosen, every, budget, speed, worth)))
    return plan


def _candidate(configuration: Configuration, memory: MemoryModel, config: LoadConfig) -> _Candidate:
    footprint = memory.footprint(configuration)
    return _Candidate(configuration, footprint, footprint.total(config.counted))


def _worth(speed: SpeedModel, wanted: Configuration) -> Callable[[Configuration], float]:
    """Turns of a chat per second, less what was given up for them."""

    def worth(configuration: Configuration) -> float:
        turns = 1e3 / speed.speed(configuration).turn_ms
        halvings = math.log2(wanted.context / configuration.context)
        return turns * math.pow(_HALF_CONTEXT, halvings) * _KV_WORTH.get(find_kv_type(configuration.kv).bits, 1.0)

    return worth


def _tuned(plan_input: PlanInput, chosen: Configuration) -> tuple[str, ...]:
    """The tuned settings that the plan has; those of a pass may have given way to the budget."""
    settings = plan_input.settings
    # A chunk is never longer than the context.
    cut = settings.prefill_chunk is not None and chosen.prefill_chunk < min(settings.prefill_chunk, chosen.context)
    given_way = {"prefill_chunk"} if cut else set()
    given_way |= {"weights"} if settings.weights != chosen.weights else set()
    return tuple(name for name in settings.names if name not in given_way)


def _given_up(wanted: Configuration, chosen: Configuration, speed: SpeedModel) -> tuple[str, ...]:
    """What differs from the configuration without concessions, in words."""
    lost = []
    if chosen.context < wanted.context:
        lost.append(f"context of {chosen.context} tokens instead of {wanted.context}")
    if chosen.kv != wanted.kv:
        lost.append(f"cache in {chosen.kv} instead of {wanted.kv} (lossy)")
    if chosen.weights != wanted.weights:
        windows = f", {chosen.window_layers} layers at a time" if chosen.window_layers else ""
        some = f", {format_size(chosen.expert_bytes)} of them in memory," if chosen.expert_bytes else ""
        lost.append(f"weights {chosen.weights}{windows}{some} instead of {wanted.weights}")
    if chosen.tokenizer != wanted.tokenizer:
        lost.append("tokenizer loaded again for every prompt")
    if not chosen.draft_max and wanted.draft_max:
        lost.append("no drafting")
    elif chosen.drafters != wanted.drafters:
        lost.append(f"drafting by {', '.join(sorted(set(chosen.drafters)))} only")
    if 0 < chosen.draft_max < wanted.draft_max:
        lost.append(f"drafts of {chosen.draft_max} tokens at most instead of {wanted.draft_max}")
    if chosen.prefill_chunk < wanted.prefill_chunk:
        lost.append(f"prompts in chunks of {chosen.prefill_chunk} instead of {wanted.prefill_chunk}")
    share = speed.speed(chosen).tokens_per_second / speed.speed(wanted).tokens_per_second
    if share < 0.99:
        lost.append(f"{1 - share:.0%} of the speed")
    return tuple(lost)


# What the caller may have fixed: the option to leave open, and whether it was given.
_FREED: tuple[_Freed, ...] = (
    ("a smaller context (-c)", lambda c: dataclasses.replace(c, context=None), lambda c: c.context is not None),
    ("a cache of 8 bits (no --kv)", lambda c: dataclasses.replace(c, kv=None), lambda c: c.kv is not None),
    ("no --weights", lambda c: dataclasses.replace(c, weights=None), lambda c: c.weights is not None),
    (
        "no --spec",
        lambda c: dataclasses.replace(c, speculation="off", draft_max=None, draft_model=None),
        lambda c: c.speculation not in ("auto", "off") or c.draft_max is not None or c.draft_model is not None,
    ),
    ("a smaller prefix cache", lambda c: dataclasses.replace(c, prefix_cache=0), lambda c: c.prefix_cache > 0),
)


def _hints(plan_input: PlanInput, config: LoadConfig, memory: MemoryModel, plan: MemoryPlan) -> Iterable[str]:
    """Options that, left open, would let the same request fit in less; with how much that would be."""
    for name, free, given in _FREED:
        if not given(config):
            continue
        freed = free(config)
        open_input = plan_input if freed.draft_model else dataclasses.replace(plan_input, drafter=None)
        model = MemoryModel(open_input, freed, memory.process)
        least = min(_candidate(each, model, freed).bytes for each in modest_configurations(open_input, freed))
        if least < plan.smallest_bytes:
            yield f"{name} with {format_size(least + GROWTH_BYTES)}"


def _alternatives(
    chosen: _Candidate,
    candidates: Sequence[_Candidate],
    budget: int | None,
    speed: SpeedModel,
    worth: Callable[[Configuration], float],
) -> Iterable[Alternative]:
    """The best of each kind that the chosen one is not, and the smallest of all; fitting or not."""
    smallest = min(candidates, key=lambda each: each.bytes).configuration
    kinds: dict[str, Callable[[Configuration], bool]] = {
        "no concessions": lambda c: c == candidates[0].configuration,
        "smallest": lambda c: c == smallest,
        "no drafting": lambda c: c.draft_max == 0,
        "transient tokenizer": lambda c: c.tokenizer == "transient",
    }
    ways = [each.configuration for each in candidates]
    kinds |= {f"cache in {kv}": _with("kv", kv) for kv in dict.fromkeys(way.kv for way in ways)}
    kinds |= {f"weights {mode}": _with("weights", mode) for mode in dict.fromkeys(way.weights for way in ways)}
    kinds |= {f"context of {size}": _with("context", size) for size in dict.fromkeys(way.context for way in ways)}
    seen = {chosen.configuration}
    for name, belongs in kinds.items():
        if belongs(chosen.configuration):
            continue
        mine = [each for each in candidates if belongs(each.configuration)]
        fitting = [each for each in mine if budget is None or each.bytes <= budget]
        if not mine:
            continue
        best = max(fitting, key=lambda each: worth(each.configuration)) if fitting else min(mine, key=lambda e: e.bytes)
        if best.configuration not in seen:
            seen.add(best.configuration)
            fits = budget is None or best.bytes <= budget
            yield Alternative(name, best.configuration, best.bytes, fits, speed.speed(best.configuration))


def _with(field: str, value: object) -> Callable[[Configuration], bool]:
    return lambda configuration: bool(getattr(configuration, field) == value)
