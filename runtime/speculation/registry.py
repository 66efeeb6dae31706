"""Which drafter a name stands for: how it is made, and whether `auto` counts on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.bundle import Bundle, Geometry
from edgeinfer.bundle.heads import Heads, has_heads, read_heads
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.profile.drafting import Tuning
from edgeinfer.runtime.speculation.contracts import Drafter
from edgeinfer.runtime.speculation.drafters.copy import CopyDrafter, ForcedDrafter
from edgeinfer.runtime.speculation.drafters.heads import HydraDrafter, MedusaDrafter
from edgeinfer.runtime.speculation.drafters.hierarchical import HierarchicalDrafter
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from edgeinfer.runtime.speculation.drafters.ngram import NgramDrafter
from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter
from edgeinfer.runtime.speculation.drafters.self_drafters import (
    BitsDrafter,
    EarlyExitDrafter,
    ExpertsDrafter,
    ResidentDrafter,
    SkipDrafter,
)
from edgeinfer.runtime.speculation.drafters.sorted import SortedDrafter

__all__ = ["KINDS", "DrafterParts", "make_drafter"]


@dataclass(frozen=True)
class DrafterParts:
    """What drafters are made of.

    Attributes:
        target: the backend whose text is drafted.
        model: the backend of a small model with the same tokenizer; None where none was given.
        chunk: tokens of a prompt that the small model evaluates per pass.
        tuning: what `edgeinfer tune` found for this bundle and device.
        experts: that a token of a draft uses where drafting is with fewer; None takes half of the model's own number.
        bundle: the target's, whose heads draft; None has none.
        acceptance: the small model's own judge of its tokens; None where it has none.
        depths: of the small model that were trained to guess, fewer than all of its layers.
        resident: tells which experts are in memory, as `ExpertChoice.bias` has it; None where all are. () -> (L, E)
    """

    target: Backend
    model: Backend | None
    chunk: int
    tuning: Tuning
    experts: int | None = None
    resident: Callable[[], Floats] | None = None
    bundle: Bundle | None = None
    acceptance: Heads | None = None
    depths: tuple[int, ...] = ()

    def has(self, kind: str) -> bool:
        """Whether there are heads of a kind, and states for them."""
        return self.bundle is not None and has_heads(self.bundle, kind) and self.target.capabilities.hidden

    def heads(self, kind: str) -> Heads:
        """The heads of a kind.

        Raises:
            UsageError: there are none.
            BundleError: they are damaged.
        """
        found = None if self.bundle is None else read_heads(self.bundle, kind)
        if found is None:
            message = f"The model's bundle has no {kind} heads."
            raise UsageError(message, f"Train some (edgeinfer distill heads --kind {kind}), or leave this drafter out.")
        return found


@dataclass(frozen=True)
class Kind:
    """How a drafter is made.

    Attributes:
        make: of its parts.
        in_auto: whether "auto" asks it, given the parts.
        table_bytes: what it will hold for a model of these sizes, besides models.
    """

    make: Callable[[DrafterParts], Drafter]
    in_auto: Callable[[DrafterParts], bool]
    table_bytes: Callable[[Geometry, int], int] = lambda geometry, context: 0


def _model(parts: DrafterParts) -> ModelDrafter:
    if parts.model is None:
        raise UsageError("No draft model was given.", "Name one with --draft-model, or leave this drafter out.")
    vocabulary, can = parts.target.geometry.vocab_size, parts.model.capabilities
    if parts.depths and can.layer_skip and can.hidden:
        return SortedDrafter(parts.model, parts.chunk, parts.depths, vocabulary)
    return ModelDrafter(parts.model, parts.chunk, vocabulary, parts.acceptance)


def _hierarchical(parts: DrafterParts) -> HierarchicalDrafter:
    cheap: list[Drafter] = [CopyDrafter(), NgramDrafter(parts.target.geometry.vocab_size)]
    return HierarchicalDrafter(_model(parts), cheap)


def _exit(parts: DrafterParts) -> EarlyExitDrafter:
    layers = parts.target.geometry.num_layers
    # Untuned: after two thirds of the layers. Earlier exits of models that were not trained for it predict little.
    return EarlyExitDrafter(parts.target, parts.tuning.exit_layer or max(1, layers * 2 // 3))


def _skip(parts: DrafterParts) -> SkipDrafter:
    return SkipDrafter(parts.target, parts.tuning.layer_mask)


def _resident(parts: DrafterParts) -> ResidentDrafter:
    if parts.resident is None:
        message = "All experts of this model are in memory."
        raise UsageError(message, "Draft with experts, or leave some out of memory (--weights experts).")
    return ResidentDrafter(parts.target, parts.resident, parts.experts)


def _always(parts: DrafterParts) -> bool:
    return True


def _never(parts: DrafterParts) -> bool:
    return False


KINDS: dict[str, Kind] = {
    "forced": Kind(lambda parts: ForcedDrafter(), _always),
    "copy": Kind(lambda parts: CopyDrafter(), _always, lambda geometry, context: CopyDrafter.planned_bytes(context)),
    "ngram": Kind(
        lambda parts: NgramDrafter(parts.target.geometry.vocab_size),
        _always,
        lambda geometry, context: NgramDrafter.planned_bytes(),
    ),
    "recycle": Kind(
        lambda parts: RecycleDrafter(parts.target.geometry.vocab_size),
        _always,
        lambda geometry, context: RecycleDrafter.planned_bytes(geometry.vocab_size),
    ),
    "model": Kind(_model, lambda parts: parts.model is not None),
    # In "auto" the governor itself makes cascades.
    "hierarchical": Kind(
        _hierarchical,
        _never,
        lambda geometry, context: CopyDrafter.planned_bytes(context) + NgramDrafter.planned_bytes(),
    ),
    "exit": Kind(_exit, lambda parts: parts.tuning.exit_layer is not None),
    "skip": Kind(_skip, lambda parts: parts.tuning.layer_mask is not None),
    "bits": Kind(lambda parts: BitsDrafter(parts.target), lambda parts: parts.target.capabilities.elastic),
    "experts": Kind(
        lambda parts: ExpertsDrafter(parts.target, parts.experts),
        lambda parts: len(parts.target.capabilities.expert_counts) > 1,
    ),
    "resident": Kind(_resident, lambda parts: parts.resident is not None),
    # What heads take is in their file's size: `heads_bytes`.
    "medusa": Kind(lambda parts: MedusaDrafter(parts.target, parts.heads("medusa")), lambda parts: parts.has("medusa")),
    "hydra": Kind(lambda parts: HydraDrafter(parts.target, parts.heads("hydra")), lambda parts: parts.has("hydra")),
    "prompt": Kind(lambda parts: PromptDrafter(parts.target, parts.heads("prompt")), lambda parts: parts.has("prompt")),
}


def make_drafter(name: str, parts: DrafterParts) -> Drafter:
    """The drafter of this name, a key of KINDS.

    Raises:
        UsageError: it needs something that is not there.
        CapabilityError: the target's backend cannot do what it needs.
    """
    return KINDS[name].make(parts)
