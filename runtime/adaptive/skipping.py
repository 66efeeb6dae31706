"""A reply whose tokens skip the same blocks, chosen after its prompt, and the whole passes that keep watch over it.

Knows nothing of how blocks are chosen. Rows of the cache that were made with blocks left out are `pending`: blocks that
ran wrote what no whole model had written, others nothing. A watch runs the whole model over all of them in one pass,
which gives its predictions for many tokens at once and makes their rows whole.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from edgeinfer.adaptive import ComputeUse
from edgeinfer.runtime.adaptive.contract import Mask, SkipPolicy, Wanted, feed, whole_pass
from edgeinfer.runtime.adaptive.floor import Floor
from edgeinfer.runtime.adaptive.states import PromptStates
from edgeinfer.runtime.adaptive.steps import Steps, Surroundings
from edgeinfer.runtime.contracts import Floats
from edgeinfer.runtime.speculation.drafters.self_drafter import require
from edgeinfer.runtime.speculation.skip_costs import BlockCosts

__all__ = ["Skipping"]

_ONE_ROW = np.zeros(1, np.int64)
# Tokens between two watches: at first few, as nothing is known yet; where all is well, they grow rare.
_FIRST, _LONGEST = 8, 64
# Tokens of the prompt that are tried before anything is skipped.
_TRIED = 32


class Skipping(Steps):
    """Implements `engine.Multistep`.

    Args:
        given: what it works with.
        policy: chooses the blocks.
        costs: of blocks here.

    Raises:
        CapabilityError: the backend cannot skip layers.
    """

    def __init__(self, given: Surroundings, policy: SkipPolicy, costs: BlockCosts) -> None:
        hint = "Use a natively exported bundle, or compute in full."
        require(given.backend.capabilities.layer_skip, given.backend, "skip layers", hint)
        super().__init__(given)
        self._policy = policy
        self._wanted = Wanted(given.options.compute_speedup, costs)
        self._mask: Mask | None = None
        self._pending: list[int] = []  # tokens of the cache's last rows
        self._kept: list[tuple[int, Floats]] = []  # of them, index and what was predicted behind it
        self._window = _FIRST

    def _begin(self, logits: Floats) -> None:
        self._pending.clear()
        self._kept.clear()
        if self._mask is None:  # else the reply goes on after a pause
            states = PromptStates(self._backend, self._tokens[:-1], self._chunk)
            self._mask = self._policy.mask(states, self._wanted)
            if self._floor.watching and not self._mask.all():
                self._try()

    def _try(self) -> None:
        """Reads the prompt's last tokens with the blocks left out, then whole again: where that already diverges too
        far, nothing is skipped."""
        mask, end = self._mask, self._backend.length
        size = min(_TRIED, end - 1, len(self._tokens) - 2)
        if size < 1:
            return
        tokens, start = self._tokens[-1 - size : -1], end - size
        wanted = _spread(size, self._samples)
        self._backend.truncate(start)
        reduced = {
            index: logits.copy()
            for index, logits in feed(
                lambda ids, places, rows: self._backend.forward(ids, places, rows, layer_mask=mask).logits,
                tokens, start, wanted, self._chunk,
            )
        }  # fmt: skip
        self._backend.truncate(start)
        trial = Floor(self._floor.nats)
        for index, logits in feed(whole_pass(self._backend), tokens, start, wanted, self._chunk):
            trial.add(logits, reduced[index])
        if not trial.check(1, 1):
            self._floor.refuse()

    def _logits(self, lost: int) -> Floats:  # (V,)
        assert self._mask is not None, "first comes first"
        root, place = np.array(self._tokens[-1:]), np.array([self._backend.length])
        if self._mask.all() or self._floor.stopped:
            return self._backend.forward(root, place, _ONE_ROW).logits[0]
        output = self._backend.forward(root, place, _ONE_ROW, layer_mask=self._mask)
        self._books.reduced += 1
        self._books.blocks_skipped += int((~self._mask).sum())
        self._pending.append(self._tokens[-1])
        return output.logits[0]

    def _chosen(self, logits: Floats) -> None:
        if not self._pending:
            return
        if self._floor.watching:
            stride = -(-self._window // self._samples)
            if (len(self._pending) - 1) % stride == 0:
                self._kept.append((len(self._pending) - 1, logits.copy()))
        # What makes room in a full cache must find rows that all layers wrote.
        full = self._backend.length == self._backend.capacity
        if full or (self._floor.watching and len(self._pending) == self._window):
            self._watch()

    def _watch(self) -> None:
        """Makes the pending rows whole and compares."""
        start = self._backend.length - len(self._pending)
        self._backend.truncate(start)
        reduced = dict(self._kept)
        for index, logits in feed(whole_pass(self._backend), self._pending, start, list(reduced), self._chunk):
            self._floor.add(logits, reduced[index])
        self._books.caught_up += len(self._pending)
        self._pending.clear()
        self._kept.clear()
        self._floor.check(self._books.reduced, self._books.tokens)
        if self._floor.easy:
            self._window = min(2 * self._window, _LONGEST)

    def leave(self) -> None:
        """Drops rows that the whole model did not make."""
        self._backend.truncate(self._backend.length - len(self._pending))
        self._pending.clear()
        self._kept.clear()

    def use(self) -> ComputeUse:
        """What happened so far."""
        if self._mask is None:
            return super().use()
        predicted = self._wanted.costs.ms(self._mask)
        return dataclasses.replace(super().use(), layer_mask=tuple(self._mask.tolist()), predicted_ms=predicted)


def _spread(size: int, most: int) -> list[int]:
    """Up to `most` indices below `size`, evenly spaced, the last among them."""
    return sorted({size - 1 - index * size // most for index in range(most) if index * size // most < size})
