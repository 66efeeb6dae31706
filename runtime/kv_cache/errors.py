"""What smaller caches do to attention, layer by layer: its output over rows stored and loaded, against the rows.

Every layer sees the hidden states of a float32 cache, so that errors do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, KVScales
from edgeinfer.bundle.kv_scales import LayerScales
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type, load, store
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.paging.codecs import ROW_CODECS, RowCodec

__all__ = ["AttentionError", "attention_errors"]

# Keys and values of a layer as a cache gives them back: (H, T, h) each.
_Kept = Callable[[int, Floats, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True)
class AttentionError:
    """How far attention over a smaller cache is from attention over a float32 one.

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


def attention_errors(
    bundle: Bundle, texts: Sequence[Sequence[int]], scales: KVScales | None = None
) -> list[AttentionError]:
    """The errors of every type of cache, over the tokens of all texts.

    Args:
        texts: token ids, each evaluated in one pass of the reference backend.
        scales: of a bundle whose quantized caches have static ones; None measures rows with scales of their own.

    Raises:
        BundleError: the bundle's weights are opaque, or the scales are another model's.
    """
    if scales is None:
        kept = {codec.name: _by_row(codec) for codec in ROW_CODECS.values() if codec.name != FLOAT32}
    else:
        scales.check(bundle.manifest.geometry)
        kept = {kv: _by_channel(kv, layers) for kv, layers in scales.layers.items()}
    probe = _Probe(bundle, max(map(len, texts)), kept)
    for text in texts:
        probe.cache.trim(0)
        probe.forward(ForwardInput(np.array(text, np.int64), np.arange(len(text)), np.zeros(0, np.int64)))
    shares = {kv: np.sqrt(squares / probe.squares) for kv, squares in probe.differences.items()}
    probe.close()
    return [AttentionError(kv, tuple(map(float, share))) for kv, share in shares.items()]


def _by_row(codec: RowCodec) -> _Kept:
    def kept(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        size = keys.shape[-1]
        return codec.decode(codec.encode(keys), size), codec.decode(codec.encode(values), size)

    return kept


def _by_channel(kv: str, layers: Sequence[LayerScales]) -> _Kept:
    kind = find_kv_type(kv)

    def kept(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        own = layers[layer]
        kept_keys = load(kind, store(kind, keys, own.keys), own.keys)
        return kept_keys, load(kind, store(kind, values, own.values), own.values)

    return kept


class _Probe(ReferenceBackend):
    """Attends once for every type of cache, and goes on with what the float32 rows gave."""

    def __init__(self, bundle: Bundle, capacity: int, kept: dict[str, _Kept]) -> None:
        super().__init__(bundle, capacity)
        self._kept = kept
        layers = self.geometry.num_layers
        self.squares = np.zeros(layers)
        self.differences = {kv: np.zeros(layers) for kv in kept}

    def _mix(
        self, layer: int, queries: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]
    ) -> Floats:  # (H, g, S, h)
        exact = super()._mix(layer, queries, keys, values, visible)
        self.squares[layer] += float(np.square(exact).sum())
        for kv, differences in self.differences.items():
            kept = super()._mix(layer, queries, *self._kept[kv](layer, keys, values), visible)
            differences[layer] += float(np.square(kept - exact).sum())
        return exact
