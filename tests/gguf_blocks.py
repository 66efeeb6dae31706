"""Random rows of every GGUF type, as a file has them, and what they stand for by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from edgeinfer.bundle.kinds import KINDS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# Where the float16 numbers of a block lie.
HALVES = {
    **dict.fromkeys(("F16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "MXFP4": (),
        "NVFP4": (),
        "BF16": (),
    },
}
# Of a scale of MXFP4 with which every code is finite.
_LARGEST_EXPONENT = 252


def random_rows(rng: np.random.Generator, kind: str, n: int, k: int, *, tame: bool = False) -> Bytes:
    """Rows (N, bytes of a row) of any bytes that a quantizer can write.

    Args:
        tame: scales are about as large as a model's, and whatever is added up stays finite.
    """
    of = KINDS[kind]
    blocks = rng.integers(0, 256, (n, k // of.values, of.nbytes), np.uint8)
    for at in HALVES[kind]:
        if tame:
            halves = (rng.random(blocks.shape[:2], np.float32) * np.float32(0.02) + np.float32(0.001)).astype("<f2")
            blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
        else:
            blocks[..., at + 1][(blocks[..., at + 1] & 0x7C) == 0x7C] ^= 0x40
    if kind == "BF16":
        blocks[..., 1] = blocks[..., 1] & 0x80 | (0x3C if tame else blocks[..., 1] & 0x3F)
    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 118 if tame else np.minimum(blocks[..., 0], _LARGEST_EXPONENT)
    if kind == "NVFP4" and tame:
        blocks[..., :4] %= 48
    if kind == "TQ1_0":
        numbers = np.concatenate(
            [rng.integers(0, 243, (*blocks.shape[:2], 48)), rng.integers(0, 81, (*blocks.shape[:2], 4)) * 3], -1
        )
        blocks[..., :52] = (numbers * 256 + 242) // 243
    return blocks.reshape(n, -1)


def values_of(kind: str, rows: Bytes) -> Floats:  # (N, bytes of a row) -> (N, K)
    """What rows stand for."""
    if kind not in ("Q1_0", "Q2_0"):
        values: Floats = quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        return values
    blocks = rows.reshape(-1, KINDS[kind].nbytes)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == "Q1_0":
        codes = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    else:
        codes = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(blocks), -1) - np.float32(1)
    return (codes * scale).reshape(len(rows), -1)
