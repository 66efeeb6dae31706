"""How one matrix is quantized: bits, block and whether zero points are free; knows nothing of which matrix."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.bundle.packing import BITS, BLOCK_SIZES
from edgeinfer.errors import UsageError

__all__ = ["QuantScheme"]


@dataclass(frozen=True)
class QuantScheme:
    """Block-wise integer quantization along the input dimension.

    Attributes:
        bits: 2, 4 or 8 per value.
        block_size: values that share a scale: 32, 64 or 128.
        symmetric: the zero point is the middle of the range and is not stored.
    """

    bits: int
    block_size: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UsageError(f"Cannot quantize to {self.bits} bits.", f"Choose one of {', '.join(map(str, BITS))}.")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"A block of {self.block_size} values is not supported.", f"Choose one of {sizes}.")
