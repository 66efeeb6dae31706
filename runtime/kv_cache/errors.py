"""Errors of attention over smaller caches, layer by layer: its output over rows stored and loaded, against the rows.
Every layer sees the hidden states of a float32 cache, so that errors do not add up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.key_centres import key_centres
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.paging.codecs import ROW_CODECS, RowCodec


@dataclass(frozen=True)
class AttentionError:
    """Difference of attention over a smaller cache from attention over a float32 one."""

    kv: str
    # Root of the summed squares of the difference, as a share of that of the output, for each layer.
    layers: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.layers))))


def attention_errors(bundle: Bundle, texts: Sequence[Sequence[int]]) -> list[AttentionError]:
    """The errors of every type of cache, over the tokens of all texts."""
    capacity = max(map(len, texts))
    probe = _Probe(bundle, capacity, [codec for codec in ROW_CODECS.values() if codec.name != FLOAT32])
    cache = probe.new_sequence(capacity)
    for text in texts:
        cache.trim(0)
        probe.forward([(cache, Pass(np.array(text, np.int64), np.arange(len(text)), np.zeros(0, np.int64)))])
    shares = {kv: np.sqrt(squares / probe.squares) for kv, squares in probe.differences.items()}
    probe.close()
    return [AttentionError(kv, tuple(map(float, share))) for kv, share in shares.items()]


class _Probe(ReferenceBackend):
    """Attends once for every type of cache, and goes on with what the float32 rows gave."""

    def __init__(self, bundle: Bundle, capacity: int, codecs: Sequence[RowCodec]) -> None:
        super().__init__(bundle, capacity)
        self._codecs = codecs
        self._centres = key_centres(bundle)
        layers = self.geometry.num_layers
        self.squares = np.zeros(layers)
        self.differences = {codec.name: np.zeros(layers) for codec in codecs}

    def _mix(
        self, layer: int, queries: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]
    ) -> Floats:  # (H, g, S, h)
        exact = super()._mix(layer, queries, keys, values, visible)
        self.squares[layer] += float(np.square(exact).sum())
        centre = self._centres.get(layer, np.float32(0))
        for codec in self._codecs:
            # What all keys lack changes no softmax.
            lacking = keys - centre if codec.turned else keys
            kept_keys, kept_values = (codec.decode(codec.encode(rows), rows.shape[-1]) for rows in (lacking, values))
            mixed = super()._mix(layer, queries, kept_keys, kept_values, visible)
            self.differences[codec.name][layer] += float(np.square(mixed - exact).sum())
        return exact
