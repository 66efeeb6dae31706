"""The ways to draft that a caller left open: fewer drafters, those first that lose the least speed for their bytes, and
shorter drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edgeinfer.config import LoadConfig
from edgeinfer.drafting import MOST_DRAFTED, NO_DRAFT_MODEL, drafters_in
from edgeinfer.errors import Setting, UsageError
from edgeinfer.runtime.planning.candidates import USUAL_CONTEXT, Drafting, configurations
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.memory_model import MemoryModel
from edgeinfer.runtime.planning.plan_input import PlanInput
from edgeinfer.runtime.planning.speed_model import SpeedModel

_LENGTHS = (MOST_DRAFTED, 7, 3, 1)
# Stands for the draft model among the names of drafters.
_MODEL = ""


def drafting_ways(
    plan_input: PlanInput, config: LoadConfig, memory: MemoryModel, speed: SpeedModel
) -> tuple[Drafting, ...]:
    """Every way to draft that the caller left open, from no concession to the largest."""
    names, present = drafters_in(config.speculation), plan_input.drafter is not None
    most = plan_input.most_drafted
    if most == 0 and (config.speculation not in ("auto", "off") or config.draft_model not in (None, NO_DRAFT_MODEL)):
        message = f"Drafts of {plan_input.manifest.name} cannot be taken back: llama.cpp keeps one state of its layers."
        raise UsageError(message, "Use " + Setting("speculation", "off") + ", or export the checkpoint to ONNX.")
    if most == 0:
        return (Drafting((), 0, False),)
    if config.speculation != "auto":
        wanted = config.draft_max or MOST_DRAFTED
        return (Drafting(names, min(wanted, most or wanted) if names else 0, present),)
    lengths: tuple[int, ...] = (config.draft_max,) if config.draft_max else _LENGTHS
    if most is not None:
        lengths = tuple(dict.fromkeys(min(length, most) for length in lengths))
    # A draft model was given to be used; one that is part of the bundle may be given up.
    given = config.draft_model not in (None, NO_DRAFT_MODEL)
    first = next(configurations(plan_input, config, (Drafting(names, lengths[0], present),)))
    # What goes first does not depend on how long a context there is room for.
    first = dataclasses.replace(first, context=min(first.context, USUAL_CONTEXT))
    kept = [(names, present), *_fewer(first, memory, speed, model_stays=given)]
    # Of equals the one before is taken: who adds nothing goes rather than a longer draft.
    ways = tuple(Drafting(names, length, model) for length in lengths for names, model in kept)
    return ways if config.draft_max or given else (*ways, Drafting((), 0, False))


def _fewer(
    first: Configuration, memory: MemoryModel, speed: SpeedModel, *, model_stays: bool
) -> Sequence[tuple[tuple[str, ...], bool]]:
    """Sets of drafters, each without one more that takes memory: the one that loses the least speed for its bytes.

    Args:
        first: the configuration without concessions.
        model_stays: the draft model is not given up.
    """
    found: list[tuple[tuple[str, ...], bool]] = []
    now = first
    while True:
        pace, size = speed.speed(now).tokens_per_second, memory.drafting(now)
        best, least = None, 0.0
        for name in (*((_MODEL,) if now.draft_model and not model_stays else ()), *now.drafters):
            without = _without(now, name)
            freed = size - memory.drafting(without)
            if freed <= 0:
                continue
            lost = (pace - speed.speed(without).tokens_per_second) / freed
            if best is None or lost < least:
                best, least = without, lost
        if best is None:
            return found
        now = best
        found.append((now.drafters, now.draft_model))


def _without(configuration: Configuration, name: str) -> Configuration:
    if name == _MODEL:
        return dataclasses.replace(configuration, draft_model=False)
    return dataclasses.replace(
        configuration, drafters=tuple(other for other in configuration.drafters if other != name)
    )
