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
from edgeinfer.bundle.embedding import ENCODER
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import BackendError, DeviceError, ModelError, StorageError
from edgeinfer.core.options.decoding import NO_DRAFT_MODEL
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.results import LoadCosts, ModelInfo, Progress
from edgeinfer.hub.cache import note_use, ready
from edgeinfer.lifecycle import ModelParts
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.expert_use import experts_observer
from edgeinfer.runtime.backends.factory import thread_count
from edgeinfer.runtime.backends.registry import facts_of, make_backend, own_tokenizer
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.kv_cache.context_shift.registry import make_context_shift
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache
from edgeinfer.runtime.kv_cache.session_file import origin_of
from edgeinfer.runtime.planning.facts import BundleFacts
from edgeinfer.runtime.planning.ledger import Ledger, MemoryRelief
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.planner import Replan, make_plan, make_replanner
from edgeinfer.runtime.planning.speed_model import Profiles, speed_model
from edgeinfer.runtime.profile.device_profile import DeviceProfile, profile_folder
from edgeinfer.runtime.profile.kept import files_digest
from edgeinfer.runtime.profile.settings import Fingerprint, TunedSettings, find_settings
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
    from edgeinfer.runtime.decoding.embedding import DecoderEmbedder
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
    from edgeinfer.runtime.remote.decoding import RemoteDeciding


_log = logging.getLogger("edgeinfer")

# Freed memory that makes measuring the process again worthwhile.
_WORTH_BYTES = 256 * 1024


def open_model(model: str | Path | None, config: LoadOptions, progress: Progress | None = None) -> BundleFacts:
    """Open the bundles of a model and its draft model, choose their backends, and look up tuned settings. Errors as
    `facts_of`."""
    target = open_bundle(located(model, config, progress))
    given = config.draft_model not in (None, NO_DRAFT_MODEL)
    drafter = open_bundle(located(config.draft_model, LoadOptions(), progress)) if given else None
    if config.draft_model is None:
        drafter = bundled_drafter(target, config)
    require_models(target, drafter if given else None)
    if drafter is not None:
        check_same_vocabulary(target, drafter)
    return _facts(target, drafter, config)


def _facts(
    target: Bundle, drafter: Bundle | None, config: LoadOptions, settings: TunedSettings | None = None
) -> BundleFacts:
    facts = dataclasses.replace(facts_of(target, config), option_bytes=OPTION_BYTES)
    if drafter is not None:
        # Backend and device options are the target's; a draft model runs on its own backend on the CPU.
        own = dataclasses.replace(config.on_device("cpu"), backend=None, adapters={})
        facts = dataclasses.replace(facts, drafter=facts_of(drafter, own))
    if settings is None:
        settings = find_settings(config, lambda: digest_of(facts, config), lambda: fingerprint_for(facts))
    return tuned(facts, config, settings)


def tuned(facts: BundleFacts, config: LoadOptions, settings: TunedSettings) -> BundleFacts:
    """A model with other tuned settings. A draft model shares its threads, whose calls take turns."""
    threads, drafter = thread_count(config, settings), facts.drafter
    if drafter is not None:
        shared = TunedSettings(threads=settings.threads, affinity=settings.affinity)
        drafter = dataclasses.replace(drafter, settings=shared, threads=threads)
    return dataclasses.replace(facts, settings=settings, threads=threads, drafter=drafter)


def plan_of(facts: BundleFacts, config: LoadOptions, *, all_ways: bool = False, loading: bool = False) -> MemoryPlan:
    """The memory plan of a model; arguments and errors as of `make_plan`."""
    if facts.backend == ENCODER:  # it keeps nothing and drafts nothing
        config = dataclasses.replace(config, speculation="off", prefix_cache=0, parallel=1, overflow="stop")
    speed = speed_model(facts, profiles_of(facts, config))
    return make_plan(facts, config, speed, all_ways=all_ways, loading=loading)


def within_budget(facts: BundleFacts, config: LoadOptions) -> tuple[BundleFacts, MemoryPlan | None]:
    """A model without a draft model that the plan for the budget leaves out, and that plan; None without a budget."""
    if config.memory is None:
        return facts, None
    plan = plan_of(facts, config, loading=True)
    return _as_planned(facts, plan), plan


def _as_planned(facts: BundleFacts, plan: MemoryPlan) -> BundleFacts:
    return facts if plan.configuration.draft_model else dataclasses.replace(facts, drafter=None)


def located(model: str | Path | None, config: LoadOptions, progress: Progress | None = None) -> Path:
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
def planned_by(model: str | Path | None, config: LoadOptions) -> Iterator[str | Path | None]:
    """A model, or what stands for it in plans while it is not prepared."""
    if config.bits is None and ready(model) is not None:
        yield model
        return
    from edgeinfer.hub.resolving import sketched

    with sketched(model, config.bits, llamacpp=config.wants_llamacpp) as found:
        yield found


def digest_of(facts: BundleFacts, config: LoadOptions) -> str:
    """The digest of a model and the way it runs; its tuned settings are stored under it."""
    return files_digest(facts.bundle, facts.layout, facts.backend, facts.device.name, config.exact)


def fingerprint_for(facts: BundleFacts) -> Fingerprint:
    """This machine, and the engine and kernel that would run the model on it."""
    return Fingerprint.here(facts.engine(), facts.kernel())


def profiles_of(facts: BundleFacts, config: LoadOptions) -> Profiles:
    """Opens what was measured of each variant of a model on this device, where it may be kept."""

    def open_variant(variant: str, *, draft_model: bool) -> DeviceProfile:
        if not config.remember:
            return DeviceProfile(None)
        bundle, layout = facts.bundle, facts.layout
        drafter = facts.drafter.bundle if draft_model and facts.drafter is not None else None
        kernel = f"{facts.kernel()} of {facts.engine()}"
        if facts.settings.affinity:
            variant += f" affinity {facts.settings.affinity}"
        if config.draft_experts is not None:
            # It changes the cost of drafts and how often they are accepted.
            variant += f" draft-experts {config.draft_experts}"
        try:
            folder = profile_folder(bundle, layout, kernel, facts.threads, config.exact, drafter, variant)
        except StorageError:
            return DeviceProfile(None)
        return DeviceProfile.open(folder)

    return open_variant


@allocating("The model")
def make_parts(
    facts: BundleFacts, config: LoadOptions, plan: MemoryPlan | None, progress: Progress | None, started: float
) -> ModelParts:
    """Load a model while its files are verified; replies wait for the verification of large ones.

    Args:
        plan: within the budget, or of the time before, when another device may have failed; None makes one.
        progress: as `edgeinfer.load` takes it.
        started: time.perf_counter() of the request.
    """
    target, drafter = facts.bundle, None if facts.drafter is None else facts.drafter.bundle
    verification = Verification([target] if drafter is None else [target, drafter], keeps=config.remember)
    try:
        parts = _make_somewhere(facts, config, plan, functools.partial(_make_parts, progress, started, verification))
        verification.finish()
        if config.remember:
            note_use(target.path if target.digests else target.gguf.path)
        return parts
    except (ModelError, BackendError):
        # That a file is damaged says more than the error it causes.
        verification.require()
        raise
    except BaseException:
        verification.stop()
        raise


def _make_somewhere(
    facts: BundleFacts,
    config: LoadOptions,
    plan: MemoryPlan | None,
    make: Callable[[BundleFacts, LoadOptions, MemoryPlan | None], ModelParts],
) -> ModelParts:
    """Make the parts, on the CPU where the device fails."""
    target, drafter = facts.bundle, None if facts.drafter is None else facts.drafter.bundle
    if plan is not None:
        if plan.device != facts.device.name:
            config = config.on_device(plan.device)
            facts = _facts(target, drafter, config, facts.settings)
        facts = dataclasses.replace(facts, device_note=plan.device_note)
    try:
        return make(facts, config, plan)
    except DeviceError as error:
        if facts.device.on_cpu:
            raise
        reason = error.message
    # Outside of the except block: the error keeps the loaded parts alive.
    _log.warning("%s The CPU runs %s.", reason, facts.manifest.name)
    config = config.on_device("cpu")
    return make(dataclasses.replace(_facts(target, drafter, config), device_note=reason), config, None)


def _make_parts(
    progress: Progress | None,
    started: float,
    verification: Verification,
    facts: BundleFacts,
    config: LoadOptions,
    plan: MemoryPlan | None,
) -> ModelParts:
    """Make the parts on the device of the facts or not at all."""
    profiles = profiles_of(facts, config)
    speed = speed_model(facts, profiles)
    plan = plan or make_plan(facts, config, speed, loading=True)
    plan.require_fit()
    config = dataclasses.replace(config, prefix_cache=plan.prefix_cache)
    facts = _as_planned(facts, plan)
    return_large_frees()
    bundle = facts.bundle
    keeping = plan.configuration.tokenizer
    # The tokenizer first, where it has its own file: parsing takes more memory than the result, and must release it
    # before weights are loaded.
    parsed = parsed_tokenizer(lambda: TOKENIZERS[keeping](bundle)) if keeping in TOKENIZERS else None
    backend = make_backend(facts, config, plan.configuration, progress, plan.room)
    if not facts.device.on_cpu:
        from edgeinfer.runtime.backends.onnx.selfcheck import check_first_pass

        check_first_pass(backend, facts.device)
    parsed = parsed or parsed_tokenizer(lambda: own_tokenizer(facts, backend))
    model = make_draft_backend(facts.drafter, config, plan)
    cache = backend.new_sequence(plan.context)
    overflow = make_context_shift(plan.overflow, bundle, backend, cache)
    sequence = Sequence(backend, cache, plan.prefill_chunk, overflow, PrefixCache(plan.prefix_cache))
    kept = profiles(facts.variant(plan.configuration), draft_model=plan.configuration.draft_model)
    profile = kept if plan.draft_max else DeviceProfile(None)
    speculator = make_speculator(backend, cache, config, plan, profile, facts.drafter, model, facts.bundle)
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
        load=LoadCosts((time.perf_counter() - started) * 1e3, parsed.ms, parsed.bytes),
        tensors=tensors_in(bundle.manifest, plan.layout),
        origin=origin_of(bundle, plan.layout, facts.engine(), config.exact),
        speculator=speculator,
        make_reduced=lambda: _reduced(facts, plan, sequence, speculator, kept),
        make_embedder=lambda: _embedder(sequence, bundle),
        ledger=_ledger(plan, sequence, speculator, parsed.bytes, make_replanner(facts, config, speed)),
        verification=verification,
        threads=facts.threads,
        watched=watched,
        decoder=bundle.manifest.decoder,
        sampling=recommended_sampling(bundle),
        remote=_remote(config, parsed.tokenizer, begin_ids, eos_ids) if config.remote is not None else None,
    )


def _remote(
    config: LoadOptions, tokenizer: TokenizerLike, begin_ids: tuple[int, ...], eos_ids: frozenset[int]
) -> RemoteDeciding:
    # Here, as few programs let another server decide.
    from edgeinfer.runtime.remote.decoding import remote_deciding

    return remote_deciding(config, tokenizer, begin_ids, eos_ids)


def _embedder(sequence: Sequence, bundle: Bundle) -> DecoderEmbedder:
    from edgeinfer.runtime.decoding.embedding import DecoderEmbedder  # few programs need it

    return DecoderEmbedder(sequence, bundle)


def _reduced(
    facts: BundleFacts, plan: MemoryPlan, sequence: Sequence, speculator: Speculator, profile: DeviceProfile
) -> ReducedComputeStrategies:
    """Make the strategies of replies that take less compute; few programs need them."""
    from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies

    manifest, drafter = facts.manifest, facts.drafter
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
        heads=functools.cache(lambda kind: read_heads(facts.bundle, kind)),
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
