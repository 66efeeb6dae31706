"""Makes drafters and their models, and tells plans what they take and what is expected of them."""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.opening import nested_drafter, trained_depths
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import ModelError
from edgeinfer.core.options.decoding import drafters_in
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.backends.contract import HEAD_ROWS, Backend, KVCache
from edgeinfer.runtime.backends.expert_use import experts_observer
from edgeinfer.runtime.backends.registry import make_backend
from edgeinfer.runtime.kv_cache import prefix_cache
from edgeinfer.runtime.kv_cache.context_shift import registry as context_shift
from edgeinfer.runtime.planning.candidates import draft_configuration
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, OptionBytes
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.sampling.grammar_tokens import grammar_bytes
from edgeinfer.runtime.speculation.drafters.method import DrafterParts, drafter_method, priors_of
from edgeinfer.runtime.speculation.speculator import Speculator
from edgeinfer.runtime.weights.layouts import runs_native

# Objects of the controller and the drafters besides their tables, and those of a further sequence.
_BOOKKEEPING_BYTES, _SEQUENCE_BYTES = 1_000_000, 100_000
_FLOAT_BYTES = 4


def drafting_bytes(bundle: Bundle, configuration: Configuration, apart: bool) -> int:
    """Bytes of the drafters' tables and of what the largest verification pass gives out."""
    geometry, rows = bundle.manifest.geometry, 1 + configuration.draft_max
    methods = [drafter_method(name) for name in configuration.drafters]
    # A draft model's memory counts where it is loaded.
    if not configuration.draft_model:
        methods = [method for method in methods if method.runs not in ("model", "module")]
    tables = sum(method.nbytes(bundle, configuration.context) for method in methods)
    states, logits = (3 if apart else 2) * rows * geometry.hidden_size, min(rows, HEAD_ROWS) if apart else rows
    return _BOOKKEEPING_BYTES + tables + (states + logits * geometry.vocab_size) * _FLOAT_BYTES


def _sequence_bytes(configuration: Configuration) -> int:
    own = sum(drafter_method(name).sequence_bytes(configuration.context) for name in configuration.drafters)
    return own + _SEQUENCE_BYTES


OPTION_BYTES = OptionBytes(
    drafting_bytes, _sequence_bytes, prefix_cache.planned_bytes, context_shift.planned_bytes, priors_of, grammar_bytes
)


def bundled_drafter(target: Bundle, config: LoadOptions) -> Bundle | None:
    """The drafter inside of a bundle, where it is one of those asked for and can run here."""
    names = drafters_in(config.speculation)
    found = nested_drafter(target) if names else None
    module = None if found is None else found.manifest.module
    if found is None:
        return None
    if module is None:
        return found if any(drafter_method(name).runs == "model" for name in names) else None
    if module.drafter not in names:
        return None
    ours = config.backend in (None, "onnx") and config.native is not False
    return found if ours and runs_native() else None


def require_models(*bundles: Bundle | None) -> None:
    """Refuses a draft module, which runs in its target's bundle alone."""
    for bundle in bundles:
        if bundle is not None and bundle.manifest.module is not None:
            hint = f"Use the model's own, {bundle.path.parent}: it drafts with this by itself."
            raise ModelError(f"{bundle.path} is the draft module of a bundle, and no model.", hint)


def make_speculator(
    target: Backend,
    cache: KVCache,
    config: LoadOptions,
    plan: MemoryPlan,
    profile: DeviceProfile,
    drafter: BundleFacts | None,
    model: Backend | None = None,
    bundle: Bundle | None = None,
) -> Speculator:
    """The speculation of a model, whose cache is empty; measures what is not known of this device yet."""
    counted = experts_observer(target)
    cached_experts = None if counted is None or counted.expert_cache is None else counted.expert_cache.bias
    tuning = TunedDrafting.of(profile, target.geometry.num_layers)
    context = None if drafter is None else draft_configuration(drafter, plan.configuration).context
    parts = DrafterParts(
        target,
        cache,
        model,
        None if model is None or context is None else model.new_sequence(context),
        plan.prefill_chunk,
        tuning,
        config.draft_experts,
        cached_experts,
        bundle,
        () if drafter is None else trained_depths(drafter.bundle.manifest),
        None if drafter is None or drafter.manifest.module is None else drafter.bundle,
    )
    drafters = plan.configuration.drafters
    return Speculator(parts, config.speculation, drafters, plan.draft_max, profile, check=config.exact)


def make_draft_backend(drafter: BundleFacts | None, config: LoadOptions, plan: MemoryPlan) -> Backend | None:
    """What runs the draft model, which drafts nothing where it takes turns with its target (runtime/layer_skip). Its
    rows need not be bit-identical, so it is spared the padding; backend and device are asked for the target."""
    if drafter is None:
        return None
    own = dataclasses.replace(config, exact=False, backend=None, device="cpu", adapters={})
    experts = config.draft_experts if drafter.loads_experts else None
    configuration = draft_configuration(drafter, plan.configuration, experts)
    return make_backend(drafter, own, configuration)
