"""Drafting with a small model that goes as deep as a token needs. S2D: each of some depths of the drafter was trained
to guess. A guess begins at the shallowest; where that is unsure the pass is resumed from its hidden states. What later
layers have not seen of earlier tokens they see then, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod, DrafterParts
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter

# A guess of at least this probability is not asked of more layers.
_CONFIDENT = 0.6
_FIRST_ROWS = 64


class SortedDrafter(ModelDrafter):
    """Drafts with a small model that goes as deep as a token needs, of ascending `depths` below its own."""

    name = "sorted"

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        chunk: int,
        depths: Sequence[int],
        vocabulary: int | None = None,
        confident: float = _CONFIDENT,
    ) -> None:
        super().__init__(backend, cache, chunk, vocabulary)
        layers = backend.geometry.num_layers
        bounds = (0, *depths, layers)
        index = np.arange(2 * layers) // 2
        self._masks = [(first <= index) & (index < last) for first, last in pairwise(bounds)]
        self._seen = [0] * len(self._masks)  # rows that the layers of each part have seen
        shape = (_FIRST_ROWS, backend.geometry.hidden_size)
        self._hidden = [np.empty(shape, np.float32) for _ in depths]  # of the rows, after each part but the last
        self._chunk, self._confident = chunk, confident
        # Guesses by their depth, for whoever wants to know whether it pays.
        self.guessed = [0] * len(self._masks)

    def nbytes(self) -> int:
        return super().nbytes() + sum(states.nbytes for states in self._hidden)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:
        return self._part(0, tokens, positions, rows)

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        total = len(context.tokens) + len(drafted)
        if total > self._cache.capacity:
            return None
        logits = (yield from self._follower.follow(context.tokens, drafted, 1))[0]
        part = 0
        while part + 1 < len(self._masks) and _chance(logits) < self._confident:
            part += 1
            logits = yield from self._resume(part, np.array([*context.tokens, *drafted], np.int64))
        self.guessed[part] += 1
        return self._widened(logits)

    def _resume(self, part: int, tokens: Ints) -> Passes[Floats]:  # (T,) -> (V,)
        """Run a part over all rows that its layers have not seen; the last row's logits."""
        # The last row again where it was seen: its logits are wanted.
        start = min(self._seen[part], len(tokens) - 1)
        # The passes that follow start at the same row and mask the layers before, which leaves their rows as they are.
        self._cache.trim(start)
        self._follower.forget_logits()
        logits = np.empty((0, 0), np.float32)
        for first in range(start, len(tokens), self._chunk):
            stop = min(first + self._chunk, len(tokens))
            rows = np.arange(stop - first)[stop - first - (stop == len(tokens)) :]
            logits = yield from self._part(part, tokens[first:stop], np.arange(first, stop), rows)
        last: Floats = logits[0]
        return last

    def _part(self, part: int, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:  # (R, V)
        start, end = int(positions[0]), int(positions[-1]) + 1
        hidden = self._hidden[part - 1][start:end] if part else None
        known = np.minimum(tokens, self._own - 1)
        batch = Pass(known, positions, rows, layer_mask=self._masks[part], hidden=hidden)
        (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
        if part < len(self._hidden):
            assert output.hidden is not None, "a backend that resumes gives hidden states"
            states = self._hidden[part]
            if end > len(states):
                states = np.concatenate([states, np.empty((end, states.shape[1]), np.float32)])
                self._hidden[part] = states
            # A copy: the output is a view that the next pass overwrites.
            states[start:end] = output.hidden
        self._seen[part] = end
        for later in range(part + 1, len(self._seen)):
            self._seen[later] = min(self._seen[later], start)
        return output.logits


def _chance(logits: Floats) -> float:  # (V,)
    """Probability of the likeliest token."""
    return 1 / float(np.exp(logits - logits.max()).sum())


def _make(parts: DrafterParts) -> SortedDrafter:
    model, cache = parts.require_model()
    if not parts.depths or not (model.capabilities.layer_skip and model.capabilities.hidden):
        message = "The draft model was not trained to guess after fewer layers, or cannot skip any here."
        raise UsageError(message, "Train one (edgeinfer distill sorted), or use the drafter model.")
    return SortedDrafter(model, cache, parts.chunk, parts.depths, parts.target.geometry.vocab_size)


METHOD = DrafterMethod(
    name="sorted",
    help="a draft model that goes as deep as a token needs (S2D)",
    make=_make,
    in_auto=lambda parts: False,
    runs="model",
)
