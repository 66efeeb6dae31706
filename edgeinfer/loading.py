"""Loading a model: open its bundles, plan their memory, build the parts that run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.bundle.additions import read_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import BackendError, DeviceError, ModelError, StorageError
from edgeinfer.core.options.decoding import NO_DRAFT_MODEL
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import LoadCosts, ModelInfo, Progress
from edgeinfer.hub.cache import note_use, ready
from edgeinfer.lifecycle import ModelParts
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.expert_use import experts_observer
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.kv_cache.context_shift.registry import make_context_shift
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache
from edgeinfer.runtime.kv_cache.session_file import origin_of
from edgeinfer.runtime.loading.registry import (
    choose_backend,
    engine_version,
    kernel_name,
    make_backend,
    own_tokenizer,
    plan_input_of,
)
from edgeinfer.runtime.planning.ledger import Ledger, MemoryRelief
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.plan_input import BackendChoice, PlanInput
from edgeinfer.runtime.planning.planner import Profiles, Replan, make_plan, make_replanner, speed_model
from edgeinfer.runtime.profile.device_profile import DeviceProfile, profile_folder
from edgeinfer.runtime.profile.settings import UNTUNED, Fingerprint, TunedSettings, find_settings, model_digest
from edgeinfer.runtime.speculation.assembly import (
    OPTION_BYTES,
    bundled_drafter,
    make_draft_backend,
    make_speculator,
    require_models,
)
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter, check_same_vocabulary
from edgeinfer.runtime.speculation.speculator import Speculator
from edgeinfer.runtime.system.memory import allocating, process_memory, release_code, release_freed, return_large_frees
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.verification import Verification
from edgeinfer.tokenizing import TOKENIZERS, boundary_ids, parsed_tokenizer, recommended_sampling

if TYPE_CHECKING:
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
    from edgeinfer.runtime.remote.decoding import RemoteDeciding


_log = logging.getLogger("edgeinfer")

# Freed memory that makes measuring the process again worthwhile.
_WORTH_BYTES = 256 * 1024


@dataclass(frozen=True)
class Bundles:
    """The bundles to load, a model and its draft model, with their backends and the model's tuned settings."""

    choice: BackendChoice
    drafter_choice: BackendChoice | None
    settings: TunedSettings = UNTUNED
    planned: MemoryPlan | None = None  # the plan of both within a budget; None makes one

    @property
    def target(self) -> Bundle:
        return self.choice.bundle

    @property
    def drafter(self) -> Bundle | None:
        return None if self.drafter_choice is None else self.drafter_choice.bundle

    @classmethod
    def open(cls, model: str | Path | None, config: LoadConfig, progress: Progress | None = None) -> Bundles:
        """Open both, choose their backends, and look up tuned settings. Errors as `choose_backend`."""
        target = open_bundle(located(model, config, progress))
        given = config.draft_model not in (None, NO_DRAFT_MODEL)
        drafter = open_bundle(located(config.draft_model, LoadConfig(), progress)) if given else None
        if config.draft_model is None:
            drafter = bundled_drafter(target, config)
        require_models(target, drafter if given else None)
        if drafter is not None:
            check_same_vocabulary(target, drafter)
        choice = choose_backend(target, config)
        # Backend and device options are the target's; a draft model runs on its own backend on the CPU.
        own = dataclasses.replace(config.on_device("cpu"), backend=None, adapters={})
        drafter_choice = None if drafter is None else choose_backend(drafter, own)
        return cls(choice, drafter_choice, settings_for(choice, config))

    def within(self, config: LoadConfig) -> Bundles:
        """These bundles with a plan for the budget, if there is one, and without a draft model that it leaves out."""
        if config.memory is None:
            return self
        plan = self.plan(config, loading=True)
        left_out = self.drafter_choice is not None and not plan.configuration.draft_model
        return dataclasses.replace(self, planned=plan, drafter_choice=None if left_out else self.drafter_choice)

    def subject(self, config: LoadConfig) -> PlanInput:
        small = self.drafter_choice
        drafter = None if small is None else plan_input_of(small, config, settings=self._shared())
        target = plan_input_of(self.choice, config, drafter, self.settings)
        return dataclasses.replace(target, option_bytes=OPTION_BYTES)

    def _shared(self) -> TunedSettings:
        """The tuned settings that a draft model shares with the target: threads, whose calls take turns."""
        return TunedSettings(threads=self.settings.threads, affinity=self.settings.affinity)

    def plan(self, config: LoadConfig, *, all_ways: bool = False, loading: bool = False) -> MemoryPlan:
        """The memory plan of both; arguments and errors as of `make_plan`."""
        subject = self.subject(config)
        speed = speed_model(subject, profiles_of(subject, config))
        return make_plan(subject, config, speed, all_ways=all_ways, loading=loading)


def located(model: str | Path | None, config: LoadConfig, progress: Progress | None = None) -> Path:
    """Return the path of a model, which is fetched or converted first if necessary."""
    path = ready(model) if config.bits is None else None
    if path is not None:
        return path
    from edgeinfer.hub.resolving import resolve

    llamacpp = config.wants_llamacpp
    return resolve(
        model,
        bits=config.bits,
        memory=config.memory,
        progress=progress,
        llamacpp=llamacpp,
        calibrated=config.calibration,
    )


@contextlib.contextmanager
def planned_by(model: str | Path | None, config: LoadConfig) -> Iterator[str | Path | None]:
    """A model, or what stands for it in plans while it is not prepared."""
    if config.bits is None and ready(model) is not None:
        yield model
        return
    from edgeinfer.hub.resolving import sketched

    with sketched(model, config.bits, llamacpp=config.wants_llamacpp) as found:
        yield found


def settings_for(choice: BackendChoice, config: LoadConfig) -> TunedSettings:
    """The tuned settings of a model that are compatible with the caller's options."""
    return find_settings(config, lambda: digest_of(choice, config), lambda: fingerprint_for(choice))


def digest_of(choice: BackendChoice, config: LoadConfig) -> str:
    """The digest of a model and the way it runs; its tuned settings are stored under it."""
    return model_digest(choice.bundle, choice.layout, choice.name, choice.device.name, config.exact)


def fingerprint_for(choice: BackendChoice) -> Fingerprint:
    """This machine, and the engine and kernel that would run the model on it."""
    return Fingerprint.here(engine_version(choice), kernel_name(choice))


def profiles_of(subject: PlanInput, config: LoadConfig) -> Profiles:
    """Opens what was measured of each variant of a model on this device, where it may be kept."""

    def open_variant(variant: str, *, draft_model: bool) -> DeviceProfile:
        if not config.remember:
            return DeviceProfile(None)
        bundle, layout = subject.bundle, subject.layout
        drafter = subject.drafter.bundle if draft_model and subject.drafter is not None else None
        kernel = f"{kernel_name(subject.choice)} of {engine_version(subject.choice)}"
        if subject.settings.affinity:
            variant += f" affinity {subject.settings.affinity}"
        if config.draft_experts is not None:
            # It changes the cost of drafts and how often they are accepted.
            variant += f" draft-experts {config.draft_experts}"
        try:
            folder = profile_folder(bundle, layout, kernel, subject.threads, config.exact, drafter, variant)
        except StorageError:
            return DeviceProfile(None)
        return DeviceProfile.open(folder)

    return open_variant


@dataclass(frozen=True)
class LoadRequest:
    bundles: Bundles
    config: LoadConfig
    # As `edgeinfer.load` takes it; None where the model is loaded again.
    progress: Callable[[str, int, int], None] | None
    started: float  # time.perf_counter() of the request
    plan: MemoryPlan | None = None  # the plan of the first time, where the model is loaded again; None makes one

    def on(self, device: str) -> LoadRequest:
        """This request on another device, with its tuned settings and without a plan."""
        config = self.config.on_device(device)
        choice = choose_backend(self.bundles.target, config)
        bundles = dataclasses.replace(self.bundles, choice=choice, settings=settings_for(choice, config), planned=None)
        return dataclasses.replace(self, bundles=bundles, config=config, plan=None)

    def again(self) -> LoadRequest:
        if self.plan is None:
            return self
        config = self.config.on_device(self.plan.device)
        bundles = dataclasses.replace(self.bundles, choice=choose_backend(self.bundles.target, config))
        return dataclasses.replace(self, bundles=bundles, config=config)


@allocating("The model")
def make_parts(request: LoadRequest) -> ModelParts:
    """Load a model while its files are verified; replies wait for the verification of large ones."""
    target, drafter = request.bundles.target, request.bundles.drafter
    verification = Verification([target] if drafter is None else [target, drafter], keeps=request.config.remember)
    try:
        parts = _make_somewhere(request, verification)
        verification.finish()
        if request.config.remember:
            note_use(target.path if target.digests else target.gguf.path)
        return parts
    except (ModelError, BackendError):
        # That a file is damaged says more than the error it causes.
        verification.require()
        raise
    except BaseException:
        verification.stop()
        raise


def _make_somewhere(request: LoadRequest, verification: Verification) -> ModelParts:
    """Make the parts, on the CPU where the device fails."""
    request = request.again()
    note = "" if request.plan is None else request.plan.device_note
    subject = dataclasses.replace(request.bundles.subject(request.config), device_note=note)
    try:
        return _make_parts(request, subject, verification)
    except DeviceError as error:
        if subject.device.on_cpu:
            raise
        reason = error.message
    # Outside of the except block: the error keeps the loaded parts alive.
    _log.warning("%s The CPU runs %s.", reason, request.bundles.target.manifest.name)
    request = request.on("cpu")
    subject = dataclasses.replace(request.bundles.subject(request.config), device_note=reason)
    return _make_parts(request, subject, verification)


def _make_parts(request: LoadRequest, subject: PlanInput, verification: Verification) -> ModelParts:
    """Make the parts on the subject's device or not at all."""
    bundles, config = request.bundles, request.config
    profiles = profiles_of(subject, config)
    speed = speed_model(subject, profiles)
    plan = request.plan or bundles.planned or make_plan(subject, config, speed, loading=True)
    plan.require_fit()
    config = dataclasses.replace(config, prefix_cache=plan.prefix_cache)
    if not plan.configuration.draft_model:
        subject = dataclasses.replace(subject, drafter=None)
    return_large_frees()
    bundle = bundles.target
    keeping = plan.configuration.tokenizer
    # The tokenizer first, where it has its own file: parsing takes more memory than the result, and must release it
    # before weights are loaded.
    parsed = parsed_tokenizer(lambda: TOKENIZERS[keeping](bundle)) if keeping in TOKENIZERS else None
    backend = make_backend(subject.choice, config, plan.configuration, request.progress, bundles.settings, plan.room)
    if not subject.device.on_cpu:
        from edgeinfer.runtime.backends.onnx.selfcheck import check_first_pass

        check_first_pass(backend, subject.device)
    parsed = parsed or parsed_tokenizer(lambda: own_tokenizer(subject.choice, backend))
    model = make_draft_backend(subject.drafter, config, plan)
    cache = backend.new_sequence(plan.context)
    overflow = make_context_shift(plan.overflow, bundle, backend, cache)
    sequence = Sequence(backend, cache, plan.prefill_chunk, overflow, PrefixCache(plan.prefix_cache))
    kept = profiles(subject.variant(plan.configuration), draft_model=plan.configuration.draft_model)
    profile = kept if plan.draft_max else DeviceProfile(None)
    speculator = make_speculator(backend, cache, config, plan, profile, subject.drafter, model, subject.bundle)
    begin_ids, eos_ids = boundary_ids(bundle)
    if (watched := experts_observer(backend)) is not None:
        watched.follow(cache)
    # Drop code pages that only loading touched; the rest is faulted back in.
    release_code()
    return ModelParts(
        sequence=sequence,
        tokenizer=parsed.tokenizer,
        loaded=_info(bundle, backend, plan),
        begin_ids=begin_ids,
        eos_ids=eos_ids,
        load=LoadCosts((time.perf_counter() - request.started) * 1e3, parsed.ms, parsed.bytes),
        tensors=tensors_in(bundle.manifest, plan.layout),
        origin=origin_of(bundle, plan.layout, engine_version(subject.choice), config.exact),
        speculator=speculator,
        make_reduced=lambda: _reduced(subject, plan, sequence, speculator, kept),
        ledger=_ledger(plan, sequence, speculator, parsed.bytes, make_replanner(subject, config, speed)),
        verification=verification,
        threads=subject.threads,
        watched=watched,
        decoder=bundle.manifest.decoder,
        sampling=recommended_sampling(bundle),
        remote=_remote(config, parsed.tokenizer, begin_ids, eos_ids) if config.remote is not None else None,
    )


def _remote(
    config: LoadConfig, tokenizer: TokenizerLike, begin_ids: tuple[int, ...], eos_ids: frozenset[int]
) -> RemoteDeciding:
    # Here, as few programs let another server decide.
    from edgeinfer.runtime.remote.decoding import remote_deciding

    return remote_deciding(config, tokenizer, begin_ids, eos_ids)


def _reduced(
    subject: PlanInput, plan: MemoryPlan, sequence: Sequence, speculator: Speculator, profile: DeviceProfile
) -> ReducedComputeStrategies:
    """Make the strategies of replies that take less compute; few programs need them."""
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies

    manifest, drafter = subject.manifest, subject.drafter
    small = 0 if drafter is None else drafter.manifest.parameters
    vocabulary, chunk, given = sequence.backend.geometry.vocab_size, sequence.chunk, speculator.parts
    model, cache = given.whole_model, given.model_cache
    return ReducedComputeStrategies(
        sequence,
        profile,
        small=None if model is None or cache is None else ModelDrafter(model, cache, chunk, vocabulary),
        parameters=small / max(manifest.parameters, 1),
        exits=manifest.exits,
        tuned_exit=lambda: speculator.parts.tuning.exit_layer,
        heads=functools.cache(lambda kind: read_heads(subject.bundle, kind)),
        rows=plan.draft_max + 1,
        plain_ms=lambda: speculator.plain_ms,
    )


def _ledger(
    plan: MemoryPlan, sequence: Sequence, speculator: Speculator, tokenizer_bytes: int, replan: Replan
) -> Ledger:
    """Make the ledger that watches memory; the cheapest relief comes first."""

    def apply(plan: MemoryPlan) -> None:
        sequence.chunk = plan.prefill_chunk
        speculator.plan_for(plan.configuration.drafters, plan.draft_max)

    def evict() -> bool:
        kept = sequence.prefix_bytes
        sequence.evict_prefixes(kept // 2)
        return sequence.prefix_bytes < kept

    def terms() -> dict[str, int]:
        sizes = {"tokenizer": tokenizer_bytes, "drafting": speculator.nbytes}
        return sequence.nbytes() | {name: size for name, size in sizes.items() if size}

    reliefs = (
        MemoryRelief("", _release),
        MemoryRelief("long drafts", speculator.shorten, speculator.recover),
        MemoryRelief("drafting", speculator.drop, speculator.recover),
        MemoryRelief("other conversations", evict),
    )
    return Ledger(plan, terms, reliefs, replan, apply)


def _release() -> bool:
    """Return freed memory to the system; return whether it was worthwhile."""
    before = process_memory().anonymous
    release_freed()
    return before - process_memory().anonymous > _WORTH_BYTES


def _info(bundle: Bundle, backend: Backend, plan: MemoryPlan) -> ModelInfo:
    manifest = bundle.manifest
    return ModelInfo(
        name=manifest.name,
        architecture=manifest.architecture,
        parameters=manifest.parameters,
        bits_per_weight=round(manifest.bits_per_weight, 3),
        backend=backend.name,
        kernel=backend.kernel,
        device=plan.device,
        device_note=plan.device_note,
    )
