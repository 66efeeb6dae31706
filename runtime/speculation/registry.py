"""Which drafter a name stands for: how it is made, whether `auto` asks it, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgeinfer.bundle.additions import Heads, has_heads, read_heads
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import Setting, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ObservedBackend
from edgeinfer.runtime.backends.wrapped import uncounted
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from edgeinfer.runtime.speculation.drafters.copy import CopyDrafter, ForcedDrafter
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from edgeinfer.runtime.speculation.drafters.ngram import NgramDrafter
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter

if TYPE_CHECKING:
    from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule


@dataclass(frozen=True)
class DrafterParts:
    """Holds what drafters are made of.

    Attributes:
        target: the backend whose text is drafted.
        model: the backend of a small model with the same tokenizer; None where none was given.
        chunk: tokens of a prompt that the small model evaluates per pass.
        tuning: what `edgeinfer tune` found for this bundle and device.
        experts: that a token of a draft uses where drafting is with fewer; None takes half of the model's own number.
        bundle: the target's, whose heads draft; None has none.
        acceptance: the small model's own judge of its tokens; None where it has none.
        judge: of the bundle, of drafted tokens that may stay though the target says others; None where it has none.
        module: how the small model reads its target, where it is a draft module.
        depths: of the small model that were trained to guess, fewer than all of its layers.
        cached_experts: tells which experts are in memory, as `ExpertChoice.bias`; None where all are. () -> (L, E)
    """

    target: Backend
    model: Backend | None
    chunk: int
    tuning: TunedDrafting
    experts: int | None = None
    cached_experts: Callable[[], Floats] | None = None
    bundle: Bundle | None = None
    acceptance: Heads | None = None
    depths: tuple[int, ...] = ()
    module: Bundle | None = None
    judge: Heads | None = None

    @property
    def whole_model(self) -> Backend | None:
        """The small model, where it can run without its target."""
        return self.model if self.module is None else None

    def has_module(self, drafter: str) -> bool:
        """Whether there is a module of a drafter, and a target whose passes it can follow."""
        module = None if self.module is None else self.module.manifest.module
        return module is not None and module.drafter == drafter and self.observed is not None

    @property
    def observed(self) -> ObservedBackend | None:
        """The target, where a module can follow its passes."""
        inner = uncounted(self.target)
        return inner if isinstance(inner, ObservedBackend) else None

    def paid(self, drafter: str) -> bool:
        """Whether `edgeinfer tune --drafters` found that a drafter pays."""
        return self.tuning.drafters is not None and drafter in self.tuning.drafters

    def has(self, kind: str) -> bool:
        """Whether there are heads of a kind, and states for them."""
        return self.bundle is not None and has_heads(self.bundle, kind) and self.target.capabilities.hidden

    def heads(self, kind: str) -> Heads:
        """The heads of a kind."""
        found = None if self.bundle is None else read_heads(self.bundle, kind)
        if found is None:
            message = f"The model's bundle has no {kind} heads."
            raise UsageError(message, f"Train some (edgeinfer distill heads --kind {kind}), or leave this drafter out.")
        return found


@dataclass(frozen=True)
class DrafterKind:
    """Tells how a drafter is made.

    Attributes:
        make: of its parts.
        in_auto: whether "auto" asks it, given the parts.
        table_bytes: what it will hold for a model of these sizes and a context, besides models.
        beside_bytes: what another of its kind will hold for a text beside others, besides what they share.
        model: whether it is the draft model, or runs it.
    """

    make: Callable[[DrafterParts], Drafter]
    in_auto: Callable[[DrafterParts], bool]
    table_bytes: Callable[[Geometry, int], int] = lambda geometry, context: 0
    beside_bytes: Callable[[int], int] = lambda context: 0
    model: bool = False


def _required_model(parts: DrafterParts) -> Backend:
    """The draft model."""
    if parts.whole_model is None:
        hint = "Name one with " + Setting("draft_model") + ", or leave this drafter out."
        raise UsageError("No draft model was given.", hint)
    return parts.whole_model


def _model(parts: DrafterParts) -> ModelDrafter:
    model, vocabulary = _required_model(parts), parts.target.geometry.vocab_size
    if parts.depths and model.capabilities.layer_skip and model.capabilities.hidden:
        from edgeinfer.runtime.speculation.drafters.sorted import SortedDrafter

        return SortedDrafter(model, parts.chunk, parts.depths, vocabulary)
    return ModelDrafter(model, parts.chunk, vocabulary, parts.acceptance)


# Drafters that few models have are imported when one is made.

_EXPORT_WITH_ONE = (
    "Export it with one (edgeinfer export --drafter FOLDER) and run it on the native kernel, or leave it out."
)


def _hierarchical(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.hierarchical import HierarchicalDrafter

    cheap: list[Drafter] = [CopyDrafter(), NgramDrafter(parts.target.geometry.vocab_size)]
    return HierarchicalDrafter(_model(parts), cheap)


def _rapid(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.rapid import RapidDrafter

    return RapidDrafter(_required_model(parts), parts.chunk, parts.target.geometry.vocab_size, parts.acceptance)


def _exit(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import EarlyExitDrafter

    layers = parts.target.geometry.num_layers
    # Untuned: after two thirds of the layers. Earlier exits of models that were not trained for it predict little.
    return EarlyExitDrafter(parts.target, parts.tuning.exit_layer or max(1, layers * 2 // 3))


def _skip(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import SkipDrafter

    return SkipDrafter(parts.target, parts.tuning.layer_mask)


def _bits(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import BitsDrafter

    return BitsDrafter(parts.target)


def _experts(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import ExpertsDrafter

    return ExpertsDrafter(parts.target, parts.experts)


def _bits_and_experts(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import BitsAndExpertsDrafter

    return BitsAndExpertsDrafter(parts.target, parts.experts)


def _cached_experts(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.self_drafters import CachedExpertsDrafter

    if parts.cached_experts is None:
        message = "All experts of this model are in memory."
        raise UsageError(
            message, "Use the drafter experts, or load experts on demand with " + Setting("weights", "experts") + "."
        )
    return CachedExpertsDrafter(parts.target, parts.cached_experts, parts.experts)


def _medusa(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.medusa import MedusaDrafter

    return MedusaDrafter(parts.target, parts.heads("medusa"))


def _hydra(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.hydra import HydraDrafter

    return HydraDrafter(parts.target, parts.heads("hydra"))


def _eagle(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.eagle import EagleDrafter

    return EagleDrafter(_module(parts, "eagle", "EAGLE head", _EXPORT_WITH_ONE))


def _hydra_plus(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.hydra_plus import HydraPlusDrafter

    hint = "Train one (edgeinfer distill hydra-plus) and run it on the native kernel, or leave it out."
    return HydraPlusDrafter(_module(parts, "hydra-plus", "Hydra++ module", hint))


def _mtp(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.eagle import MtpDrafter

    hint = "Export a checkpoint that has one and run it on the native kernel, or leave it out."
    return MtpDrafter(_module(parts, "mtp", "module for multi-token prediction", hint))


def _dflash(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.dflash import DflashDrafter

    return DflashDrafter(_module(parts, "dflash", "DFlash drafter", _EXPORT_WITH_ONE))


def _module(parts: DrafterParts, drafter: str, what: str, hint: str) -> OpenModule:
    """The draft module of a drafter."""
    from edgeinfer.bundle.additions import read_draft_tokens
    from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule

    target, module, bundle = parts.observed, parts.model, parts.module
    if target is None or module is None or bundle is None or not parts.has_module(drafter):
        raise UsageError(f"The model has no {what} that can draft here.", hint)
    described, tapped = bundle.manifest.module, parts.bundle is not None and bool(parts.bundle.manifest.taps)
    assert described is not None, "it has a module"
    return OpenModule(target, module, described, tapped, read_draft_tokens(bundle))


def _prompt(parts: DrafterParts) -> Drafter:
    from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter

    return PromptDrafter(parts.target, parts.heads("prompt"))


def _always(parts: DrafterParts) -> bool:
    return True


KINDS: dict[str, DrafterKind] = {
    "forced": DrafterKind(lambda parts: ForcedDrafter(), _always),
    "copy": DrafterKind(
        lambda parts: CopyDrafter(),
        _always,
        lambda geometry, context: CopyDrafter.planned_bytes(context),
        CopyDrafter.planned_bytes,
    ),
    "ngram": DrafterKind(
        lambda parts: NgramDrafter(parts.target.geometry.vocab_size),
        _always,
        lambda geometry, context: NgramDrafter.planned_bytes(),
        lambda context: NgramDrafter.text_bytes(),
    ),
    "recycle": DrafterKind(
        lambda parts: RecycleDrafter(parts.target.geometry.vocab_size),
        _always,
        lambda geometry, context: RecycleDrafter.planned_bytes(geometry.vocab_size),
    ),
    "model": DrafterKind(_model, lambda parts: parts.whole_model is not None, model=True),
    # In "auto" the governor itself makes cascades, unless this one was measured to be better.
    "hierarchical": DrafterKind(
        _hierarchical,
        lambda parts: parts.whole_model is not None and parts.paid("hierarchical"),
        lambda geometry, context: CopyDrafter.planned_bytes(context) + NgramDrafter.planned_bytes(),
        model=True,
    ),
    "exit": DrafterKind(_exit, lambda parts: parts.tuning.exit_layer is not None or parts.paid("exit")),
    "skip": DrafterKind(_skip, lambda parts: parts.tuning.layer_mask is not None or parts.paid("skip")),
    "bits": DrafterKind(_bits, lambda parts: parts.target.capabilities.high_planes),
    "experts": DrafterKind(_experts, lambda parts: len(parts.target.capabilities.expert_counts) > 1),
    "bits-experts": DrafterKind(
        _bits_and_experts,
        lambda parts: parts.target.capabilities.high_planes and len(parts.target.capabilities.expert_counts) > 1,
    ),
    "resident": DrafterKind(_cached_experts, lambda parts: parts.cached_experts is not None),
    # What heads take is in their file's size: `heads_bytes`.
    "medusa": DrafterKind(_medusa, lambda parts: parts.has("medusa") and parts.target.capabilities.layer_skip),
    "hydra": DrafterKind(_hydra, lambda parts: parts.has("hydra")),
    "prompt": DrafterKind(_prompt, lambda parts: parts.has("prompt") and parts.target.capabilities.layer_skip),
    # What it takes is counted with its module.
    "eagle": DrafterKind(_eagle, lambda parts: parts.has_module("eagle"), model=True),
    "mtp": DrafterKind(_mtp, lambda parts: parts.has_module("mtp"), model=True),
    "dflash": DrafterKind(_dflash, lambda parts: parts.has_module("dflash"), model=True),
    "hydra-plus": DrafterKind(_hydra_plus, lambda parts: parts.has_module("hydra-plus"), model=True),
    "rapid": DrafterKind(_rapid, lambda parts: parts.whole_model is not None and parts.paid("rapid"), model=True),
}


def make_drafter(name: str, parts: DrafterParts) -> Drafter:
    """Makes the drafter of this name, a key of KINDS."""
    return KINDS[name].make(parts)


def asked_by_auto(name: str, parts: DrafterParts) -> bool:
    """Whether "auto" asks the drafter of this name: where drafters were tuned, it asks those that paid."""
    # What a grammar forces costs nothing to ask, and no tuning text has a grammar.
    tuned = parts.tuning.drafters is None or name == "forced" or parts.paid(name)
    return tuned and KINDS[name].in_auto(parts)
