"""What the reference backend makes of weights: biases of single experts, matrices that are read by their high plane."""

from __future__ import annotations

import itertools

import numpy as np

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import dequantize, expert_biases, expert_tensor
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.arrays import Floats


def expert_bias_weights(spec: DecoderSpec, weights: dict[str, Floats]) -> dict[str, Floats]:
    """Of every expert that has some, by the names of its matrices."""
    found: dict[str, Floats] = {}
    for layer, part in itertools.product(range(spec.num_layers), ("gate_up", "up", "down")):
        joined = weights.get(expert_biases(layer, part))
        if joined is not None and spec.moe is not None:
            each = enumerate(np.split(joined, spec.moe.experts))
            found |= {f"{expert_tensor(layer, expert, part)}_bias": bias for expert, bias in each}
    return found


def two_plane_weights(bundle: Bundle) -> list[TensorEntry]:
    """Weights that have two planes to choose from."""
    return [t for t in bundle.manifest.tensors if t.bits == 8 and t.name.startswith("layers.")]


def high_plane(bundle: Bundle, entry: TensorEntry) -> Floats:  # (N, K)
    """An 8-bit matrix whose lower four bits are taken as their middle, 7.5."""
    n, k = entry.shape
    rows = bundle.rows(entry, 0, n)
    below, above = (
        dequantize(data, rows.scales, rows.zero_points, bits=8, block_size=entry.block_size, k=k)
        for data in ((rows.data & np.uint8(0xF0)) | low for low in (np.uint8(7), np.uint8(8)))
    )
    middle: Floats = (below + above) / np.float32(2)
    return middle
