"""Rotary tables of a context, cosine and sine per position, and rotating by them; knows nothing of who does.

Formulas and float32 order of operations follow `modeling_rope_utils.py` of transformers 5.23, as trained models expect.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import RopeSpec

__all__ = ["inverse_frequencies", "rope_tables", "rotate"]

Floats = NDArray[np.float32]


def inverse_frequencies(spec: RopeSpec, context: int) -> Floats:  # (dim / 2,)
    """Radians per position of each rotated pair.

    Args:
        context: tokens the cache may hold; LongRoPE takes its long factors above the original maximum. The choice is
            made once per load, so that keys already in the cache never change their meaning.
    """
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    plain: Floats = (1.0 / np.power(np.float32(spec.theta), exponents)).astype(np.float32)
    if spec.type == "linear":
        return np.divide(plain, np.float32(spec.factor))
    if spec.type == "llama3":
        return _llama3(spec, plain)
    if spec.type == "longrope":
        factors = spec.long_factors if context > spec.original_max_positions else spec.short_factors
        return np.divide(plain, np.asarray(factors, np.float32))
    return plain


def _llama3(spec: RopeSpec, plain: Floats) -> Floats:  # (dim / 2,)
    wavelengths = 2 * np.pi / plain
    low = spec.original_max_positions / spec.low_freq_factor
    high = spec.original_max_positions / spec.high_freq_factor
    smooth = spec.original_max_positions / wavelengths - spec.low_freq_factor
    smooth = smooth / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * plain / spec.factor + smooth * plain
    scaled = np.where(wavelengths > low, plain / spec.factor, plain)
    medium = (wavelengths <= low) & (wavelengths >= high)
    return np.where(medium, blended, scaled).astype(np.float32)


def rope_tables(spec: RopeSpec, rows: int, context: int) -> tuple[Floats, Floats]:  # 2 x (rows, dim / 2)
    """Cosine and sine for positions 0 .. rows - 1 of a cache planned for `context` tokens."""
    angles = np.arange(rows, dtype=np.float32)[:, None] * inverse_frequencies(spec, context)
    scale = np.float32(spec.attention_factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:  # (S, H, h), (S, r/2), (S, r/2) -> (S, H, h)
    """Rotates the first r dimensions of every head, halves paired (rotate-half)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)
