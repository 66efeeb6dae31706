"""What passes with some blocks skipped cost, and how much faster drafting with the first layers would be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass

_LONGEST = 8
_REPEATS = 9
_PAST = 64


@dataclass(frozen=True)
class Gain:
    """The draft length that pays best, and how many times faster than plain decoding it makes it."""

    length: int
    speedup: float


@dataclass(frozen=True)
class BlockCosts:
    """Milliseconds, or any other unit, of the parts of a pass."""

    fixed: float  # what every pass over one row does besides its blocks: the call, the embedding, the head
    # Each attention and MLP block in a pass over one row, in the order of a layer mask. (2 L,).
    blocks: tuple[float, ...]
    # C(1), c(2), ...: whole passes over that many rows; at least two, the first is all parts together.
    whole: tuple[float, ...]

    def ms(self, layer_mask: NDArray[np.bool_]) -> float:  # (2 L,)
        """A pass over one row in which these blocks run."""
        return self.fixed + float(np.dot(self.blocks, layer_mask))

    def exit_gain(self, exit_layer: int, acceptance: float) -> Gain:
        """The gain of drafting with the first layers, which see the last token again, and verifying with the others:
        E(g) c(1) / (g d + first + share c(g + 1)) over g, E(g) = 1 + a + ... + a^g."""
        first = sum(self.blocks[: 2 * exit_layer])
        expected, best = 1.0, Gain(0, 0.0)
        for length in range(1, len(self.whole)):
            expected += acceptance**length
            round_ms = length * (self.fixed + first) + first + (1 - first / self.whole[0]) * self.whole[length]
            best = max(best, Gain(length, expected * self.whole[0] / round_ms), key=lambda gain: gain.speedup)
        return best


def measure_costs(
    backend: Backend, cache: KVCache, longest: int = _LONGEST, repeats: int = _REPEATS, past: int = _PAST
) -> BlockCosts:
    """Times whole passes, and passes without any attention or any MLP block; empties the cache. Blocks of one kind are
    each as equal: the time of a single one is lost in the noise of a small model."""
    if past + longest >= cache.capacity:
        message = f"Measuring needs a context of {past + longest + 1} tokens, but there are {cache.capacity}."
        raise UsageError(message, "Load the model with a larger context.")
    layers = backend.geometry.num_layers
    is_mlp = np.arange(2 * layers) % 2 == 1
    everything = np.ones(2 * layers, np.bool_)
    passes = [(everything, rows) for rows in range(1, longest + 2)] + [(is_mlp, 1), (~is_mlp, 1)]
    cache.trim(0)
    backend.forward([(cache, Pass(np.zeros(past, np.int64), np.arange(past), np.zeros(0, np.int64)))])
    *whole, without_attention, without_mlp = _medians(backend, cache, passes, repeats)
    cache.trim(0)
    # Noise must not make a block pay for being run.
    attention, mlp = (max(whole[0] - ms, 0.0) / layers for ms in (without_attention, without_mlp))
    blocks = np.where(is_mlp, mlp, attention)
    return BlockCosts(max(whole[0] - float(blocks.sum()), 0.0), tuple(blocks.tolist()), tuple(whole))


def _medians(
    backend: Backend, cache: KVCache, passes: Sequence[tuple[NDArray[np.bool_], int]], repeats: int
) -> list[float]:
    """Milliseconds of passes with a mask (2 L,) over some rows at the end of the cache; they take turns."""
    past = cache.length
    times: list[list[float]] = [[] for _ in passes]
    for repeat in range(repeats + 1):
        for (mask, size), each in zip(passes, times, strict=True):
            rows = np.arange(size)
            started = time.perf_counter()
            backend.forward([(cache, Pass(np.zeros(size, np.int64), rows + past, rows, layer_mask=mask))])
            if repeat:  # the first round warms up
                each.append((time.perf_counter() - started) * 1e3)
            cache.trim(past)
    return [median(each) for each in times]
