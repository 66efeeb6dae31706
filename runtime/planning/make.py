"""Makes the plan of a request from what is known of bundle, process and device; knows nothing of choosing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from edgeinfer.bundle.tables import tensors_in
from edgeinfer.config import LoadConfig, format_size
from edgeinfer.errors import UsageError
from edgeinfer.runtime.experts.cost import ExpertBytes
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.memory_model import MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.search import search
from edgeinfer.runtime.planning.speed_model import ROUND_MS, Pace, SpeedModel, guessed_passes
from edgeinfer.runtime.planning.subject import Subject
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.profile import Profile
from edgeinfer.runtime.profile.reach import REACH, reach_of
from edgeinfer.runtime.system.machine import machine_memory
from edgeinfer.runtime.system.memory import ProcessMemory, process_memory
from edgeinfer.runtime.weights.streaming import pass_bytes, streamed_ms

__all__ = ["Profiles", "make_plan", "process_before_loading", "speed_model"]

Profiles = Callable[[str], Profile]

# Of parsing a byte of tokenizer.json (docs/LOG.md, 2026-11-21).
_PARSING_MS_PER_BYTE = 6e-5
# Bytes per second at which dropped pages come back from the system's cache of the file.
_RELEASED_PER_S = 1e10


def make_plan(
    subject: Subject,
    config: LoadConfig,
    speed: SpeedModel,
    *,
    all_ways: bool = False,
    process: ProcessMemory | None = None,
) -> MemoryPlan:
    """Plans for a process that has nothing of the model loaded yet.

    Args:
        speed: of the subject.
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
    memory = MemoryModel(subject, config, process or process_before_loading(subject))
    return search(subject, config, memory, speed, all_ways=all_ways)


def speed_model(subject: Subject, profiles: Profiles) -> SpeedModel:
    """Predicts the pace of a model from what is known of it on this device.

    Args:
        profiles: what was measured of a variant of the model.

    A variant that never ran here is taken to run as the usual one, and what streaming adds by the bytes it reads again.
    Of experts those are the share that is not in memory, as if every expert were chosen alike.
    """
    tensors = tensors_in(subject.manifest, subject.layout)
    experts = ExpertBytes.of(subject.manifest.decoder, tensors)
    usual = _pace(subject, profiles(""), experts)
    layers, pages = subject.manifest.geometry.num_layers, pass_bytes(tensors)
    known: dict[str, Pace] = {"": usual}

    def again_ms(configuration: Configuration, rows: int) -> float:
        """What reading weights again adds to a pass over so many rows."""
        window, kept, needed = configuration.window_layers, configuration.expert_bytes, experts.needed(rows)
        if window:
            # The embedding and the head are windows of their own.
            return streamed_ms(0.0, pages - experts.total + round(needed), _RELEASED_PER_S, 2 + -(-layers // window))
        return streamed_ms(0.0, round((1 - kept / experts.total) * needed), _RELEASED_PER_S, 0) if kept else 0.0

    def pace_of(configuration: Configuration) -> Pace:
        variant = subject.variant(configuration)
        if variant not in known:
            own = _pace(subject, profiles(variant), experts)
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


def process_before_loading(subject: Subject) -> ProcessMemory:
    """Memory of the process with the libraries that loading will import."""
    for each in (subject, subject.drafter):
        if each is not None:
            each.memory.import_libraries()
    return process_memory()


def _pace(subject: Subject, profile: Profile, experts: ExpertBytes) -> Pace:
    costs = profile.costs()
    tokenizer = subject.manifest.files.get("tokenizer.json")
    return Pace(
        passes=costs.passes if costs else guessed_passes(subject.manifest.weight_bytes - experts.total, experts.needed),
        measured=costs is not None,
        round_ms=costs.round_ms if costs else ROUND_MS,
        reach=reach_of(profile.arrays(REACH)),
        tokenizer_ms=_PARSING_MS_PER_BYTE * tokenizer.bytes if tokenizer else 0.0,
    )
