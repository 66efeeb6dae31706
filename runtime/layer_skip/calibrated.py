"""Replies whose tokens skip the same blocks, by default those that `edgeinfer tune --skip` found least harmful.

Rows of the cache that were made with blocks left out are `pending`: blocks that
ran wrote what no whole model had written, others nothing. A watch runs the whole model over all of them in one pass,
which gives its predictions for many tokens at once and makes their rows whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult, require
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import (
    EvaluatedPrompt,
    Mask,
    ReducedDecoding,
    SkipPolicy,
    SpeedTarget,
    StrategyArguments,
)

# Name of the sets of blocks in a profile.
SKIP_LEVELS = "ladder"
_ONE_ROW = np.zeros(1, np.int64)
# Tokens between two watches: at first few, as nothing is known yet; where all is well, they grow rare.
_FIRST, _LONGEST = 8, 64
# Tokens that are looked at, the last ones: of longer prompts the request itself, which stands at their end.
_MOST = 128


class LayerSkipDecoding(ReducedDecoding):
    """A reply whose tokens skip the blocks that a policy chose after its prompt."""

    def __init__(self, given: StrategyArguments, policy: SkipPolicy, costs: BlockCosts) -> None:
        hint = "Use a natively exported bundle, or the full model."
        backend = given.sequence.backend
        require(backend.capabilities.layer_skip, backend, "skip layers", hint)
        super().__init__(given)
        self._policy = policy
        self._wanted = SpeedTarget(given.options.compute_speedup, costs)
        self._mask: Mask | None = None
        self._pending: list[int] = []  # tokens of the cache's last rows
        self._kept: list[tuple[int, Floats]] = []  # of them, index and what was predicted behind it
        self._window = _FIRST
        self._states: PromptStates | None = None

    def read(self, batch: Pass) -> Passes[PassResult]:
        """Evaluate a chunk of the prompt; layer by layer where the policy is to see what lies between."""
        if self._mask is not None or not self._policy.reads_states:
            return super().read(batch)
        if self._states is None or self._states.prompt is not self._sequence.tokens:
            self._states = self._states_of(self._sequence.tokens)
        return self._states.read(batch)

    def _states_of(self, prompt: Sequence[int]) -> PromptStates:
        return PromptStates(self._backend, self._cache, prompt, self._chunk)

    def _begin(self, text: Sequence[int], logits: Floats) -> Passes[None]:
        self._pending.clear()
        self._kept.clear()
        if self._mask is None:  # else the reply goes on after a pause
            states = self._states or self._states_of(text[:-1])
            self._mask, self._states = (yield from self._policy.mask(states, self._wanted)), None
            self._predict(self._mask, self._wanted.costs)
            if not self._mask.all():
                yield from self._try(text, 1.0)

    def _reduced(
        self, text: Sequence[int], tokens: Sequence[int], start: int, wanted: Sequence[int]
    ) -> Passes[dict[int, Floats]]:
        found: dict[int, Floats] = {}
        keep = lambda index, logits: found.update({index: logits.copy()})  # noqa: E731
        yield from self._feed(tokens, start, wanted, keep, self._mask)
        return found

    def _logits(self, tokens: Sequence[int], lost: int) -> Passes[Floats]:  # (V,)
        assert self._mask is not None, "first comes first"
        root, place = np.array(tokens[-1:]), np.array([self._cache.length])
        whole = bool(self._mask.all()) or self._limit.stopped
        batch = Pass(root, place, _ONE_ROW, layer_mask=None if whole else self._mask)
        (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
        if not whole:
            self.compute.reduced += 1
            self._blocks_skipped += int((~self._mask).sum())
            self._pending.append(tokens[-1])
        said: Floats = output.logits[0]
        return said

    def _chosen(self, logits: Floats) -> Passes[None]:
        if not self._pending:
            return
        if self._limit.watching:
            stride = -(-self._window // self._samples)
            if (len(self._pending) - 1) % stride == 0:
                self._kept.append((len(self._pending) - 1, logits.copy()))
        # What makes room in a full cache must find rows that all layers wrote.
        full = self._cache.length == self._cache.capacity
        if full or (self._limit.watching and len(self._pending) == self._window):
            yield from self._watch()

    def _watch(self) -> Passes[None]:
        """Make the pending rows whole and compare."""
        start = self._cache.length - len(self._pending)
        self._cache.trim(start)
        reduced = dict(self._kept)
        compare = lambda index, logits: self._limit.add(logits, reduced[index])  # noqa: E731
        yield from self._feed(self._pending, start, list(reduced), compare)
        self.compute.caught_up += len(self._pending)
        self._pending.clear()
        self._kept.clear()
        self._limit.check(self.compute.reduced, self.compute.tokens)
        if self._limit.easy:
            self._window = min(2 * self._window, _LONGEST)

    def leave(self) -> None:
        self._cache.trim(self._cache.length - len(self._pending))
        self._pending.clear()
        self._kept.clear()


class PromptStates:
    """Implements `contract.EvaluatedPrompt` for a backend that can skip layers and resume from hidden states.

    Layer by layer or at once, a pass gives the same rows and logits, to the bit. So the passes that evaluate a prompt
    run layer by layer over its last tokens, which costs no further pass. Where the cache held some of these tokens
    already, they are read once more.
    """

    def __init__(self, backend: Backend, cache: KVCache, prompt: Sequence[int], chunk: int) -> None:
        self._backend, self._cache = backend, cache
        self.prompt = prompt
        self._chunk = chunk
        self._seen: list[tuple[int, Floats]] = []  # by place in the prompt, of its last tokens

    @property
    def layers(self) -> int:
        """The number of layers, L."""
        return self._backend.geometry.num_layers

    def read(self, batch: Pass) -> Passes[PassResult]:
        """A pass over the prompt's next tokens, which keeps the states of those that are among its last ones."""
        start, size = self._cache.length, len(batch.tokens)
        first, can = max(start, len(self.prompt) - _MOST), self._backend.capabilities
        ours = can.layer_skip and can.hidden and batch.tokens.tolist() == [*self.prompt[start : start + size]]
        if not ours or start + size <= first:
            return (yield from self._forward(batch))
        states = np.empty((self.layers + 1, start + size - first, self._backend.geometry.hidden_size), np.float32)
        output = yield from self._fill(states, batch)
        self._seen.append((first, states))
        return output

    def states(self) -> Passes[Floats]:  # (L + 1, S, D)
        """The states of the last tokens: of the passes that evaluated them, else of further ones."""
        can = self._backend.capabilities
        hint = "Use a natively exported bundle, or another method."
        require(can.layer_skip and can.hidden, self._backend, "tell the states between its layers", hint)
        end = self._cache.length
        size = min(end, len(self.prompt), _MOST)
        kept = sum(states.shape[1] for _, states in self._seen)
        if kept == size and end == len(self.prompt) == self._seen[0][0] + kept:
            return np.concatenate([states for _, states in self._seen], axis=1)
        begin, nothing = end - size, np.zeros(0, np.int64)
        tokens = np.array(self.prompt[len(self.prompt) - size :], np.int64)
        found = np.empty((self.layers + 1, size, self._backend.geometry.hidden_size), np.float32)
        for at in range(0, size, self._chunk):
            part = tokens[at : at + self._chunk]
            self._cache.trim(begin + at)
            batch = Pass(part, begin + at + np.arange(len(part)), nothing)
            yield from self._fill(found[:, at : at + len(part)], batch)
        return found

    def _forward(self, batch: Pass) -> Passes[PassResult]:
        (result,) = yield Evaluate(self._backend, ((self._cache, batch),))
        return result

    def _fill(self, states: Floats, batch: Pass) -> Passes[PassResult]:  # (L + 1, S, D)
        """Run a pass of which the cache lacks the rows, layer by layer, and fill in the states between them of its
        last S rows."""
        start, nothing = self._cache.length, np.zeros(0, np.int64)
        entering: Floats | None = None  # (rows of the pass, D)
        try:
            for layer in range(-1, self.layers):
                mask = np.arange(2 * self.layers) // 2 == layer
                rows = batch.rows if layer == self.layers - 1 else nothing
                self._cache.trim(start)
                output = yield from self._forward(replace(batch, rows=rows, layer_mask=mask, hidden=entering))
                assert output.hidden is not None, "a backend that resumes gives hidden states"
                entering = output.hidden
                states[layer + 1] = entering[-states.shape[1] :]
        except BaseException:
            self._cache.trim(start)
            raise
        return output


def kept_layers(layers: int, speedup: float) -> list[int]:
    """Layers that unified skipping keeps, by the authors' rule (arXiv 2404.06954). They are first and last, and each
    multiple of an interval until int(L / speedup) layers are kept. Below three layers to keep there is nothing to
    space; first and last always stay."""
    count = int(layers / speedup)
    if count >= layers:
        return list(range(layers))
    kept = sorted({0, layers - 1})
    if count > 2:
        interval = int(layers / (count - 2 + 1))
        for layer in range(1, layers - 1):
            if layer % interval == 0 and len(kept) < count:
                kept.append(layer)
    return sorted(kept)


def layers_mask(layers: int, kept: list[int]) -> Mask:
    """Attention and MLP of these layers."""
    mask = np.zeros((layers, 2), np.bool_)
    mask[kept] = True
    return mask.reshape(-1)


@dataclass(frozen=True)
class SkipLevels:
    """Sets by ascending saving, each of no less loss than the one before it; the first leaves nothing out."""

    masks: NDArray[np.bool_]  # blocks that run. (N, 2 L)
    # Nats from the whole model's predictions on the texts of the search, mean over tokens. (N,).
    losses: NDArray[np.float64]

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        return {"masks": self.masks, "losses": self.losses}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> SkipLevels | None:
        """Take back what `state` gave, for a model of so many layers; None where nothing was kept."""
        if not state:
            return None
        masks, losses = state.get("masks"), state.get("losses")
        if masks is None or losses is None or not _fit(masks, losses, layers):
            raise StorageError("The calibrated sets belong to another model.", "Run edgeinfer tune --skip again.")
        return cls(masks, losses)

    def choose(self, wanted: SpeedTarget) -> Mask:
        """The least harmful set that is as fast as wanted; where none is, the fastest."""
        every = range(len(self.masks))
        fast = [row for row in every if wanted.reached(self.masks[row])]
        if fast:
            chosen = min(fast, key=lambda row: float(self.losses[row]))
        else:
            chosen = min(every, key=lambda row: wanted.costs.ms(self.masks[row]))
        mask: Mask = self.masks[chosen]
        return mask


def _fit(masks: NDArray[Any], losses: NDArray[Any], layers: int) -> bool:
    """Whether these are levels of a model of so many layers."""
    shaped = masks.ndim == 2 and masks.shape[1] == 2 * layers and losses.shape == masks.shape[:1] != (0,)
    typed = masks.dtype == np.bool_ and losses.dtype == np.float64
    return shaped and typed and bool(np.isfinite(losses).all() and masks[0].all())


@dataclass(frozen=True)
class CalibratedPolicy:
    """Skips the blocks that `edgeinfer tune --skip` found least harmful."""

    reads_states: ClassVar[bool] = False

    levels: SkipLevels

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        """Skip these blocks for every prompt."""
        yield from ()
        return self.levels.choose(wanted)


def skipping(strategies: ReducedComputeStrategies, given: StrategyArguments, policy: SkipPolicy) -> LayerSkipDecoding:
    """The strategy of a reply that skips what a policy chooses."""
    strategies.require_skipping()
    costs = strategies.block_costs()
    return LayerSkipDecoding(given.timed(costs), policy, costs)


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> LayerSkipDecoding:
    layers = given.sequence.backend.geometry.num_layers
    levels = strategies.kept(SKIP_LEVELS, lambda state: SkipLevels.from_state(state, layers), None)
    if levels is None:
        message = "This model has no calibrated sets of blocks to skip."
        raise UsageError(message, "Run edgeinfer tune --skip on it once.")
    return skipping(strategies, given, CalibratedPolicy(levels))


METHODS = (
    ComputeMethod(
        name="calibrated", help="skips the blocks that edgeinfer tune --skip found least harmful", make=_make
    ),
)
