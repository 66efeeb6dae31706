"""Drafters that run the target itself in a cheaper way, with rows of their own at the end of the target's cache. The
engine leaves the cache one token, the root, short of the context; drafting appends the root's row and those of drafted
tokens, which are dropped before verification."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice, KVCache, Pass, PassResult, require
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.planning.facts import BundleFacts
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Resumption
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower, LogitDrafter
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod, DrafterParts, pass_prior


class SelfDrafter(LogitDrafter):
    """Drafts by running the target itself."""

    uses_target = True

    def __init__(self, target: Backend, cache: KVCache) -> None:
        super().__init__(target.geometry.vocab_size)
        self._target, self._cache = target, cache
        self._follower = Follower(cache, self._run, cache.capacity)

    @abstractmethod
    def _cheaper(self) -> dict[str, Any]:
        """What makes a pass of the target cheaper: fields of `Pass`."""

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:  # (S,), (S,), (R,) -> (R, V)
        return (yield from self._evaluate(tokens, positions, rows)).logits

    def _evaluate(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[PassResult]:
        (output,) = yield Evaluate(self._target, [(self._cache, Pass(tokens, positions, rows, **self._cheaper()))])
        return output

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._follower.leave()

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        if context.root_row + 1 + len(drafted) > self._cache.capacity:
            return None
        logits: Floats = (yield from self._follower.follow(self._head(context), drafted, 1))[0]
        return logits

    def _head(self, context: DraftContext) -> list[int]:
        """The root; the rows after it are this drafter's own of this round from here on."""
        base = context.root_row
        # Several self-drafters may take turns at one cache within a round.
        if not self._follower.owns or self._follower.start != base or self._follower.end != self._cache.length:
            self._follower.restart(base)
        return context.tokens[-1:]


_FIRST_ROWS = 16


class EarlyExitDrafter(SelfDrafter):
    """Drafts with the target's first layers, whose work verification goes on from. LayerSkip's self-speculation
    (Elhoushi et al. 2024): keys, values and hidden states of the first layers are those that a whole pass would
    compute, so verification runs the remaining layers only."""

    name = "exit"

    def __init__(self, target: Backend, cache: KVCache, exit_layer: int) -> None:
        can, layers = target.capabilities, target.geometry.num_layers
        hint = "Use a natively exported bundle, or another drafter."
        require(can.layer_skip and can.hidden, target, "leave a pass early and resume it", hint)
        if not 0 < exit_layer < layers:
            raise UsageError(
                f"A model of {layers} layers has no exit after layer {exit_layer}.",
                f"Choose one from 1 to {layers - 1}." if layers > 1 else "Choose another drafter.",
            )
        super().__init__(target, cache)
        self._first = np.arange(2 * layers) < 2 * exit_layer  # (2 L,)
        self._hidden = np.empty((_FIRST_ROWS, target.geometry.hidden_size), np.float32)  # of the drafted rows

    def _cheaper(self) -> dict[str, Any]:
        return {"layer_mask": self._first}

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:
        output = yield from self._evaluate(tokens, positions, rows)
        assert output.hidden is not None, "a backend that resumes gives hidden states"
        start = int(positions[0]) - self._follower.start
        end = start + len(tokens)
        if end > len(self._hidden):
            self._hidden = np.concatenate([self._hidden, np.empty((end, self._hidden.shape[1]), np.float32)])
        # A copy: the output is a view that the next pass overwrites.
        self._hidden[start:end] = output.hidden
        return output.logits

    def resume(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Resumption | None]:
        """Run the first layers for what they have not seen, cut the cache to the context and hand over their states.
        None where no row of the chain was drafted here: a whole pass is cheaper then than one in two parts."""
        head = self._head(context)
        if not self._follower.shared(head, drafted):
            return None
        yield from self._follower.follow(head, drafted, 0)
        # The pass that follows starts at the same row and masks the first layers, which leaves their rows as they are.
        self._follower.restart(self._follower.start)
        return Resumption(self._hidden[: 1 + len(drafted)], ~self._first)

    def nbytes(self) -> int:
        return super().nbytes() + self._hidden.nbytes


def _require_planes(target: Backend) -> None:
    hint = "Use a bundle of 8 bits in the native layout, or another drafter."
    require(target.capabilities.high_planes, target, "read one plane of its weights", hint)


class BitsDrafter(SelfDrafter):
    """Drafts with the high 4-bit plane of the target's 8-bit weights. The bit axis of ELMoE-3D's self-speculation: half
    of the weights' bytes are read, and no second copy is kept."""

    name = "bits"

    def __init__(self, target: Backend, cache: KVCache) -> None:
        _require_planes(target)
        super().__init__(target, cache)

    def _cheaper(self) -> dict[str, Any]:
        return {"planes": 1}


def fewer_experts(target: Backend) -> int:
    """How many experts to draft with by default: half of the model's own number, or the nearest count."""
    counts = target.capabilities.expert_counts
    require(len(counts) > 1, target, "use fewer experts with this model", "Choose another drafter.")
    half = max(1, counts[-1] // 2)
    return max((count for count in counts if count <= half), default=counts[0])


class ExpertsDrafter(SelfDrafter):
    """Drafts with fewer of the target's experts for each token. The expert axis of ELMoE-3D's self-speculation: same
    weights, same routers, but each token uses `count` experts (by default `fewer_experts`) and, with a bias, only those
    that the bias allows."""

    name = "experts"

    def __init__(self, target: Backend, cache: KVCache, count: int | None = None) -> None:
        usual = fewer_experts(target)
        self._count = usual if count is None else count
        counts = target.capabilities.expert_counts
        if self._count not in counts:
            message = f"This model cannot draft with {count} experts for each token."
            raise UsageError(
                message, f"Choose one of {', '.join(map(str, counts))} for " + Setting("draft_experts") + "."
            )
        super().__init__(target, cache)

    def _cheaper(self) -> dict[str, Any]:
        return {"experts": self._choice()}

    def _choice(self) -> ExpertChoice:
        return ExpertChoice(self._count)


class BitsAndExpertsDrafter(ExpertsDrafter):
    """Drafts with the high 4-bit plane of the target's 8-bit weights and fewer of its experts, in one pass. ELMoE-3D's
    self-speculation on both axes: of a layer's experts, half of the bytes of half of those that a token uses are
    read."""

    name = "bits-experts"

    def __init__(self, target: Backend, cache: KVCache, count: int | None = None) -> None:
        _require_planes(target)
        super().__init__(target, cache, count)

    def _cheaper(self) -> dict[str, Any]:
        return super()._cheaper() | {"planes": 1}


class CachedExpertsDrafter(ExpertsDrafter):
    """Drafts with the experts in memory, which `bias` tells before every pass, so that drafting fetches none."""

    name = "resident"

    def __init__(self, target: Backend, cache: KVCache, bias: Callable[[], Floats], count: int | None = None) -> None:
        super().__init__(target, cache, count)
        self._bias = bias

    def _choice(self) -> ExpertChoice:
        return ExpertChoice(self._count, self._bias())


# Of a pass: half of the experts; 8-bit weights without their low bits. The acceptance of what the
# target drafts itself is guessed.
_HALF = _PLANE = 0.5


def _default_exit(layers: int) -> int:
    """Two thirds of the layers: earlier exits of models that were not trained for it predict little."""
    return max(1, layers * 2 // 3)


def _exit_share(facts: BundleFacts, tuning: TunedDrafting) -> float | None:
    layers = facts.manifest.geometry.num_layers
    if tuning.exit_layer is not None:
        return tuning.exit_layer / layers
    return _default_exit(layers) / layers if tuning.paid("exit") else None


def _bits_share(facts: BundleFacts, tuning: TunedDrafting) -> float | None:
    return _PLANE if facts.capabilities.high_planes else None


def _experts_share(facts: BundleFacts, tuning: TunedDrafting) -> float | None:
    return _HALF if len(facts.capabilities.expert_counts) > 1 else None


def _bits_and_experts_share(facts: BundleFacts, tuning: TunedDrafting) -> float | None:
    bits, experts = _bits_share(facts, tuning), _experts_share(facts, tuning)
    return None if bits is None or experts is None else bits * experts


def _has_fewer_experts(parts: DrafterParts) -> bool:
    return len(parts.target.capabilities.expert_counts) > 1


def _exit(parts: DrafterParts) -> EarlyExitDrafter:
    exit_layer = parts.tuning.exit_layer or _default_exit(parts.target.geometry.num_layers)
    return EarlyExitDrafter(parts.target, parts.cache, exit_layer)


def _cached_experts(parts: DrafterParts) -> CachedExpertsDrafter:
    if parts.cached_experts is None:
        hint = "Use the drafter experts, or load experts on demand with " + Setting("weights", "experts") + "."
        raise UsageError("All experts of this model are in memory.", hint)
    return CachedExpertsDrafter(parts.target, parts.cache, parts.cached_experts, parts.experts)


METHODS = (
    DrafterMethod(
        name="exit",
        help="the first layers of the model itself",
        make=_exit,
        in_auto=lambda parts: parts.tuning.exit_layer is not None or parts.tuning.paid("exit"),
        prior=pass_prior(0.5, _exit_share),
        runs="target",
        tuned=True,
        order=50,
    ),
    DrafterMethod(
        name="bits",
        help="the high 4 bits of the model's 8-bit weights",
        make=lambda parts: BitsDrafter(parts.target, parts.cache),
        in_auto=lambda parts: parts.target.capabilities.high_planes,
        prior=pass_prior(0.8, _bits_share),
        runs="target",
        order=52,
    ),
    DrafterMethod(
        name="experts",
        help="the model with fewer experts per token",
        make=lambda parts: ExpertsDrafter(parts.target, parts.cache, parts.experts),
        in_auto=_has_fewer_experts,
        prior=pass_prior(0.6, _experts_share),
        runs="target",
        order=53,
    ),
    DrafterMethod(
        name="bits-experts",
        help="the high 4 bits of fewer experts",
        make=lambda parts: BitsAndExpertsDrafter(parts.target, parts.cache, parts.experts),
        in_auto=lambda parts: parts.target.capabilities.high_planes and _has_fewer_experts(parts),
        prior=pass_prior(0.5, _bits_and_experts_share),
        runs="target",
        order=54,
    ),
    # No prior: whether experts are left out of memory is what is being planned.
    DrafterMethod(
        name="resident",
        help="the experts that are in memory, where the others are loaded on demand",
        make=_cached_experts,
        in_auto=lambda parts: parts.cached_experts is not None,
        runs="target",
        order=55,
    ),
)
