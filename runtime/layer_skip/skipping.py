"""A reply whose tokens skip the same blocks, chosen after its prompt, and the whole passes that keep watch over it.

Rows of the cache that were made with blocks left out are `pending`: blocks that
ran wrote what no whole model had written, others nothing. A watch runs the whole model over all of them in one pass,
which gives its predictions for many tokens at once and makes their rows whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.adaptive import ComputeUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, require
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.contract import Mask, SkipPolicy, SpeedTarget, feed, whole_pass
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments

__all__ = ["LayerSkipDecoding", "PromptStates"]

_ONE_ROW = np.zeros(1, np.int64)
# Tokens between two watches: at first few, as nothing is known yet; where all is well, they grow rare.
_FIRST, _LONGEST = 8, 64
# Tokens that are looked at, the last ones: of longer prompts the request itself, which stands at their end.
_MOST = 128


class LayerSkipDecoding(ReducedDecoding):
    """A reply whose tokens skip the blocks that a policy chose after its prompt.

    Args:
        given: what it works with.
        policy: chooses the blocks.
        costs: of blocks here.

    Raises:
        CapabilityError: the backend cannot skip layers.
    """

    def __init__(self, given: StrategyArguments, policy: SkipPolicy, costs: BlockCosts) -> None:
        hint = "Use a natively exported bundle, or the full model."
        require(given.backend.capabilities.layer_skip, given.backend, "skip layers", hint)
        super().__init__(given)
        self._policy = policy
        self._wanted = SpeedTarget(given.options.compute_speedup, costs)
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
        whole = bool(self._mask.all()) or self._limit.stopped
        output = self._backend.forward(ForwardInput(root, place, _ONE_ROW, layer_mask=None if whole else self._mask))
        if not whole:
            self._statistics.reduced += 1
            self._statistics.blocks_skipped += int((~self._mask).sum())
            self._pending.append(self._tokens[-1])
        said: Floats = output.logits[0]
        return said

    def _chosen(self, logits: Floats) -> None:
        if not self._pending:
            return
        if self._limit.watching:
            stride = -(-self._window // self._samples)
            if (len(self._pending) - 1) % stride == 0:
                self._kept.append((len(self._pending) - 1, logits.copy()))
        # What makes room in a full cache must find rows that all layers wrote.
        full = self._backend.cache.length == self._backend.cache.capacity
        if full or (self._limit.watching and len(self._pending) == self._window):
            self._watch()

    def _watch(self) -> None:
        """Makes the pending rows whole and compares."""
        start = self._backend.cache.length - len(self._pending)
        self._backend.cache.trim(start)
        reduced = dict(self._kept)
        for index, logits in feed(whole_pass(self._backend), self._pending, start, list(reduced), self._chunk):
            self._limit.add(logits, reduced[index])
        self._statistics.caught_up += len(self._pending)
        self._pending.clear()
        self._kept.clear()
        self._limit.check(self._statistics.reduced, self._statistics.tokens)
        if self._limit.easy:
            self._window = min(2 * self._window, _LONGEST)

    def leave(self) -> None:
        """Drops rows that the whole model did not make."""
        self._backend.cache.trim(self._backend.cache.length - len(self._pending))
        self._pending.clear()
        self._kept.clear()

    def compute_use(self) -> ComputeUse:
        """What reduced compute did so far."""
        if self._mask is None:
            return super().compute_use()
        return self._predicted(self._mask, self._wanted.costs)


class PromptStates:
    """Implements `contract.EvaluatedPrompt`.

    The passes write the cached rows again, which stay what they are: layer by layer or at once is the same.

    Args:
        backend: whose cache holds the prompt and nothing else; must skip layers and resume from hidden states.
        prompt: its tokens.
        chunk: most tokens of a pass.

    Raises:
        CapabilityError: the backend can do neither.
    """

    def __init__(self, backend: Backend, prompt: Sequence[int], chunk: int) -> None:
        self._backend = backend
        self._prompt = prompt
        self._chunk = chunk

    @property
    def layers(self) -> int:
        """The number of layers, L."""
        return self._backend.geometry.num_layers

    def states(self) -> Floats:  # (L + 1, S, D)
        """Computes the states of the last tokens in L + 1 passes over them, without a head."""
        can = self._backend.capabilities
        hint = "Use a natively exported bundle, or another method."
        require(can.layer_skip and can.hidden, self._backend, "tell the states between its layers", hint)
        end = self._backend.cache.length
        begin = end - min(end, len(self._prompt), _MOST)
        tokens = np.array(self._prompt[len(self._prompt) - (end - begin) :], np.int64)
        states = np.empty((self.layers + 1, end - begin, self._backend.geometry.hidden_size), np.float32)
        for at in range(0, len(tokens), self._chunk):
            part = slice(at, min(at + self._chunk, len(tokens)))
            self._backend.cache.trim(begin + at)
            self._fill(states[:, part], tokens[part], begin + at)
        return states

    def _fill(self, states: Floats, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], start: int) -> None:
        """Fills in one chunk, of which the cache lacks the rows. (L + 1, S, D), (S,)"""
        positions, nothing = start + np.arange(len(tokens)), np.zeros(0, np.int64)
        for layer in range(-1, self.layers):
            mask = np.arange(2 * self.layers) // 2 == layer
            entering = None if layer < 0 else states[layer]
            self._backend.cache.trim(start)
            output = self._backend.forward(ForwardInput(tokens, positions, nothing, layer_mask=mask, hidden=entering))
            assert output.hidden is not None, "a backend that resumes gives hidden states"
            states[layer + 1] = output.hidden
