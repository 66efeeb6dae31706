"""Plans a request by what is known of bundle, process and device, and plans again when a turn begins. While a model is
loaded, only what can change under it does: who drafts, how far, and how prompts are cut."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from mmap import PAGESIZE
from typing import Any, NamedTuple, Protocol

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.runtime.planning.candidates import configurations, weights_ways
from edgeinfer.runtime.planning.memory_model import NEEDED_SHARE, OUTSIDE, RESERVE_BYTES, MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.plan_input import Configuration, PlanInput
from edgeinfer.runtime.planning.search import drafting_ways, search
from edgeinfer.runtime.planning.speed_model import (
    LEAST_MS,
    ROUND_MS,
    DiskReads,
    Pace,
    SpeedModel,
    cache_ms,
    guessed_passes,
    guessed_token_ms,
)
from edgeinfer.runtime.profile.costs import PassCosts, Prospect, prospects_by
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.drafting import DRAFTED, TunedDrafting, drafter_records
from edgeinfer.runtime.profile.kept import with_measured_policy
from edgeinfer.runtime.system.machine import free_memory, machine_memory
from edgeinfer.runtime.system.memory import ProcessMemory, process_memory
from edgeinfer.runtime.weights.disk_rate import kept_rate
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import Run, layer_runs, pass_bytes, reread_ms, window_bytes


class Replan(Protocol):
    """Makes another plan of the one in force."""

    def __call__(
        self, plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int], *, grammars: bool = False
    ) -> MemoryPlan:
        """Make a plan from the bytes in use; with memory for replies by `grammars`, even if that does not fit."""


class Profiles(Protocol):
    """Opens what was measured and learnt of one way of running a model on this device."""

    def __call__(self, variant: str, *, draft_model: bool) -> DeviceProfile:
        """The profile of a variant, with or without the draft model."""


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
    plan_input: PlanInput,
    config: LoadConfig,
    speed: SpeedModel,
    *,
    all_ways: bool = False,
    process: ProcessMemory | None = None,
    loading: bool = False,
) -> MemoryPlan:
    """Make a plan for a process without the model, measured now if `process` is None; `loading` allows use of the
    reserve."""
    config = with_measured_policy(config, plan_input.bundle)
    machine = machine_memory()
    # The system rounds limits of control groups down to pages.
    if config.memory is not None and config.memory >= machine + PAGESIZE:
        message = f"A budget of {format_size(config.memory)} is more than the {format_size(machine)} of this machine."
        raise UsageError(message, "Use a smaller budget, or none.")
    measured = process or process_before_loading(plan_input)
    # A longer context than usual may take what is free, as few replies fill it.
    free = measured.rss + round(_FREE_SHARE * free_memory())
    find = functools.partial(_plan, plan_input, config, speed, all_ways=all_ways, free=free)
    plan = find(MemoryModel(plan_input, config, measured))
    if process is None and not plan.fits:
        # Planning itself takes memory that stays, and the smallest budget that is named has to hold it.
        measured = process_before_loading(plan_input)
        plan = find(MemoryModel(plan_input, config, measured))
    if plan.fits or not loading or (config.memory or 0) < plan.minimum_bytes - RESERVE_BYTES:
        return plan
    # The process may have grown into the reserve of an earlier plan, whose smallest budget was promised to do.
    tight = find(MemoryModel(plan_input, config, measured, reserve=0))
    return tight if tight.fits else plan


def _plan(
    plan_input: PlanInput, config: LoadConfig, speed: SpeedModel, memory: MemoryModel, *, all_ways: bool, free: int
) -> MemoryPlan:
    """Make a plan, counting reads from the disk if the system cannot keep all weights in memory."""
    find = functools.partial(search, plan_input, config, memory, all_ways=all_ways, free=free)
    if not plan_input.device.on_cpu:
        return find(speed)
    room = free_memory(round(NEEDED_SHARE * memory.process.file)) - _UNLISTED_BYTES

    @functools.cache
    def bytes_of(configuration: Configuration) -> int:
        return memory.footprint(configuration).without_weights

    # Thousands of configurations differ only in how they read prompts.
    reading = speed.within(lambda c: room - bytes_of(dataclasses.replace(c, prefill_chunk=1)))
    # Budgets are compared by one model of speeds, so it is not what a budget has room for that decides.
    ways = configurations(plan_input, config, drafting_ways(plan_input, config, memory, speed))
    most = next((each for each in ways if each.weights != "packed"), None)
    return find(speed if most is None or reading.disk(most) is None else reading)


def speed_model(plan_input: PlanInput, profiles: Profiles) -> SpeedModel:
    """Predicts the pace of a model from what is known of it on this device.

    All speeds rest on one reference: the usual variant where it was measured, another where only that was, less what it
    reads again, or a guess. So does what drafts are expected to do, of which no variant knows more. A variant that
    never ran here is taken to run as the reference; streaming adds what the bytes that it reads again take, another
    type of cache what its rows take. Of experts those are the share that is not in memory, as if all were chosen alike.
    """
    tensors = tensors_in(plan_input.manifest, plan_input.layout)
    experts = ExpertBytes.of(plan_input.manifest.decoder, tensors)
    geometry, pages = plan_input.manifest.geometry, pass_bytes(tensors)
    arrays = sum(find_expert(t.name) is None for t in tensors)
    read = _Read(pages, layer_runs(tensors), arrays, pass_bytes(t for t in tensors if t.name == "head"))
    known: dict[tuple[str, bool], Pace] = {}

    @functools.cache
    def pace(variant: str, draft_model: bool) -> Pace:
        return _pace(plan_input, profiles(variant, draft_model=draft_model), experts)

    def again_ms(configuration: Configuration, rows: int) -> float:
        """Milliseconds that reading weights again adds to a pass."""
        kept, needed = configuration.expert_bytes, experts.needed(rows)
        if configuration.window_layers:
            return _streamed_again_ms(configuration, read, (pages - experts.total + needed) / pages)
        return reread_ms((1 - kept / experts.total) * needed) if kept else 0.0

    usual_kv, reference, best = _reference(plan_input, pace, again_ms)

    def pace_of(configuration: Configuration) -> Pace:
        key = plan_input.variant(configuration), configuration.draft_model
        if key not in known:
            variant, draft_model = key
            # A draft model in memory changes what passes cost less than anything else does.
            near = next((each for each in (key, (variant, not draft_model)) if pace(*each).measured), None)
            own = best if near is None else pace(*near)
            row_ms = cache_ms(geometry, configuration.kv) - cache_ms(geometry, usual_kv)
            if near is None:
                points = tuple(
                    (rows, max(LEAST_MS, ms + rows * row_ms) + again_ms(configuration, rows))
                    for rows, ms in own.passes.points
                )
                own = dataclasses.replace(own, passes=PassCosts(points, own.passes.step))
            elif best.measured:
                rereads = configuration.window_layers > 0 or configuration.expert_bytes > 0
                own = _scaled(own, max(LEAST_MS, best.passes.ms(1) + row_ms), rereads=rereads)
            # Choosing a token takes the same in all variants, so one of them decides for all.
            token_ms = _token_ms(plan_input, [profiles(v, draft_model=d) for v, d in (reference, near or reference)])
            known[key] = dataclasses.replace(own, measured=near == key, prospects=best.prospects, token_ms=token_ms)
        return known[key]

    rate = kept_rate(plan_input.weights_place or plan_input.bundle.path)
    # Packed layers are scattered over their file, so what goes of them is left to the system, as of mapped weights.
    layers = read.layers if plan_input.layout == NATIVE else ()
    return SpeedModel(pace_of, DiskReads(rate, pages - experts.total, experts, layers))


class _Read(NamedTuple):
    """What passes read of the weights: bytes in all, places of the layers, arrays but those of experts, and bytes of
    the head."""

    bytes: int
    layers: tuple[Run, ...]
    arrays: int
    head: int


def _streamed_again_ms(configuration: Configuration, read: _Read, share: float) -> float:
    """Milliseconds that reading streamed weights again adds; `share` is of all bytes, without experts not chosen."""
    layers, window, kept = len(read.layers), configuration.window_layers, configuration.kept_layers
    if kept:
        sizes = window_bytes(read.layers, window, kept)
        return reread_ms(sum(sizes) * share, round((1 - kept / layers) * read.arrays), len(sizes) * layers)
    if window >= layers:
        return reread_ms(read.head)
    # The embedding and the head are windows of their own.
    windows = 2 + -(-layers // window)
    return reread_ms(read.bytes * share, read.arrays, windows * layers)


def _reference(
    plan_input: PlanInput, pace: Callable[[str, bool], Pace], again_ms: Callable[[Configuration, int], float]
) -> tuple[str, tuple[str, bool], Pace]:
    """The reference of all speeds: a cache type, a variant, and its pace without reading weights again."""
    for kv, key in _resident(plan_input):
        if pace(*key).measured:
            return kv, key, pace(*key)
    for each in _rereading(plan_input):
        key = plan_input.variant(each), each.draft_model
        if (found := pace(*key)).measured:
            points = tuple((rows, max(LEAST_MS, ms - again_ms(each, rows))) for rows, ms in found.passes.points)
            return each.kv, key, dataclasses.replace(found, passes=PassCosts(points, found.passes.step))
    usual = "", plan_input.drafter is not None
    return plan_input.kv_types[0], usual, pace(*usual)


def _resident(plan_input: PlanInput) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Cache types and variants with all weights in memory, the usual first, each with and without a draft model."""
    modes = [mode for mode in plan_input.weights_modes if mode not in ("streamed", "experts")]
    for kv, weights in itertools.product(plan_input.kv_types, modes):
        for draft_model in (True, False) if plan_input.drafter is not None else (False,):
            yield kv, (plan_input.variant_of(kv, weights), draft_model)


def _rereading(plan_input: PlanInput) -> Iterator[Configuration]:
    """Configurations that read weights again, those that read least first."""
    ways = [way for way in weights_ways(plan_input, LoadConfig()) if way.window_layers or way.expert_bytes]
    for kv, way in itertools.product(plan_input.kv_types, ways):
        for draft_model in (True, False) if plan_input.drafter is not None else (False,):
            c = Configuration(1, 1, kv, way.mode, way.window_layers, (), 0, plan_input.tokenizer, way.expert_bytes)
            yield dataclasses.replace(c, kept_layers=way.kept_layers, draft_model=draft_model)


def _scaled(own: Pace, row_ms: float, *, rereads: bool) -> Pace:
    """A variant's pace as if it had been measured together with the usual one's. Two measurements on different days may
    differ by more than two variants do. So only what further rows cost is the variant's own; reading again is never
    faster."""
    scale = row_ms / own.passes.ms(1)
    if rereads:
        scale = max(1.0, scale)
    points = tuple((rows, ms * scale) for rows, ms in own.passes.points)
    return dataclasses.replace(own, passes=PassCosts(points, own.passes.step))


def process_before_loading(plan_input: PlanInput) -> ProcessMemory:
    for each in (plan_input, plan_input.drafter):
        if each is not None:
            each.memory.import_libraries()
    return process_memory()


def _token_ms(plan_input: PlanInput, profiles: Sequence[DeviceProfile]) -> float:
    """Milliseconds of a token besides its round, by the first profile that has them, or a guess."""
    for profile in profiles:
        costs = profile.costs()
        if costs is not None and costs.drafts.token_ms is not None:
            return costs.drafts.token_ms
    return guessed_token_ms(plan_input.manifest.geometry.vocab_size)


def _pace(plan_input: PlanInput, profile: DeviceProfile, experts: ExpertBytes) -> Pace:
    costs = profile.costs()
    always_read = plan_input.manifest.weight_bytes - experts.total
    passes = costs.passes if costs else guessed_passes(always_read, experts.needed)
    return Pace(
        passes=passes,
        measured=costs is not None,
        round_ms=costs.round_ms if costs else ROUND_MS,
        prospects=_prospects(plan_input, profile, passes),
    )


def _prospects(plan_input: PlanInput, profile: DeviceProfile, passes: PassCosts) -> tuple[Prospect, ...]:
    options, costs = plan_input.option_bytes, profile.costs()
    assert options is not None, "whoever plans a target says what drafters promise"
    priors = options.priors(plan_input, TunedDrafting.of(profile, plan_input.manifest.geometry.num_layers))
    records = drafter_records(profile.arrays(DRAFTED), priors)
    return prospects_by(priors, passes.ms(1), costs.drafts.guess_ms if costs else {}, records)


def make_replanner(plan_input: PlanInput, config: LoadConfig, speed: SpeedModel) -> Replan:
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
        memory = MemoryModel(plan_input, fixed, process, reserve=plan.terms.get("reserve", 0))
        disk = plan.disk
        paced = speed if disk is None else speed.within(lambda _: disk.room)
        found = search(plan_input, fixed, memory, paced, all_ways=False, among=changeable, hints=grammars)
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
