"""A reply whose tokens leave the model early where its first layers are sure.

CALM's confidence (Schuster et al. 2022) with FREE's synchronised layers (Bae et al. 2023): first layers run for every
token, and their hidden states are kept. When a token needs depth, or too many have left, the deeper layers run for all
that wait in one pass, so that keys and values are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import KVCache, Pass, require
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments, likeliest

_ONE_ROW = np.zeros(1, np.int64)
# Tokens that may wait for the deeper layers.
_MOST_WAITING = 8


class EarlyExitDecoding(ReducedDecoding):
    """A reply whose tokens leave the model after its first layers where these are sure."""

    def __init__(self, given: StrategyArguments, exit_layer: int, costs: BlockCosts) -> None:
        backend, cache = given.sequence.backend, given.sequence.cache
        layers = backend.geometry.num_layers
        can, hint = backend.capabilities, "Use a natively exported bundle, or compute in full."
        require(can.layer_skip and can.hidden, backend, "leave a pass early and resume it", hint)
        if not 0 < exit_layer < layers:
            message = f"A model of {layers} layers has no exit after layer {exit_layer}."
            raise UsageError(message, f"Choose one from 1 to {layers - 1}." if layers > 1 else "Compute in full.")
        super().__init__(given)
        self._below = given.options.skip_cache == "below"
        require(cache.copyable or not self._below, backend, "copy this model's cache", "Leave skip_cache out.")
        self._first_layers = np.arange(2 * layers) < 2 * exit_layer  # (2 L,)
        self._most = min(_MOST_WAITING, given.sequence.chunk, cache.capacity)
        self._waiting: list[int] = []  # tokens of the cache's last rows, which lack deeper layers
        self._hidden = np.empty((self._most, backend.geometry.hidden_size), np.float32)  # after the first layers
        self._kept: dict[int, Floats] = {}  # what the exit said behind waiting tokens
        self._whole = cache.capacity  # rows that nothing was filled into
        self._predict(self._first_layers, costs)

    def _begin(self, text: Sequence[int], logits: Floats) -> Passes[None]:
        self._whole = self._cache.capacity
        if not self.compute.tokens:
            yield from self._try(text, 1.0)

    def _reduced(
        self, text: Sequence[int], tokens: Sequence[int], start: int, wanted: Sequence[int]
    ) -> Passes[dict[int, Floats]]:
        found: dict[int, Floats] = {}

        def keep(index: int, logits: Floats) -> None:
            if self._sure(logits):
                found[index] = logits.copy()

        yield from self._feed(tokens, start, wanted, keep, self._first_layers)
        return found

    def _sure(self, logits: Floats) -> bool:  # (V,)
        return likeliest(logits)[1] >= self._options.exit_confidence

    def _logits(self, tokens: Sequence[int], lost: int) -> Passes[Floats]:  # (V,)
        place, root = self._cache.length, np.array(tokens[-1:])
        batch = Pass(root, np.array([place]), _ONE_ROW, layer_mask=self._first_layers)
        (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
        assert output.hidden is not None, "a backend that resumes gives hidden states"
        self._waiting.append(tokens[-1])
        self._hidden[len(self._waiting) - 1] = output.hidden[0]
        full = len(self._waiting) == self._most or self._cache.length == self._cache.capacity
        if not (full or self._limit.stopped) and self._sure(output.logits[0]):
            if self._limit.watching and len(self._kept) < self._samples:
                self._kept[len(self._waiting) - 1] = output.logits[0].copy()
            self.compute.reduced += 1
            self._blocks_skipped += int((~self._first_layers).sum())
            said: Floats = output.logits[0]
            return said
        return (yield from self._deepen())

    def _deepen(self) -> Passes[Floats]:  # (V,)
        """Run the deeper layers for all that wait, the last of which needs them."""
        size = len(self._waiting)
        start, skipped = self._cache.length - size, 0
        if self._below and size > 1:
            # Of a whole row the last token needs nothing, of those before it keys and values.
            fill_below(self._cache, start, start + size - 1, ~self._first_layers)
            self._whole = min(self._whole, start)
            skipped = size - 1
        else:
            self._cache.trim(start)
            self.compute.caught_up += size - 1
        rows = np.array([*(() if skipped else self._kept), size - 1 - skipped])
        batch = Pass(
            np.array(self._waiting[skipped:]),
            start + np.arange(skipped, size),
            rows,
            layer_mask=~self._first_layers,
            hidden=self._hidden[skipped:size],
        )
        (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
        if not skipped:
            for whole, reduced in zip(output.logits, self._kept.values(), strict=False):
                self._limit.add(whole, reduced)
            self._limit.check(self.compute.reduced, self.compute.tokens)
        self._waiting.clear()
        self._kept.clear()
        said: Floats = output.logits[-1]
        return said

    def _chosen(self, logits: Floats) -> Passes[None]:
        """Leaves what waits until a token needs the deeper layers."""
        yield from ()

    def leave(self) -> None:
        """Drop rows that lack deeper layers, or rest on others that did."""
        self._cache.trim(min(self._whole, self._cache.length - len(self._waiting)))
        self._waiting.clear()
        self._kept.clear()


def fill_below(cache: KVCache, start: int, stop: int, missing: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Give rows start..stop-1 keys and values of the nearest lower layer where attention did not run (`missing`, 2 L),
    and drops what comes after them."""
    copied = cache.snapshot(start, stop)
    source = 0
    below_keys, below_values = copied.keys, copied.values
    keys, values = list(below_keys), list(below_values)
    for layer in range(len(keys)):
        if missing[2 * layer]:
            keys[layer], values[layer] = below_keys[source], below_values[source]
        else:
            source = layer
    cache.trim(start)
    cache.append(CopiedRows(copied.length, tuple(keys), tuple(values), copied.kv, copied.scales))


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> EarlyExitDecoding:
    """Exit where it was asked for, else at the bundle's exit unless every layer is one, else as tuned, else after two
    thirds of the layers."""
    strategies.require_skipping()
    layers, exits = given.sequence.backend.geometry.num_layers, strategies.exits
    trained = exits[0] if 1 < len(exits) < layers else None
    exit_layer = given.options.exit_layer or trained or strategies.tuned_exit() or max(1, layers * 2 // 3)
    costs = strategies.block_costs()
    return EarlyExitDecoding(given.timed(costs), exit_layer, costs)


METHODS = (
    ComputeMethod(name="exit", help="a pass ends once the first layers are sure of the token", make=_make, refuses=()),
)
