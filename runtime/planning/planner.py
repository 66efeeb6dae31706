"""Plans a request by what is known of bundle, process and device, and plans again when a turn begins.

While a model is loaded, only what can change under it does: who drafts, how far, and how prompts are cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.bundle.tables import tensors_in
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import UsageError
from edgeinfer.runtime.planning.configuration import TOKENIZER, Configuration
from edgeinfer.runtime.planning.memory_model import NEEDED_SHARE, OUTSIDE, MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.plan_input import PlanInput
from edgeinfer.runtime.planning.search import search
from edgeinfer.runtime.planning.speed_model import ROUND_MS, Pace, SpeedModel, guessed_passes
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.drafting import ACCEPTANCE, acceptance_by_position
from edgeinfer.runtime.system.machine import machine_memory
from edgeinfer.runtime.system.memory import ProcessMemory, process_memory
from edgeinfer.runtime.weights.expert_bytes import ExpertBytes
from edgeinfer.runtime.weights.streaming import pass_bytes, streamed_ms

__all__ = ["Profiles", "Replan", "make_plan", "make_replanner", "process_before_loading", "speed_model"]

Profiles = Callable[[str], DeviceProfile]

# Of parsing a byte of tokenizer.json (docs/LOG.md, 2026-11-21).
_PARSING_MS_PER_BYTE = 6e-5
# Bytes per second at which dropped pages come back from the system's cache of the file.
_RELEASED_PER_S = 1e10
Replan = Callable[[MemoryPlan, ProcessMemory, Mapping[str, int]], MemoryPlan]
# Terms that grow while the model is used, and which are not alive between two turns.
_KNOWN = ("kv", "prefix_cache")
_TRANSIENT = ("activations", "loading")
# Less than this is what the allocator keeps now and then.
_NOTICED_BYTES = 8_000_000


def make_plan(
    plan_input: PlanInput,
    config: LoadConfig,
    speed: SpeedModel,
    *,
    all_ways: bool = False,
    process: ProcessMemory | None = None,
) -> MemoryPlan:
    """Plans for a process that has nothing of the model loaded yet.

    Args:
        speed: of the same input.
        all_ways: list alternatives.
        process: as `process_before_loading` gave it, where something was loaded since; None asks now.

    Raises:
        ContextLengthError: the context asked for is larger than the model allows.
        UsageError: the budget is larger than the machine, or something is asked for that the model does not have.
    """
    machine = machine_memory()
    if config.memory is not None and config.memory > machine:
        message = f"A budget of {format_size(config.memory)} is more than this machine's {format_size(machine)}."
        raise UsageError(message, "Give a smaller one, or none.")
    memory = MemoryModel(plan_input, config, process or process_before_loading(plan_input))
    return search(plan_input, config, memory, speed, all_ways=all_ways)


def speed_model(plan_input: PlanInput, profiles: Profiles) -> SpeedModel:
    """Predicts the pace of a model from what is known of it on this device.

    Args:
        profiles: what was measured of a variant of the model.

    A variant that never ran here is taken to run as the usual one, and what streaming adds by the bytes it reads again.
    Of experts those are the share that is not in memory, as if every expert were chosen alike.
    """
    tensors = tensors_in(plan_input.manifest, plan_input.layout)
    experts = ExpertBytes.of(plan_input.manifest.decoder, tensors)
    usual = _pace(plan_input, profiles(""), experts)
    layers, pages = plan_input.manifest.geometry.num_layers, pass_bytes(tensors)
    known: dict[str, Pace] = {"": usual}

    def again_ms(configuration: Configuration, rows: int) -> float:
        """What reading weights again adds to a pass over so many rows."""
        window, kept, needed = configuration.window_layers, configuration.expert_bytes, experts.needed(rows)
        if window:
            # The embedding and the head are windows of their own.
            return streamed_ms(0.0, pages - experts.total + round(needed), _RELEASED_PER_S, 2 + -(-layers // window))
        return streamed_ms(0.0, round((1 - kept / experts.total) * needed), _RELEASED_PER_S, 0) if kept else 0.0

    def pace_of(configuration: Configuration) -> Pace:
        variant = plan_input.variant(configuration)
        if variant not in known:
            own = _pace(plan_input, profiles(variant), experts)
            if own.measured:
                rereads = configuration.window_layers > 0 or configuration.expert_bytes > 0
                own = _beside(own, usual, rereads=rereads)
            else:
                points = tuple((rows, ms + again_ms(configuration, rows)) for rows, ms in usual.passes.points)
                own = dataclasses.replace(usual, passes=PassCosts(points, usual.passes.step), measured=False)
            known[variant] = own
        return known[variant]

    return SpeedModel(pace_of)


def _beside(own: Pace, usual: Pace, *, rereads: bool) -> Pace:
    """A variant's pace as if it had been measured together with the usual one's.

    Two measurements on different days may differ by more than two variants do. A pass over one row takes about the same
    whatever the cache's numbers, so only what further rows cost is the variant's own; reading again is never faster.
    """
    scale = usual.passes.ms(1) / own.passes.ms(1)
    if rereads:
        scale = max(1.0, scale)
    points = tuple((rows, ms * scale) for rows, ms in own.passes.points)
    return dataclasses.replace(own, passes=PassCosts(points, own.passes.step))


def process_before_loading(plan_input: PlanInput) -> ProcessMemory:
    """Memory of the process with the libraries that loading will import."""
    for each in (plan_input, plan_input.drafter):
        if each is not None:
            each.memory.import_libraries()
    return process_memory()


def _pace(plan_input: PlanInput, profile: DeviceProfile, experts: ExpertBytes) -> Pace:
    costs = profile.costs()
    tokenizer = plan_input.manifest.files.get(TOKENIZER)
    always_read = plan_input.manifest.weight_bytes - experts.total
    return Pace(
        passes=costs.passes if costs else guessed_passes(always_read, experts.needed),
        measured=costs is not None,
        round_ms=costs.round_ms if costs else ROUND_MS,
        acceptance=acceptance_by_position(profile.arrays(ACCEPTANCE)),
        tokenizer_ms=_PARSING_MS_PER_BYTE * tokenizer.bytes if tokenizer else 0.0,
    )


def make_replanner(plan_input: PlanInput, config: LoadConfig, speed: SpeedModel) -> Replan:
    """A function of the plan in force, the process now and the bytes its parts hold: the plan from now on."""

    def replan(plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int]) -> MemoryPlan:
        outside = _outside(plan, process, used)
        mine, planned = plan.configuration, _planned_outside(plan)
        if abs(outside.anonymous - planned.anonymous) + abs(outside.file - planned.file) < _NOTICED_BYTES:
            return plan
        chosen: dict[str, Any] = {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
        fixed = dataclasses.replace(config, **chosen)

        def changeable(other: Configuration) -> bool:
            fixed = other.window_layers, other.expert_bytes, other.tokenizer
            return fixed == (mine.window_layers, mine.expert_bytes, mine.tokenizer)

        # The model of a process takes off the pages of libraries that only loading needs; here they are gone already.
        memory = MemoryModel(plan_input, fixed, dataclasses.replace(outside, file=round(outside.file / NEEDED_SHARE)))
        found = search(plan_input, fixed, memory, speed, all_ways=False, among=changeable)
        # Where nothing fits, what is really taken decides, not what may be.
        return found if found.fits else plan

    return replan


def _planned_outside(plan: MemoryPlan) -> ProcessMemory:
    anonymous, file = (sum(pages.get(name, 0) for name in OUTSIDE) for pages in _pages(plan))
    return ProcessMemory(anonymous + file, anonymous + file, anonymous, file)


def _outside(plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int]) -> ProcessMemory:
    """The process less the model: known terms as they are, the others as planned, so never too much is taken off."""
    anonymous, file = (
        sum(
            min(used.get(name, 0), size) if name in _KNOWN else size
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
