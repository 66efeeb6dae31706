"""Puts together a loaded model's speculation: draft model, profile, self-check; knows nothing of rounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgeinfer.bundle import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.errors import StorageError
from edgeinfer.runtime.backends import make_backend, run_layout, thread_count
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.plan import MemoryPlan, make_plan
from edgeinfer.runtime.speculation.profile import Profile, profile_folder
from edgeinfer.runtime.speculation.registry import DrafterParts
from edgeinfer.runtime.speculation.speculator import Speculator
from edgeinfer.runtime.speculation.tuning import TUNING, Tuning

__all__ = ["make_speculator"]


def make_speculator(
    target: Backend, config: LoadConfig, plan: MemoryPlan, bundle: Bundle, drafter: Bundle | None
) -> Speculator:
    """The speculation of a model; loads the draft model, and measures what is not known of this device yet.

    Args:
        target: the model's backend, whose cache is empty.
        plan: in force.
        drafter: bundle of the draft model.

    Raises:
        UsageError: a drafter is asked for that needs what is not there.
        CapabilityError: the backend cannot do what a drafter that is asked for needs.
        ModelError: the draft model cannot be loaded.
    """
    profile = Profile.open(_folder(target, config, plan, bundle, drafter) if plan.draft_max else None)
    model = None
    if drafter is not None and plan.draft_max:
        model = _draft_backend(drafter, config, plan)
    parts = DrafterParts(target, model, plan.prefill_chunk, _tuning(profile, target))
    return Speculator(parts, config.speculation, plan.draft_max, profile, check=config.exact)


def _folder(
    target: Backend, config: LoadConfig, plan: MemoryPlan, bundle: Bundle, drafter: Bundle | None
) -> Path | None:
    if not config.remember:
        return None
    try:
        return profile_folder(bundle, plan.layout, target.kernel, thread_count(config), config.exact, drafter)
    except StorageError:
        return None


def _draft_backend(drafter: Bundle, config: LoadConfig, plan: MemoryPlan) -> Backend:
    """Its rows need not be bit-identical, so it is spared the padding."""
    own = dataclasses.replace(
        config, exact=False, backend=None, context=min(plan.context, drafter.manifest.geometry.max_positions)
    )
    layout = run_layout(drafter, own)
    return make_backend(drafter, own, make_plan(drafter, own, layout))


def _tuning(profile: Profile, target: Backend) -> Tuning:
    try:
        return Tuning.from_state(profile.arrays(TUNING) or {}, target.geometry.num_layers)
    except StorageError:
        profile.drop(TUNING)
        return Tuning()
