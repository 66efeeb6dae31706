"""What drafters are expected to do for a model that is not loaded: which of them "auto" will ask, how often they are
right, and what share of a pass their guesses take, until this device has measured them."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.bundle.additions import has_heads, heads_file
from edgeinfer.bundle.tables import is_looked_up, tensors_in
from edgeinfer.runtime.planning.economics import Prior
from edgeinfer.runtime.planning.plan_input import PlanInput
from edgeinfer.runtime.profile.drafting import TunedDrafting

# Heads that a file usually holds; a guess reads one of them.
_HEADS = 4
# Of a pass: half of the layers or of the experts; 8-bit weights without their low bits.
_HALF = _PLANE = 0.5
_Find = Callable[[PlanInput, TunedDrafting], Prior | None]


def _table(name: str) -> _Find:
    return lambda plan_input, tuning: TABLES[name]


def _running(accepted: float, share: Callable[[PlanInput, TunedDrafting], float | None], most: int = 0) -> _Find:
    """Of a drafter that has a guess for every place, for a share of a pass; where there is a share at all."""

    def find(plan_input: PlanInput, tuning: TunedDrafting) -> Prior | None:
        taken = share(plan_input, tuning)
        return None if taken is None else Prior(1.0, accepted, taken, most=most)

    return find


def _draft_model(plan_input: PlanInput, tuning: TunedDrafting) -> Prior | None:
    drafter = plan_input.drafter
    if drafter is None or drafter.manifest.module is not None:
        return None
    return Prior(1.0, 0.6, _read(drafter) / _read(plan_input), model=True)


def _paid_model(name: str) -> _Find:
    """Of a drafter that runs the draft model, where tuning found that it pays."""
    return lambda plan_input, tuning: _draft_model(plan_input, tuning) if _paid(name, tuning) else None


def _module(name: str) -> _Find:
    def find(plan_input: PlanInput, tuning: TunedDrafting) -> Prior | None:
        drafter = plan_input.drafter
        module = None if drafter is None else drafter.manifest.module
        if drafter is None or module is None or module.drafter != name:
            return None
        head = _read(plan_input, "head") if "head" in module.shares else 0
        # A guess reads one of several heads.
        own = _read(drafter) / max(1, module.heads)
        most = module.heads or max(0, module.block - 1)
        share = (own + head) / _read(plan_input)
        return Prior(1.0, 0.6, share, at_once=module.block > 0, most=most, model=True)

    return find


def _heads(kind: str) -> _Find:
    def share(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
        bundle = plan_input.bundle
        if not has_heads(bundle, kind) or not plan_input.capabilities.hidden:
            return None
        return bundle.manifest.files[heads_file(kind)].bytes / _HEADS / _read(plan_input)

    return _running(0.25, share, _HEADS)


def _exit(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
    layers = plan_input.manifest.geometry.num_layers
    if tuning.exit_layer is not None:
        return tuning.exit_layer / layers
    return max(1, layers * 2 // 3) / layers if _paid("exit", tuning) else None


def _skip(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
    if tuning.layer_mask is not None:
        return float(tuning.layer_mask.mean())
    return _HALF if _paid("skip", tuning) else None


def _bits(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
    return _PLANE if plan_input.capabilities.high_planes else None


def _experts(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
    return _HALF if len(plan_input.capabilities.expert_counts) > 1 else None


def _bits_and_experts(plan_input: PlanInput, tuning: TunedDrafting) -> float | None:
    bits, experts = _bits(plan_input, tuning), _experts(plan_input, tuning)
    return None if bits is None or experts is None else bits * experts


def _paid(name: str, tuning: TunedDrafting) -> bool:
    return tuning.drafters is not None and name in tuning.drafters


def _read(plan_input: PlanInput, name: str | None = None) -> int:
    """Bytes of weights that a pass reads: of all tensors but tables of which it reads a row, or of one alone."""
    tensors = tensors_in(plan_input.manifest, plan_input.layout)
    wanted = [t for t in tensors if (not is_looked_up(t.name) if name is None else t.name == name)]
    return max(1, sum(blob.nbytes for tensor in wanted for blob in tensor.blobs))


# Shares of the rounds left to each, and of tokens: means of 24 replies to prompts that were never seen before, of two
# models that answer (docs/log/2026-11-28.md).
TABLES = {
    "copy": Prior(0.3, 0.4, tables=True),
    "ngram": Prior(0.15, 0.33, tables=True),
    "recycle": Prior(0.3, 0.38, tables=True),
}
# In the order of asking. Models and modules: tokens per pass of the shipped drafter and of an EAGLE head on five kinds
# of dialogue; heads: the first place of Medusa's (docs/log/2026-11-25.md). What the target drafts itself is guessed.
PRIORS: dict[str, _Find] = {
    "copy": _table("copy"),
    "ngram": _table("ngram"),
    "recycle": _table("recycle"),
    "model": _draft_model,
    "hierarchical": _paid_model("hierarchical"),
    "exit": _running(0.5, _exit),
    "skip": _running(0.5, _skip),
    "bits": _running(0.8, _bits),
    "experts": _running(0.6, _experts),
    "bits-experts": _running(0.5, _bits_and_experts),
    # Whether experts are left out of memory is what is being planned.
    "resident": lambda plan_input, tuning: None,
    "medusa": _heads("medusa"),
    "hydra": _heads("hydra"),
    "prompt": _heads("prompt"),
    "eagle": _module("eagle"),
    "mtp": _module("mtp"),
    "dflash": _module("dflash"),
    "hydra-plus": _module("hydra-plus"),
    "rapid": _paid_model("rapid"),
}


def priors_of(plan_input: PlanInput, tuning: TunedDrafting) -> dict[str, Prior]:
    """The drafters that "auto" will ask, in the order in which it asks them: all that the model has, or those that
    `edgeinfer tune` found to pay."""
    found = {name: find(plan_input, tuning) for name, find in PRIORS.items()}
    asked = tuning.drafters
    return {name: prior for name, prior in found.items() if prior is not None and (asked is None or name in asked)}
