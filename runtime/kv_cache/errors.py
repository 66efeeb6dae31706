"""What quantized caches do to attention, layer by layer: its output over rows stored and loaded, against the rows.

Every layer sees the hidden states of a float32 cache, so that errors do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, KVScales
from edgeinfer.bundle.arithmetic import attend
from edgeinfer.bundle.kv_types import find_kv_type, load, store
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend

__all__ = ["AttentionError", "attention_errors"]


@dataclass(frozen=True)
class AttentionError:
    """How far attention over a quantized cache is from attention over a float32 one.

    Attributes:
        kv: type of the cache.
        layers: root of the summed squares of the difference, as a share of that of the output, for each layer.
    """

    kv: str
    layers: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Root mean square over the layers."""
        return float(np.sqrt(np.mean(np.square(self.layers))))


def attention_errors(bundle: Bundle, texts: Sequence[Sequence[int]], scales: KVScales) -> list[AttentionError]:
    """The errors of every type that there are scales for, over the tokens of all texts.

    Args:
        texts: token ids, each evaluated in one pass of the reference backend.

    Raises:
        BundleError: the bundle's weights are opaque, or the scales are another model's.
    """
    scales.check(bundle.manifest.geometry)
    probe = _Probe(bundle, max(map(len, texts)), scales)
    for text in texts:
        probe.cache.trim(0)
        probe.forward(ForwardInput(np.array(text, np.int64), np.arange(len(text)), np.zeros(0, np.int64)))
    shares = {kv: np.sqrt(squares / probe.squares) for kv, squares in probe.differences.items()}
    probe.close()
    return [AttentionError(kv, tuple(map(float, share))) for kv, share in shares.items()]


class _Probe(ReferenceBackend):
    """Attends twice, and goes on with what the float32 rows gave."""

    def __init__(self, bundle: Bundle, capacity: int, scales: KVScales) -> None:
        super().__init__(bundle, capacity)
        self._scales = scales
        layers = self.geometry.num_layers
        self.squares = np.zeros(layers)
        self.differences = {kv: np.zeros(layers) for kv in scales.layers}

    def _mix(
        self, layer: int, queries: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]
    ) -> Floats:  # (H, g, S, h)
        exact = attend(queries, keys, values, visible)
        self.squares[layer] += float(np.square(exact).sum())
        for kv, differences in self.differences.items():
            kind, own = find_kv_type(kv), self._scales.of(kv)[layer]
            cached_keys = load(kind, store(kind, keys, own.keys), own.keys)
            cached_values = load(kind, store(kind, values, own.values), own.values)
            differences[layer] += float(np.square(attend(queries, cached_keys, cached_values, visible) - exact).sum())
        return exact
