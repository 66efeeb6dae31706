"""Errors of attention over smaller caches, layer by layer: its output over rows stored and loaded, against the rows.
Every layer sees the hidden states of a float32 cache, so that errors do not add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass
from edgeinfer.nn.decoder import Decoder, DecoderRun, Tensors, WholeTexts
from edgeinfer.nn.key_centres import key_centres
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.paging.codecs import ROW_CODECS


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
    spec = bundle.manifest.decoder
    if spec is None or not bundle.manifest.tensors:
        raise BundleError(f"{bundle.path} has no tensor table, so its attention cannot be computed.")
    weights = {t.name: bundle.tensor(t.name) for t in bundle.manifest.tensors}
    probe = _Probe(spec, weights.__getitem__, max(map(len, texts)), key_centres(bundle))
    for text in texts:
        tokens = np.array(text, np.int64)
        x, vectors = probe.entered(tokens, weights["embed"][tokens])
        run = DecoderRun(WholeTexts(spec, [len(tokens)]), vectors=vectors)
        for layer in range(spec.num_layers):
            x = probe.layer(layer, x, run)
    shares = {kv: np.sqrt(squares / probe.squares) for kv, squares in probe.differences.items()}
    return [AttentionError(kv, tuple(map(float, share))) for kv, share in shares.items()]


class _Probe(Decoder):
    """Attends once for every type of cache, and goes on with what the float32 rows gave."""

    def __init__(self, spec: DecoderSpec, tensor: Tensors, longest: int, centres: Mapping[int, Floats]) -> None:
        super().__init__(spec, tensor, longest)
        self._codecs = [codec for codec in ROW_CODECS.values() if codec.name != FLOAT32]
        self._centres = centres
        self.squares = np.zeros(spec.num_layers)
        self.differences = {codec.name: np.zeros(spec.num_layers) for codec in self._codecs}

    def mix(
        self, layer: int, queries: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]
    ) -> Floats:  # (H, g, S, h)
        exact = super().mix(layer, queries, keys, values, visible)
        self.squares[layer] += float(np.square(exact).sum())
        centre = self._centres.get(layer, np.float32(0))
        for codec in self._codecs:
            # What all keys lack changes no softmax.
            lacking = keys - centre if codec.turned else keys
            kept_keys, kept_values = (codec.decode(codec.encode(rows), rows.shape[-1]) for rows in (lacking, values))
            mixed = super().mix(layer, queries, kept_keys, kept_values, visible)
            self.differences[codec.name][layer] += float(np.square(mixed - exact).sum())
        return exact
