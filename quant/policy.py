"""Which scheme each tensor of a model gets; knows nothing of how a scheme is carried out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeinfer.quant.scheme import QuantScheme

__all__ = ["FLOAT_BITS", "QuantPolicy", "default_group_size", "default_head_bits", "effective_block"]

FLOAT_BITS = 32
# A linear layer up to this size (256 KB of float32) costs nothing to keep wider, and only tiny models have them, which
# lose most by quantization: at 4 bits throughout, models of 0.26M and 1.3M weights gain 8% and 18% of perplexity.
_SMALL_WEIGHTS = 1 << 16
_WIDER = {2: 8, 4: 8, 8: FLOAT_BITS}
# Above this size (16 MB at 8 bits) embedding and head would take much of a small device's memory at 8 bits.
_LARGE_VOCABULARY = 1 << 24
_LARGE_MODEL = 1 << 26
# Zero points lower the error of 8 bits by a few percent and cost a third of the speed, which counts above this size.
_LARGE_WEIGHTS = 1 << 20


def effective_block(k: int, requested: int) -> int:
    """The largest block up to `requested` that divides K; 32 with a padded end where none does.

    Sixteen is never chosen: ONNX Runtime's int8 kernels for all widths start at 32, so padding is faster.
    """
    return next((b for b in (128, 64, 32) if b <= requested and k % b == 0), 32)


def default_group_size(weights: int) -> int:
    """Values that share a scale where nothing is asked for: 32 for models of up to 64 Mi weights, 128 above.

    A scale costs 32 bits in the file and, packed, 64 in memory. At the 0.5B shape groups of 32 take 125 MB more than
    groups of 128 and a fifth of the speed; small models have little to lose but their accuracy (docs/LOG.md).
    """
    return 32 if weights <= _LARGE_MODEL else 128


def default_head_bits(bits: int, vocabulary_weights: int) -> int:
    """Bits of embedding and head where none are asked for.

    At 8 and 32 bits the same as the linear layers; below, 8 for vocabularies of up to 16 Mi weights, else 4.
    """
    if bits >= 8:
        return bits
    return 8 if vocabulary_weights <= _LARGE_VOCABULARY else 4


@dataclass(frozen=True)
class QuantPolicy:
    """Bits of the linear layers and of the two vocabulary matrices; vectors always stay float32.

    Attributes:
        bits: of linear layers; 32 keeps float32.
        head_bits: of embedding and LM head.
        block_size: largest block.
        symmetric: no stored zero points. Large 8-bit matrices never have any.
        keep_small: linear layers of at most 65536 weights stay wider: 8 bits instead of 2 or 4, float32 instead of 8.
    """

    bits: int
    head_bits: int
    block_size: int
    symmetric: bool = False
    keep_small: bool = True

    def scheme(self, name: str, shape: tuple[int, ...]) -> QuantScheme | None:
        """The scheme of a tensor by its canonical name; None keeps it float32."""
        if len(shape) != 2:
            return None
        weights, vocabulary = math.prod(shape), name in ("embed", "head")
        bits = self.head_bits if vocabulary else self.bits
        if self.keep_small and not vocabulary and weights <= _SMALL_WEIGHTS:
            bits = _WIDER.get(bits, bits)
        if bits == FLOAT_BITS:
            return None
        symmetric = self.symmetric or (bits == 8 and weights > _LARGE_WEIGHTS)
        return QuantScheme(bits, effective_block(shape[1], self.block_size), symmetric)
