"""A reply whose tokens skip the same blocks, chosen after its prompt, and the whole passes that keep watch over it.

Knows nothing of how blocks are chosen. Rows of the cache that were made with blocks left out are `pending`: blocks that
ran wrote what no whole model had written, others nothing. A watch runs the whole model over all of them in one pass,
which gives its predictions for many tokens at once and makes their rows whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.adaptive import ComputeUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.layer_skip.contract import Mask, SkipPolicy, Wanted, feed, whole_pass
from edgeinfer.runtime.layer_skip.states import PromptStates
from edgeinfer.runtime.layer_skip.steps import Steps, Surroundings
from edgeinfer.runtime.speculation.drafters.self_drafter import require
from edgeinfer.runtime.speculation.skip_costs import BlockCosts

__all__ = ["Skipping"]

_ONE_ROW = np.zeros(1, np.int64)
# Tokens between two watches: at first few, as nothing is known yet; where all is well, they grow rare.
_FIRST, _LONGEST = 8, 64


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
            if not self._mask.all():
                self._try(1.0)

    def _reduced(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> dict[int, Floats]:
        def run(ids: Ints, places: Ints, rows: Ints) -> Floats:
            return self._backend.forward(ForwardInput(ids, places, rows, layer_mask=self._mask)).logits

        return {index: logits.copy() for index, logits in feed(run, tokens, start, wanted, self._chunk)}

    def _logits(self, lost: int) -> Floats:  # (V,)
        assert self._mask is not None, "first comes first"
        root, place = np.array(self._tokens[-1:]), np.array([self._backend.cache.length])
        whole = bool(self._mask.all()) or self._floor.stopped
        output = self._backend.forward(ForwardInput(root, place, _ONE_ROW, layer_mask=None if whole else self._mask))
        if not whole:
            self._books.reduced += 1
            self._books.blocks_skipped += int((~self._mask).sum())
            self._pending.append(self._tokens[-1])
        said: Floats = output.logits[0]
        return said

    def _chosen(self, logits: Floats) -> None:
        if not self._pending:
            return
        if self._floor.watching:
            stride = -(-self._window // self._samples)
            if (len(self._pending) - 1) % stride == 0:
                self._kept.append((len(self._pending) - 1, logits.copy()))
        # What makes room in a full cache must find rows that all layers wrote.
        full = self._backend.cache.length == self._backend.cache.capacity
        if full or (self._floor.watching and len(self._pending) == self._window):
            self._watch()

    def _watch(self) -> None:
        """Makes the pending rows whole and compares."""
        start = self._backend.cache.length - len(self._pending)
        self._backend.cache.trim(start)
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
        self._backend.cache.trim(self._backend.cache.length - len(self._pending))
        self._pending.clear()
        self._kept.clear()

    def use(self) -> ComputeUse:
        """What happened so far."""
        if self._mask is None:
            return super().use()
        return self._predicted(self._mask, self._wanted.costs)
