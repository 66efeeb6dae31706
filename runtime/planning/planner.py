"""Plans a request by what is known of bundle, process and device, and plans again when a turn begins. While a model is
loaded, only what can change under it does: who drafts, how far, and how prompts are cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from mmap import PAGESIZE
from typing import Any, Protocol

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.planning.candidates import configurations
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration
from edgeinfer.runtime.planning.memory_model import NEEDED_SHARE, OUTSIDE, RESERVE_BYTES, MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.search import drafting_ways, search
from edgeinfer.runtime.planning.speed_model import (
    SpeedModel,
)
from edgeinfer.runtime.profile.kept import with_measured_policy
from edgeinfer.runtime.system.machine import free_memory, machine_memory
from edgeinfer.runtime.system.memory import ProcessMemory, process_memory


class Replan(Protocol):
    """Makes another plan of the one in force."""

    def __call__(
        self, plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int], *, grammars: bool = False
    ) -> MemoryPlan:
        """Make a plan from the bytes in use; with memory for replies by `grammars`, even if that does not fit."""


# Terms that grow while the model is used, and which are not alive between two turns.
_KNOWN = ("kv", "prefix_cache")
_PASSING = ("activations", "loading")
# What cannot change under a loaded model.
_LASTING = ("window_layers", "kept_layers", "expert_bytes", "tokenizer", "draft_model")
# What the system counts besides: tables of pages, and pages of files that are read once, as a tokenizer's.
_UNLISTED_BYTES = 4_000_000
# Of the memory that is free, what a model with a longer context than usual takes at most.
_FREE_SHARE = 0.5
# Less than this is what the allocator keeps now and then.
_NOTICED_BYTES = 8_000_000


def make_plan(
    facts: BundleFacts,
    config: LoadOptions,
    speed: SpeedModel,
    *,
    all_ways: bool = False,
    process: ProcessMemory | None = None,
    loading: bool = False,
) -> MemoryPlan:
    """Make a plan for a process without the model, measured now if `process` is None; `loading` allows use of the
    reserve."""
    config = with_measured_policy(config, facts.bundle, facts.backend)
    machine = machine_memory()
    # The system rounds limits of control groups down to pages.
    if config.memory is not None and config.memory >= machine + PAGESIZE:
        message = f"A budget of {format_size(config.memory)} is more than the {format_size(machine)} of this machine."
        raise UsageError(message, "Use a smaller budget, or none.")
    measured = process or process_before_loading(facts)
    # A longer context than usual may take what is free, as few replies fill it.
    free = measured.rss + round(_FREE_SHARE * free_memory())
    find = functools.partial(_plan, facts, config, speed, all_ways=all_ways, free=free)
    plan = find(MemoryModel(facts, config, measured))
    if process is None and not plan.fits:
        # Planning itself takes memory that stays, and the smallest budget that is named has to hold it.
        measured = process_before_loading(facts)
        plan = find(MemoryModel(facts, config, measured))
    if plan.fits or not loading or (config.memory or 0) < plan.minimum_bytes - RESERVE_BYTES:
        return plan
    # The process may have grown into the reserve of an earlier plan, whose smallest budget was promised to do.
    tight = find(MemoryModel(facts, config, measured, reserve=0))
    return tight if tight.fits else plan


def _plan(
    facts: BundleFacts, config: LoadOptions, speed: SpeedModel, memory: MemoryModel, *, all_ways: bool, free: int
) -> MemoryPlan:
    """Make a plan, counting reads from the disk if the system cannot keep all weights in memory."""
    find = functools.partial(search, facts, config, memory, all_ways=all_ways, free=free)
    if not facts.device.on_cpu:
        return find(speed)
    room = free_memory(round(NEEDED_SHARE * memory.process.file)) - _UNLISTED_BYTES

    @functools.cache
    def bytes_of(configuration: Configuration) -> int:
        return memory.footprint(configuration).without_weights

    # Thousands of configurations differ only in how they read prompts.
    reading = speed.within(lambda c: room - bytes_of(dataclasses.replace(c, prefill_chunk=1)))
    # Budgets are compared by one model of speeds, so it is not what a budget has room for that decides.
    ways = configurations(facts, config, drafting_ways(facts, config, memory, speed))
    most = next((each for each in ways if each.weights != "packed"), None)
    return find(speed if most is None or reading.disk(most) is None else reading)


def process_before_loading(facts: BundleFacts) -> ProcessMemory:
    for each in (facts, facts.drafter):
        if each is not None:
            each.memory.import_libraries()
    return process_memory()


def make_replanner(facts: BundleFacts, config: LoadOptions, speed: SpeedModel) -> Replan:
    """A function that plans again what can change under a loaded model."""

    def replan(
        plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int], *, grammars: bool = False
    ) -> MemoryPlan:
        outside = _outside(plan, process, used)
        mine, planned = plan.configuration, _planned_outside(plan)
        if abs(outside.anonymous - planned.anonymous) + abs(outside.file - planned.file) < _NOTICED_BYTES:
            if not grammars:
                return plan
            outside = planned
        chosen: dict[str, Any] = {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
        chosen |= {"overflow": plan.overflow, "structured": grammars or mine.grammars != "none"}
        fixed = dataclasses.replace(config, **chosen)

        def changeable(other: Configuration) -> bool:
            if any(getattr(other, name) != getattr(mine, name) for name in _LASTING):
                return False
            # The vocabulary may have been made for the engine.
            return mine.grammars in ("none", other.grammars)

        # The model of a process takes off the pages of libraries that only loading needs; here they are gone already.
        process = dataclasses.replace(outside, file=round(outside.file / NEEDED_SHARE))
        memory = MemoryModel(facts, fixed, process, reserve=plan.terms.get("reserve", 0))
        disk = plan.disk
        paced = speed if disk is None else speed.within(lambda _: disk.room)
        found = search(facts, fixed, memory, paced, all_ways=False, among=changeable, hints=grammars)
        # Where nothing fits, what is really taken decides, not what may be.
        return found if found.fits or grammars else plan

    return replan


def _planned_outside(plan: MemoryPlan) -> ProcessMemory:
    anonymous, file = (sum(pages.get(name, 0) for name in OUTSIDE) for pages in _pages(plan))
    return ProcessMemory(anonymous + file, anonymous + file, anonymous, file)


def _outside(plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int]) -> ProcessMemory:
    """The process without the model: known terms as measured, the others as planned."""
    anonymous, file = (
        sum(
            min(used.get(name, 0), size) if name in _KNOWN else size
            for name, size in pages.items()
            if name not in OUTSIDE and name not in _PASSING
        )
        for pages in _pages(plan)
    )
    planned = _planned_outside(plan)
    # What the model has not touched yet was planned for it all the same: the program did not shrink by that.
    anonymous, file = max(process.anonymous - anonymous, planned.anonymous), max(process.file - file, planned.file)
    return ProcessMemory(anonymous + file, anonymous + file, anonymous, file)


def _pages(plan: MemoryPlan) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return plan.footprint.anonymous, plan.footprint.file
