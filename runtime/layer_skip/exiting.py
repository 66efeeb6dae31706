"""A reply whose tokens leave the model early where its first layers are sure.

CALM's confidence (Schuster et al. 2022) with FREE's synchronised layers (Bae et al. 2023): first layers run for every
token, and their hidden states are kept. When a token needs depth, or too many have left, the deeper layers run for all
that wait in one pass, so that keys and values are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import ComputeUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import Backend, Pass, require
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments, feed, likeliest

_ONE_ROW = np.zeros(1, np.int64)
# Tokens that may wait for the deeper layers.
_MOST_WAITING = 8


class EarlyExitDecoding(ReducedDecoding):
    """A reply whose tokens leave the model after its first layers where these are sure."""

    def __init__(self, given: StrategyArguments, exit_layer: int, costs: BlockCosts) -> None:
        backend, layers = given.backend, given.backend.geometry.num_layers
        can, hint = backend.capabilities, "Use a natively exported bundle, or compute in full."
        require(can.layer_skip and can.hidden, backend, "leave a pass early and resume it", hint)
        if not 0 < exit_layer < layers:
            message = f"A model of {layers} layers has no exit after layer {exit_layer}."
            raise UsageError(message, f"Choose one from 1 to {layers - 1}." if layers > 1 else "Compute in full.")
        super().__init__(given)
        self._below = given.options.skip_cache == "below"
        require(backend.cache.copyable or not self._below, backend, "copy this model's cache", "Leave skip_cache out.")
        self._costs = costs
        self._first = np.arange(2 * layers) < 2 * exit_layer  # (2 L,)
        self._most = min(_MOST_WAITING, given.chunk, backend.cache.capacity)
        self._waiting: list[int] = []  # tokens of the cache's last rows, which lack deeper layers
        self._hidden = np.empty((self._most, backend.geometry.hidden_size), np.float32)  # after the first layers
        self._kept: dict[int, Floats] = {}  # what the exit said behind waiting tokens
        self._whole = backend.cache.capacity  # rows that nothing was filled into

    def _begin(self, logits: Floats) -> None:
        self._whole = self._backend.cache.capacity
        if not self._statistics.tokens:
            self._try(1.0)

    def _reduced(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> dict[int, Floats]:
        def run(ids: Ints, places: Ints, rows: Ints) -> Floats:
            return self._backend.forward(Pass(ids, places, rows, layer_mask=self._first)).logits

        said = feed(run, tokens, start, wanted, self._chunk)
        return {index: logits.copy() for index, logits in said if self._sure(logits)}

    def _sure(self, logits: Floats) -> bool:  # (V,)
        return likeliest(logits)[1] >= self._options.exit_confidence

    def _logits(self, lost: int) -> Floats:  # (V,)
        place = self._backend.cache.length
        root = np.array(self._tokens[-1:])
        output = self._backend.forward(Pass(root, np.array([place]), _ONE_ROW, layer_mask=self._first))
        assert output.hidden is not None, "a backend that resumes gives hidden states"
        self._waiting.append(self._tokens[-1])
        self._hidden[len(self._waiting) - 1] = output.hidden[0]
        full = len(self._waiting) == self._most or self._backend.cache.length == self._backend.cache.capacity
        if not (full or self._limit.stopped) and self._sure(output.logits[0]):
            if self._limit.watching and len(self._kept) < self._samples:
                self._kept[len(self._waiting) - 1] = output.logits[0].copy()
            self._statistics.reduced += 1
            self._statistics.blocks_skipped += int((~self._first).sum())
            said: Floats = output.logits[0]
            return said
        return self._deepen()

    def _deepen(self) -> Floats:  # (V,)
        """Run the deeper layers for all that wait, the last of which needs them."""
        size = len(self._waiting)
        start, skipped = self._backend.cache.length - size, 0
        if self._below and size > 1:
            # Of a whole row the last token needs nothing, of those before it keys and values.
            fill_below(self._backend, start, start + size - 1, ~self._first)
            self._whole = min(self._whole, start)
            skipped = size - 1
        else:
            self._backend.cache.trim(start)
            self._statistics.caught_up += size - 1
        rows = np.array([*(() if skipped else self._kept), size - 1 - skipped])
        output = self._backend.forward(
            Pass(
                np.array(self._waiting[skipped:]),
                start + np.arange(skipped, size),
                rows,
                layer_mask=~self._first,
                hidden=self._hidden[skipped:size],
            )
        )
        if not skipped:
            for whole, reduced in zip(output.logits, self._kept.values(), strict=False):
                self._limit.add(whole, reduced)
            self._limit.check(self._statistics.reduced, self._statistics.tokens)
        self._waiting.clear()
        self._kept.clear()
        said: Floats = output.logits[-1]
        return said

    def _chosen(self, logits: Floats) -> None:
        """Leaves what waits until a token needs the deeper layers."""

    def leave(self) -> None:
        """Drop rows that lack deeper layers, or rest on others that did."""
        self._backend.cache.trim(min(self._whole, self._backend.cache.length - len(self._waiting)))
        self._waiting.clear()
        self._kept.clear()

    def compute_use(self) -> ComputeUse:
        return self._predicted(self._first, self._costs)


def fill_below(backend: Backend, start: int, stop: int, missing: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Give rows start..stop-1 keys and values of the nearest lower layer where attention did not run (`missing`, 2 L),
    and drops what comes after them."""
    copied = backend.cache.snapshot(start, stop)
    source = 0
    below_keys, below_values = copied.keys, copied.values
    keys, values = list(below_keys), list(below_values)
    for layer in range(len(keys)):
        if missing[2 * layer]:
            keys[layer], values[layer] = below_keys[source], below_values[source]
        else:
            source = layer
    backend.cache.trim(start)
    backend.cache.append(CopiedRows(copied.length, tuple(keys), tuple(values), copied.kv, copied.scales))


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> EarlyExitDecoding:
    """Exit where it was asked for, else at the bundle's exit unless every layer is one, else as tuned, else after two
    thirds of the layers."""
    strategies.require_skipping()
    layers, exits = given.backend.geometry.num_layers, strategies.exits
    trained = exits[0] if 1 < len(exits) < layers else None
    exit_layer = given.options.exit_layer or trained or strategies.tuned_exit() or max(1, layers * 2 // 3)
    costs = strategies.block_costs()
    return EarlyExitDecoding(given.timed(costs), exit_layer, costs)


METHODS = (
    ComputeMethod(name="exit", help="a pass ends once the first layers are sure of the token", make=_make, refuses=()),
)
