"""Widens attention heads to a width that GroupQueryAttention takes, without changing what they compute.

The kernel wants heads of a multiple of eight. Rows of zeros after each query, key and value head, and matching columns
of the output projection, add nothing to any product; only the kernel's scale, one over the root of the width, changes,
and the queries are multiplied by the inverse of that. The result is an ordinary decoder whose heads are wider and
partly rotated.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import HeadPadding, TensorPlan
from edgeinfer.export.hf_config import OPTIMUM_HINT

__all__ = ["pad_heads", "pad_values"]

_MULTIPLE = 8


def pad_heads(spec: DecoderSpec, plans: tuple[TensorPlan, ...]) -> tuple[DecoderSpec, tuple[TensorPlan, ...]]:
    """The same decoder with heads the kernel takes, and plans that pad the tensors concerned.

    Raises:
        UnsupportedArchitectureError: heads cannot be padded, because they are normalised or packed in the checkpoint.
    """
    wide = -(-spec.head_dim // _MULTIPLE) * _MULTIPLE
    if wide == spec.head_dim:
        return spec, plans
    packed = any(p.name.endswith("attn.qkv") and len(p.sources) == 1 for p in plans)
    if spec.qk_norm or packed:
        message = f"Heads of width {spec.head_dim}, not a multiple of {_MULTIPLE}, cannot be built for this model."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    return dataclasses.replace(spec, head_dim=wide), tuple(_pad_plan(plan, spec, wide) for plan in plans)


def _pad_plan(plan: TensorPlan, spec: DecoderSpec, wide: int) -> TensorPlan:
    if plan.name.endswith(("attn.qkv", "attn.qkv_bias")):
        query = HeadPadding(0, spec.num_heads, spec.head_dim, wide, math.sqrt(wide / spec.head_dim))
        others = HeadPadding(0, spec.num_kv_heads, spec.head_dim, wide)
        paddings = [query, others, others]
    elif plan.name.endswith("attn.out"):
        paddings = [HeadPadding(1, spec.num_heads, spec.head_dim, wide)]
    else:
        return plan
    sources = (dataclasses.replace(s, padding=p) for s, p in zip(plan.sources, paddings, strict=True))
    return TensorPlan(plan.name, tuple(sources))


def pad_values(values: NDArray[np.float32], padding: HeadPadding) -> NDArray[np.float32]:
    """Pads a whole checkpoint tensor as its source says."""
    before, after = values.shape[: padding.axis], values.shape[padding.axis + 1 :]
    wide = np.zeros((*before, padding.heads, padding.wide, *after), np.float32)
    narrow = values.reshape(*before, padding.heads, padding.width, *after)
    inner = (slice(None),) * (padding.axis + 1) + (slice(padding.width),)
    np.multiply(narrow, np.float32(padding.scale), out=wide[inner])
    return wide.reshape(*before, padding.heads * padding.wide, *after)
