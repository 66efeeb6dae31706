"""Which scheme each tensor of a model gets; knows nothing of how a scheme is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.quant.scheme import QuantScheme

__all__ = ["QuantPolicy", "effective_block"]

FLOAT_BITS = 32


def effective_block(k: int, requested: int) -> int:
    """The largest block up to `requested` that divides K; 32 with a padded end where none does.

    Sixteen is never chosen: ONNX Runtime's int8 kernels start at 32, so padding is faster.
    """
    return next((b for b in (128, 64, 32) if b <= requested and k % b == 0), 32)


@dataclass(frozen=True)
class QuantPolicy:
    """Bits of the linear layers and of the two vocabulary matrices; vectors always stay float32.

    Attributes:
        bits: of linear layers; 32 keeps float32.
        head_bits: of embedding and LM head.
        block_size: largest block.
        symmetric: no stored zero points. Eight bits are always symmetric: 255 levels lose nothing by it.
    """

    bits: int
    head_bits: int
    block_size: int
    symmetric: bool = False

    def scheme(self, name: str, shape: tuple[int, ...]) -> QuantScheme | None:
        """The scheme of a tensor by its canonical name; None keeps it float32."""
        if len(shape) != 2:
            return None
        bits = self.head_bits if name in ("embed", "head") else self.bits
        if bits == FLOAT_BITS:
            return None
        return QuantScheme(bits, effective_block(shape[1], self.block_size), self.symmetric or bits == 8)
