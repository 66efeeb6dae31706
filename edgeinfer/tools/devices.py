"""The devices of this machine and their limits, and tuning how a model runs on one of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import CapabilityError, DeviceError, NativeUnavailableError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.types import LoadDict
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import DeviceFacts, DeviceLimits
from edgeinfer.loading import digest_of, fingerprint_for, located, open_model, profiles_of, tuned
from edgeinfer.runtime.backends.llamacpp.graphics import check_processor, graphics_device, listed_processors
from edgeinfer.runtime.backends.onnx.selfcheck import check_device
from edgeinfer.runtime.backends.registry import facts_of, make_backend
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.devices.providers import Device, DeviceEntry, is_installed
from edgeinfer.runtime.devices.registry import ENTRIES
from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.native.probe import measure_limits
from edgeinfer.runtime.planning.facts import BundleFacts
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.planner import make_plan, process_before_loading
from edgeinfer.runtime.planning.speed_model import speed_model
from edgeinfer.runtime.profile.kept import KEPT_POLICIES, files_digest
from edgeinfer.runtime.profile.settings import (
    KEPT_SETTINGS,
    OFF,
    TUNED_WEIGHTS,
    TunedProfile,
    TunedSettings,
)
from edgeinfer.runtime.system.machine import load_average, machine_memory, pinning, usable_processors
from edgeinfer.runtime.system.memory import allocating
from edgeinfer.runtime.tuning.search import FULL, QUICK, Attempt, SettingChoices, SettingsFound, search_settings
from edgeinfer.runtime.tuning.stopwatch import Stopwatch

Progress = Callable[[str, int, int], None]

_CHUNKS = (16, 32, 64, 128, 256)
_GRAPHICS_TRIED = "CUDA on an NVIDIA H200, Vulkan in software; Metal and ROCm not run"


@dataclass(frozen=True)
class PartGain:
    """The gain of tuning in one part of the work.

    Attributes:
        usual_ms, tuned_ms: medians of alternating timings: a token of a prompt, a plain token of a reply, a pass that
            verifies a draft, a turn of 64 tokens of prompt and 128 of reply, loading.
        ratio: how many times faster it became: the median over pairs of timings.
    """

    usual_ms: float
    tuned_ms: float
    ratio: float


@dataclass(frozen=True)
class DeviceTuning:
    """The best settings of a model on this device.

    Attributes:
        settings: better than the usual ones, and proved so; all None or empty where nothing is.
        threads: that the model runs with by them.
        parts: by name, "prompt", "decode", "verify", "turn", "load".
        attempts: settings that were tried, in order.
        rejected: settings that looked better one by one, but did not when proved together.
        busy: threads of other programs that wanted to run when it began, as the system counts the last minute; None
            where it does not. Settings found on a busy machine may not be the best on an idle one.
        seconds: that it took.
        path: of the file with the settings; None where nothing is better than usual.
    """

    settings: TunedSettings
    threads: int
    parts: dict[str, PartGain]
    attempts: tuple[Attempt, ...]
    rejected: TunedSettings | None
    busy: float | None
    seconds: float
    path: Path | None


def tune_device(
    model: str | Path | None = None,
    *,
    quick: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Unpack[LoadDict],
) -> DeviceTuning:
    """Measures a model with other threads, processors, weights and chunks than the usual, and keeps what is faster.

    A setting is kept only if it was faster than the usual one beyond doubt, in alternating timings, and slower in
    nothing. The next `load` of this model uses it unless `profile` says otherwise.

    Args:
        model: bundle directory, GGUF file or hub id; None is the built-in model.
        quick: measure for seconds instead of minutes; smaller gains are not found then.
        out: a file to write the settings to, for `load(profile=...)`; None keeps them for this user.
        progress: called with the current measurement, steps done and at most to do.
        options: as `load` takes them; options that are given are not tuned.

    Raises:
        CapabilityError: there is nothing to tune about the model's backend.
        EdgeInferError: as `load`.
        StorageError: the settings cannot be kept.
    """
    if options.get("profile") is not None:
        raise UsageError("Tuning starts from the default settings.", "Leave profile out.")
    config = LoadOptions.of(**{**options, "profile": OFF})
    started, busy = time.perf_counter(), load_average()
    facts = open_model(model, config)
    if not facts.tunes:
        raise CapabilityError(f"The {facts.backend} backend has no settings to tune.", "Load the model without tuning.")
    found, threads = _measure(facts, config, quick, progress)
    path = _keep(facts, config, found, threads, None if out is None else Path(out))
    return _result(found, threads, busy, time.perf_counter() - started, path)


def forget_tuning(model: str | Path | None = None, **options: Unpack[LoadDict]) -> bool:
    """Deletes the results of `tune_device` and `tune_cache` for a model and options; returns whether there were any."""
    config = LoadOptions.of(**{**options, "profile": OFF})
    bundle = open_bundle(located(model, config))
    forgotten = KEPT_SETTINGS.forget(digest_of(facts_of(bundle, config), config))
    return any([forgotten, KEPT_POLICIES.forget(files_digest(bundle))])


@allocating("The model")
def _measure(
    facts: BundleFacts, config: LoadOptions, quick: bool, progress: Progress | None
) -> tuple[SettingsFound, int]:
    """The settings found, and the threads they were proved with."""
    effort = QUICK if quick else FULL
    speed, process = speed_model(facts, profiles_of(facts, config)), process_before_loading(facts)

    def plan_for(settings: TunedSettings) -> MemoryPlan:
        return make_plan(tuned(facts, config, settings), config, speed, process=process)

    def make(settings: TunedSettings, plan: MemoryPlan) -> Sequence:
        backend = make_backend(tuned(facts, config, settings), config, plan.configuration, progress)
        return Sequence(backend, backend.new_sequence(plan.context), plan.prefill_chunk)

    plan = plan_for(TunedSettings())
    plan.require_fit()
    # Other programs need memory too.
    with Stopwatch(plan_for, make, config.memory or machine_memory() // 2, effort.visit_ms) as stopwatch:
        ways = _ways(config, plan, facts.weights_modes, facts.tunes, stopwatch.longest_prompt)
        found = search_settings(ways, stopwatch, effort, time.perf_counter, *(() if progress is None else (progress,)))
    return found, found.settings.threads or plan.threads


def _ways(
    config: LoadOptions, plan: MemoryPlan, modes: tuple[str, ...], names: tuple[str, ...], longest: int
) -> SettingChoices:
    """The settings that the caller left open, as far as the backend has them."""
    threads = range(1, len(usable_processors()) + 1) if config.threads is None and "threads" in names else ()
    chunks: tuple[int, ...] = ()
    if config.prefill_chunk is None and "prefill_chunk" in names:
        chunks = tuple(size for size in _CHUNKS if size != plan.prefill_chunk and size <= plan.context)
    weights: tuple[str, ...] = ()
    if config.weights is None and "weights" in names and plan.configuration.weights in TUNED_WEIGHTS:
        weights = tuple(mode for mode in modes if mode in TUNED_WEIGHTS and mode != plan.configuration.weights)
    return SettingChoices(
        threads=tuple(count for count in threads if count != plan.threads),
        pinning=pinning if "affinity" in names else lambda threads: "",
        usual_threads=plan.threads,
        weights=weights,
        chunks=tuple(size for size in chunks if size <= longest),
        long_chunks=tuple(size for size in chunks if size > longest),
    )


def _keep(facts: BundleFacts, config: LoadOptions, found: SettingsFound, threads: int, out: Path | None) -> Path | None:
    """Writes the settings, replacing those kept before."""
    model = digest_of(facts, config)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    machine = fingerprint_for(facts)
    profile = TunedProfile(model, facts.manifest.name[:200], machine, threads, found.settings, now)
    if out is not None:
        KEPT_SETTINGS.write(profile, out)
        return out
    if not found.settings.names:
        # The settings of an older profile are no longer better.
        KEPT_SETTINGS.forget(model)
        return None
    return KEPT_SETTINGS.keep(model, profile)


def _result(found: SettingsFound, threads: int, busy: float | None, seconds: float, path: Path | None) -> DeviceTuning:
    if found.proof is not None and found.settings.names:
        proof = found.proof
        parts = {
            name: PartGain(ms, proof.second[name], 1 / proof.verdict.ratios[name]) for name, ms in proof.first.items()
        }
    else:
        parts = {name: PartGain(ms, ms, 1.0) for name, ms in found.usual.items()}
    return DeviceTuning(found.settings, threads, parts, found.attempts, found.rejected, busy, seconds, path)


def measure_device(threads: int = 1) -> DeviceLimits:
    """Measures how fast memory is read and multiply-adds are done, in about 0.2 s.

    No pass can be faster than `pass_work` divided by these figures.

    Args:
        threads: that work together.

    Raises:
        NativeUnavailableError: there is no native kernel here.
        UsageError: no thread.
    """
    return measure_limits(native_kernel(), threads)


def list_devices(*, check: bool = True) -> tuple[DeviceFacts, ...]:
    """The devices that models may run on, installed or not, in the order in which "auto" looks for one, then the
    graphics processors that the installed llama.cpp finds, which run GGUF files on request. With `check`, small models
    run on those that are there and have hardware."""
    own = (_facts(entry, device, check) for entry in ENTRIES for device in entry.devices)
    graphics = (
        _device_facts(
            graphics_device(processor),
            partial(check_processor, processor) if check else None,
            package="llama-cpp-python",
            plugin=True,
            installed=True,
            hardware=lambda: True,
            bundles="gguf",
            tried=_GRAPHICS_TRIED,
            description=processor.description,
        )
        for processor in listed_processors()
    )
    return (*own, *graphics)


def _facts(entry: DeviceEntry, device: Device, check: bool) -> DeviceFacts:
    return _device_facts(
        device,
        partial(check_device, device) if check else None,
        package=entry.package,
        plugin=entry.plugin,
        installed=is_installed(device),
        hardware=partial(entry.hardware, device),
        bundles="all" if device.traits.dynamic_shapes else "static",
        tried=entry.tried,
        kernels=_kernels() if device.traits.custom_ops else (),
    )


def _device_facts(
    device: Device, check: Callable[[], None] | None, *, installed: bool, hardware: Callable[[], bool], **facts: Any
) -> DeviceFacts:
    """The facts of a device; a check runs where it is installed and has hardware."""
    found, outcome = None, ""
    if installed:
        try:
            found = hardware()
            if check is not None and found:
                check()
                outcome = "ok"
        except DeviceError as error:
            outcome = error.message
    traits = dataclasses.asdict(device.traits)
    del traits["dynamic_shapes"]
    return DeviceFacts(
        name=device.name,
        provider=device.provider,
        memory=device.memory,
        traits=traits,
        installed=installed,
        hardware=found,
        check=outcome,
        **facts,
    )


def _kernels() -> tuple[str, ...]:
    try:
        return Binding(native_kernel().path).isas()
    except NativeUnavailableError:
        return ()
