"""What all cached keys of a layer have in common because of their bias, which caches of few bits store them without.

Some models (Qwen 2, 2.5) add hundreds to channels of keys that otherwise differ by a few. Levels of 8 or 4 bits would
be spent on that. Rotation moves a bias with the position, but those are channels that turn by less than a radian in
tens of thousands of positions. What is the same in all keys adds the same to all scores of a query, which no softmax
sees: so it is taken off before a key is stored, as it is at position 0.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle.geometry import Floats
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.nn.arithmetic import inverse_frequencies, rope_tables

# Radians per position up to which a pair hardly turns: 0.4 in 8,192 positions.
_STILL = 5e-5


def still_pair(spec: DecoderSpec, layer: int) -> int | None:
    """The first rotated pair of a layer's keys that hardly turns, all of them if none does; None where keys have no
    bias, or it is not the same for all."""
    heads = spec.heads(layer)
    plain = spec.qkv_bias and heads.owns and not (heads.keys_are_values or spec.qk_norm or spec.latent is not None)
    if not plain or spec.parts_of(layer) != ("attention",) or spec.sinks or spec.attention_softcap:
        return None
    rope = spec.rope_of(layer)
    if rope is None:
        return 0
    if rope.type in ("dynamic", "longrope"):  # which turn faster in shorter texts
        return rope.dim // 2
    fast = np.flatnonzero(np.abs(inverse_frequencies(rope, rope.original_max_positions)) > _STILL)
    return int(fast[-1]) + 1 if fast.size else 0


def key_centres(bundle: Bundle) -> dict[int, Floats]:  # (H, 1, h) each
    """What is taken off the keys of each layer that has it, as the attention kernel computes it."""
    spec = bundle.manifest.decoder
    found: dict[int, Floats] = {}
    for layer in range(spec.num_layers if spec is not None else 0):
        assert spec is not None, "there are layers"
        still, heads, rope = still_pair(spec, layer), spec.heads(layer), spec.rope_of(layer)
        if still is None:
            continue
        bias = bundle.tensor(f"layers.{layer}.attn.qkv_bias")[heads.q_size :][: heads.kv_size]
        factors = np.ones(heads.size, np.float32)
        if rope is not None:
            (cosines,), _ = rope_tables(rope, 1, rope.original_max_positions)  # (r/2,)
            cosines[:still] = 0
            step, half = (2, 1) if rope.interleaved else (1, rope.dim // 2)
            for first in (0, half):
                factors[first : first + (len(cosines) - 1) * step + 1 : step] = cosines
        found[layer] = bias.reshape(heads.kv_heads, 1, heads.size) * factors
    return found
