"""MXFP4 blocks of a checkpoint as GGUF files have them, without a loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import QuantizedMatrix
from edgeinfer.quant.policy import QuantScheme

MXFP4_BITS = 4
MXFP4_SCHEME = QuantScheme(MXFP4_BITS, 32, symmetric=True, e2m1=True)
# Of an exponent that a byte holds, E8M0.
_BIAS = 127


def mxfp4_blocks(rows: QuantizedMatrix) -> NDArray[np.uint8]:  # (N, blocks * 17)
    """Rows of ggml's `block_mxfp4` (ggml-common.h): the scale's exponent, then values 0 to 15 in lower halves of bytes
    and 16 to 31 in upper ones, where checkpoints have neighbours in a byte."""
    codes = np.stack([rows.data & 15, rows.data >> 4], axis=-1)  # (N, blocks, 16, 2)
    codes = codes.reshape(*codes.shape[:2], 2, 16)
    halves = codes[:, :, 0] | codes[:, :, 1] << 4
    # Ours are half of the checkpoint's scales, and frexp's mantissa is one half.
    exponents = (np.frexp(rows.scales)[1] + _BIAS).astype(np.uint8)  # (N, blocks)
    return np.concatenate([exponents[:, :, None], halves], axis=2).reshape(len(exponents), -1)
