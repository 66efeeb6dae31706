"""Drafting with a small model of the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import ModelError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.planning.facts import BundleFacts
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower, LogitDrafter
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod, bytes_read
from edgeinfer.runtime.text.vocabularies import vocabulary_difference


class ModelDrafter(LogitDrafter):
    """Drafts with a small model, whose cache keeps what earlier rounds fed and catches up when a guess is asked for.
    Where its vocabulary and the target's are padded differently, tokens that only one has are never proposed."""

    name = "model"

    def __init__(self, backend: Backend, cache: KVCache, chunk: int, vocabulary: int | None = None) -> None:
        own = backend.geometry.vocab_size
        super().__init__(vocabulary or own)
        self._backend, self._cache = backend, cache
        self._own = own
        self._follower = Follower(cache, self._run, chunk)
        # Columns that the drafter lacks stay impossible.
        self._padded = np.full(vocabulary if vocabulary and vocabulary > own else 0, -np.inf, np.float32)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:
        # An id of the target's padding means nothing to either model; any other one stands for it here.
        batch = Pass(np.minimum(tokens, self._own - 1), positions, rows)
        (output,) = yield Evaluate(self._backend, [(self._cache, batch)])
        return output.logits

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the guesses of the last round; what the cache shares with the prompt stays."""
        super().begin(tokens)
        self._follower.doubt()

    def unread(self, context: DraftContext) -> int:
        """What the cache lacks of the text; nothing where the text does not fit it, so that none of it is read."""
        return self._follower.unread(context.tokens) if len(context.tokens) <= self._cache.capacity else 0

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        if len(context.tokens) + len(drafted) > self._cache.capacity:
            return None
        return self._widened((yield from self._follower.follow(context.tokens, drafted, 1))[0])

    def after(self, tokens: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        """Logits after a text that has only grown since `begin`, a view; None where it does not fit the cache."""
        if len(tokens) > self._cache.capacity:
            return None
        return self._widened((yield from self._follower.follow(tokens, (), 1))[0])

    def behind(self, tokens: Sequence[int], count: int) -> Passes[list[Floats] | None]:
        """Copies of the logits (V,) after each of the last tokens of such a text; None where it does not fit."""
        if len(tokens) > self._cache.capacity:
            return None
        return [self._widened(row).copy() for row in (yield from self._follower.follow(tokens, (), count))]

    def _widened(self, logits: Floats) -> Floats:  # (V of the drafter,) -> (V,)
        if not len(self._padded):
            return logits[: len(self._powers)]
        self._padded[: self._own] = logits
        return self._padded

    def nbytes(self) -> int:
        return sum(self._backend.nbytes().values()) + super().nbytes() + self._padded.nbytes


def check_same_vocabulary(target: Bundle, drafter: Bundle) -> None:
    """Refuses a drafter whose token ids do not mean what the target's mean."""
    difference = vocabulary_difference(target, drafter)
    if difference is not None:
        message = f"{target.path} and its drafter {drafter.path} have {difference}."
        raise ModelError(message, "Choose a drafter that was made for this model, or speculate without one.")


def _prior(facts: BundleFacts, tuning: TunedDrafting) -> Prior | None:
    """What is expected of a draft model: the figures are of the shipped drafter (docs/log, 2026-11-25)."""
    drafter = facts.drafter
    if drafter is None or drafter.manifest.module is not None:
        return None
    return Prior(1.0, 0.6, bytes_read(drafter) / bytes_read(facts), model=True)


METHODS = (
    DrafterMethod(
        name="model",
        help="a small model of the same tokenizer",
        make=lambda parts: ModelDrafter(*parts.require_model(), parts.chunk, parts.target.geometry.vocab_size),
        in_auto=lambda parts: parts.whole_model is not None,
        prior=_prior,
        runs="model",
        order=40,
    ),
)
