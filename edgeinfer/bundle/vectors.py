"""Codes of vectors: a byte that stands for four weights, two bits each, by a codebook that all matrices share.

The low half of a code chooses one of 16 magnitudes for each of the four, its high half their signs, so that an
instruction set needs tables of 16 bytes only. Magnitudes are whole and at most 7: values are those of 4 bits, by which
layouts that know no vectors store them exactly. The four lie a quarter of a block apart, as the values of a byte of 2
bits do in the native layout, so that a code lies there where those would.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Weights of a code, and bits of each value that it stands for.
VECTOR, VALUE_BITS = 4, 4
_FIELD_BITS = 2
# The same as in runtime/native/values.h, found by k-means on Gaussian numbers (docs/log/2026-11-26.md, "codebooks").
MAGNITUDES = np.array(
    [
        *((1, 1, 1, 1), (1, 1, 4, 1), (4, 1, 1, 1), (1, 3, 1, 3)),
        *((2, 1, 2, 3), (2, 3, 2, 1), (2, 2, 2, 7), (2, 2, 7, 2)),
        *((2, 7, 2, 2), (7, 2, 2, 2), (2, 2, 5, 5), (2, 5, 5, 2)),
        *((5, 2, 2, 5), (5, 2, 5, 2), (5, 5, 2, 2), (2, 6, 3, 6)),
    ],
    np.int8,
)  # (16, 4)


def _all_values() -> Bytes:  # (256, 4)
    codes = np.arange(256)
    signs = 1 - 2 * (codes[:, None] >> np.arange(VECTOR, 2 * VECTOR) & 1)
    values: Bytes = ((1 << (VALUE_BITS - 1)) + signs * MAGNITUDES[codes & 15]).astype(np.uint8)
    return values


_VALUES = _all_values()


def split_codes(codes: Bytes) -> Bytes:  # (..., B / 4) -> (..., B)
    """The codes of blocks as values of 2 bits, which is how bundles carry them."""
    fields = codes[..., None, :] >> _shifts() & np.uint8(3)  # (..., 4, B / 4)
    return fields.reshape(*codes.shape[:-1], -1)


def join_codes(fields: Bytes) -> Bytes:  # (..., B) -> (..., B / 4)
    """Reverses `split_codes`."""
    parts = fields.reshape(*fields.shape[:-1], VECTOR, -1)
    codes: Bytes = np.bitwise_or.reduce(parts << _shifts(), axis=-2)
    return codes


def read_vectors(fields: Bytes) -> Bytes:  # (..., B) -> (..., B)
    """The values of 4 bits, with a zero of 8, that blocks of codes stand for."""
    values = _VALUES[join_codes(fields)]  # (..., B / 4, 4)
    return np.ascontiguousarray(values.swapaxes(-1, -2)).reshape(fields.shape)


def _shifts() -> Bytes:  # (4, 1)
    return np.arange(0, _FIELD_BITS * VECTOR, _FIELD_BITS, dtype=np.uint8)[:, None]
