"""What a drafter declares: how it is made, when "auto" asks it, its memory, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, cast

from edgeinfer.bundle.additions import Heads, heads_bytes, read_heads
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import is_looked_up, tensors_in
from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.methods import DeclaredMethod, find_method, product_methods
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.planning.facts import BundleFacts
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.contract import Drafter

if TYPE_CHECKING:
    from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class DrafterParts:
    """What drafters are made of."""

    target: Backend  # the backend whose text is drafted
    cache: KVCache  # of the text in it
    model: Backend | None  # the backend of a small model with the same tokenizer; None where none was given
    model_cache: KVCache | None  # the sequence that its drafters take turns at
    chunk: int  # tokens of a prompt that the small model evaluates per pass
    tuning: TunedDrafting  # what `edgeinfer tune` found for this bundle and device
    # Per token of a draft, where drafting is with fewer; None takes half of the model's own number.
    experts: int | None = None
    # Gives which experts are in memory, as `ExpertChoice.bias`; None where all are. () -> (L, E).
    cached_experts: Callable[[], Floats] | None = None
    bundle: Bundle | None = None  # the target's, whose heads draft; None has none
    depths: tuple[int, ...] = ()  # layers of the small model after which it was trained to guess, fewer than all
    module: Bundle | None = None  # the small model's bundle, where it is a draft module

    @property
    def whole_model(self) -> Backend | None:
        """The small model, where it can run without its target."""
        return self.model if self.module is None else None

    def require_model(self) -> tuple[Backend, KVCache]:
        """The small model and its sequence; UsageError where there is none."""
        if self.whole_model is None or self.model_cache is None:
            hint = "Name one with " + Setting("draft_model") + ", or leave this drafter out."
            raise UsageError("No draft model was given.", hint)
        return self.whole_model, self.model_cache

    def has_module(self, drafter: str) -> bool:
        """Whether there is a module of a drafter, and a target whose passes give the states it reads."""
        module = None if self.module is None else self.module.manifest.module
        return module is not None and module.drafter == drafter and self.target.shows_states

    def open_module(self, drafter: str, what: str, hint: str) -> OpenModule:
        """The draft module of a drafter; UsageError where there is none that can draft here."""
        from edgeinfer.bundle.additions import read_draft_tokens
        from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule

        module, own, bundle = self.model, self.model_cache, self.module
        if module is None or own is None or bundle is None or not self.has_module(drafter):
            raise UsageError(f"The model has no {what} that can draft here.", hint)
        described, tapped = bundle.manifest.module, self.bundle is not None and bool(self.bundle.manifest.taps)
        assert described is not None, "it has a module"
        return OpenModule(self.target, self.cache, module, own, described, tapped, read_draft_tokens(bundle))

    def heads(self, kind: str) -> Heads:
        """The heads of a kind; UsageError where the bundle has none."""
        found = None if self.bundle is None else read_heads(self.bundle, kind)
        if found is None:
            message = f"The model's bundle has no {kind} heads."
            raise UsageError(message, f"Train some (edgeinfer distill heads --kind {kind}), or leave this drafter out.")
        return found


_Find = Callable[[BundleFacts, TunedDrafting], Prior | None]


@dataclass(frozen=True, kw_only=True)
class DrafterMethod(DeclaredMethod):
    """A drafter as its file declares it."""

    make: Callable[[DrafterParts], Drafter]
    in_auto: Callable[[DrafterParts], bool]  # whether "auto" asks it, given the parts
    # What is expected of it until this device measured it; None where "auto" will not ask it.
    prior: Prior | _Find | None = None
    # Bytes that it will hold for a bundle and a context, besides models.
    nbytes: Callable[[Bundle, int], int] = lambda bundle, context: 0
    # What each further sequence adds where replies share passes, for a context.
    sequence_bytes: Callable[[int], int] = lambda context: 0
    runs: Literal["tables", "target", "heads", "model", "module"] = "tables"  # what computes its guesses
    tuned: bool = False  # whether `edgeinfer tune` changes how it is made
    free: bool = False  # whether asking costs nothing, so that it is never measured and always asked


def drafter_method(name: str) -> DrafterMethod:
    """The declaration of a drafter; UsageError where there is none."""
    return cast(DrafterMethod, find_method("drafters", name))


def drafter_methods() -> Iterable[DrafterMethod]:
    """The declarations of all drafters of the product, in the order in which they are asked."""
    return cast("Iterable[DrafterMethod]", product_methods("drafters").values())


def asked_by_auto(name: str, parts: DrafterParts) -> bool:
    """Whether "auto" asks the drafter of this name: where drafters were tuned, it asks those that paid."""
    method = drafter_method(name)
    tuned = parts.tuning.drafters is None or method.free or parts.tuning.paid(name)
    return tuned and method.in_auto(parts)


def priors_of(facts: BundleFacts, tuning: TunedDrafting) -> dict[str, Prior]:
    """The drafters that "auto" will ask, in the order in which it asks them: all that the model has, or those that
    `edgeinfer tune` found to pay."""
    found = {}
    for method in drafter_methods():
        prior = method.prior(facts, tuning) if callable(method.prior) else method.prior
        if prior is not None and (tuning.drafters is None or tuning.paid(method.name)):
            found[method.name] = prior
    return found


def table_priors() -> dict[str, Prior]:
    """What is expected of drafters that look guesses up, whatever the model."""
    return {each.name: each.prior for each in drafter_methods() if isinstance(each.prior, Prior)}


def pass_prior(accepted: float, share: Callable[[BundleFacts, TunedDrafting], float | None], most: int = 0) -> _Find:
    """The prior of a drafter with a guess for every place, for a share of a pass; None where there is no share."""

    def find(facts: BundleFacts, tuning: TunedDrafting) -> Prior | None:
        taken = share(facts, tuning)
        return None if taken is None else Prior(1.0, accepted, taken, most=most)

    return find


def module_method(
    name: str, make: Callable[[OpenModule], Drafter], *, what: str, hint: str, help: str, order: int
) -> DrafterMethod:
    """Declare a drafter that is a draft module; its memory is counted with the module."""
    return DrafterMethod(
        name=name,
        help=help,
        make=lambda parts: make(parts.open_module(name, what, hint)),
        in_auto=lambda parts: parts.has_module(name),
        prior=lambda facts, tuning: _module_prior(name, facts),
        runs="module",
        order=order,
    )


def _module_prior(name: str, facts: BundleFacts) -> Prior | None:
    # Tokens per pass of the shipped drafter and of an EAGLE head on five kinds of dialogue (docs/log, 2026-11-25).
    drafter = facts.drafter
    module = None if drafter is None else drafter.manifest.module
    if drafter is None or module is None or module.drafter != name:
        return None
    head = bytes_read(facts, "head") if "head" in module.shares else 0
    own = bytes_read(drafter) / max(1, module.heads)  # a guess reads one of several heads
    most = module.heads or max(0, module.block - 1)
    return Prior(1.0, 0.6, (own + head) / bytes_read(facts), at_once=module.block > 0, most=most, model=True)


def bytes_read(facts: BundleFacts, name: str | None = None) -> int:
    """Bytes of weights that a pass reads: of all tensors but tables of which it reads a row, or of one alone."""
    tensors = tensors_in(facts.manifest, facts.layout)
    wanted = [t for t in tensors if (not is_looked_up(t.name) if name is None else t.name == name)]
    return max(1, sum(blob.nbytes for tensor in wanted for blob in tensor.blobs))


def drafter_heads_bytes(bundle: Bundle, kind: str) -> int:
    """Bytes of heads in a bundle and of the logits that their drafter works with; 0 where there are none."""
    stored = heads_bytes(bundle, kind)
    return stored + 2 * _FLOAT_BYTES * bundle.manifest.geometry.vocab_size if stored else 0
