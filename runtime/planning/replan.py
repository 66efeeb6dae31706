"""Plans again at a turn's beginning, when the program around the model has grown or shrunk; knows nothing of what acts.

Only what can change under a loaded model does: who drafts, how far, and how prompts are cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from edgeinfer.config import LoadConfig
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.memory_model import NEEDED_SHARE, OUTSIDE, MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.search import search
from edgeinfer.runtime.planning.speed_model import SpeedModel
from edgeinfer.runtime.planning.subject import Subject
from edgeinfer.runtime.system.memory import ProcessMemory

__all__ = ["Replan", "make_replanner"]

Replan = Callable[[MemoryPlan, ProcessMemory, Mapping[str, int]], MemoryPlan]

# Terms that grow while the model is used, and which are not alive between two turns.
_KNOWN = ("kv", "prefix_cache")
_TRANSIENT = ("activations", "loading")
# Less than this is what the allocator keeps now and then.
_NOTICED_BYTES = 8_000_000


def make_replanner(subject: Subject, config: LoadConfig, speed: SpeedModel) -> Replan:
    """A function of the plan in force, the process now and the bytes its parts hold: the plan from now on."""

    def replan(plan: MemoryPlan, process: ProcessMemory, held: Mapping[str, int]) -> MemoryPlan:
        outside = _outside(plan, process, held)
        mine, planned = plan.configuration, _planned_outside(plan)
        if abs(outside.anonymous - planned.anonymous) + abs(outside.file - planned.file) < _NOTICED_BYTES:
            return plan
        fixed = dataclasses.replace(config, context=mine.context, kv=mine.kv, weights=mine.weights)

        def changeable(other: Configuration) -> bool:
            fixed = other.window_layers, other.expert_bytes, other.tokenizer
            return fixed == (mine.window_layers, mine.expert_bytes, mine.tokenizer)

        # The model of a process takes off the pages of libraries that only loading needs; here they are gone already.
        memory = MemoryModel(subject, fixed, dataclasses.replace(outside, file=round(outside.file / NEEDED_SHARE)))
        found = search(subject, fixed, memory, speed, all_ways=False, among=changeable)
        # Where nothing fits, what is really taken decides, not what may be.
        return found if found.fits else plan

    return replan


def _planned_outside(plan: MemoryPlan) -> ProcessMemory:
    anonymous, file = (sum(pages.get(name, 0) for name in OUTSIDE) for pages in _pages(plan))
    return ProcessMemory(anonymous + file, anonymous + file, anonymous, file)


def _outside(plan: MemoryPlan, process: ProcessMemory, held: Mapping[str, int]) -> ProcessMemory:
    """The process less the model: known terms as they are, the others as planned, so never too much is taken off."""
    anonymous, file = (
        sum(
            min(held.get(name, 0), size) if name in _KNOWN else size
            for name, size in pages.items()
            if name not in OUTSIDE and name not in _TRANSIENT
        )
        for pages in _pages(plan)
    )
    planned = _planned_outside(plan)
    # What the model has not touched yet was planned for it all the same: the program did not shrink by that.
    anonymous, file = max(process.anonymous - anonymous, planned.anonymous), max(process.file - file, planned.file)
    return ProcessMemory(anonymous + file, anonymous + file, anonymous, file)


def _pages(plan: MemoryPlan) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return plan.footprint.anonymous, plan.footprint.file
