"""Checkpoints' packed weights, read as floats: MXFP4, of 4 bits with a power of two for each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.export.source.checkpoint import Checkpoint

__all__ = ["MXFP4", "PACKINGS", "Packing", "mxfp4_tensors"]

MXFP4 = "mxfp4"
Floats = NDArray[np.float32]
Shape = tuple[int, ...]
# Name, shape and types of a checkpoint's tensor.
Stored = tuple[str, Shape, tuple[str, ...]]

# Source: OCP Microscaling Formats 1.0: E2M1 values by their codes, E8M0 scales with 255 for what is not a number.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK, _SCALE_BIAS, _NO_SCALE = 32, 127, 255
_DAMAGED = "The checkpoint is damaged: download it again."


class Packing(Protocol):
    """How a matrix is packed, or matrices that are stacked along a first axis."""

    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        """The checkpoint's tensors that one of this name and shape, unpacked, is stored as.

        Raises:
            CheckpointError: such a shape cannot be packed.
        """

    def rows(self, checkpoint: Checkpoint, name: str, start: int, stop: int, within: int | None) -> Floats:
        """Rows start..stop-1 of a matrix, of the one with the index `within` where some are stacked.

        Raises:
            CheckpointError: they are damaged.
        """


def mxfp4_tensors(name: str) -> tuple[str, str]:
    """Names of the blocks and scales of a packed tensor."""
    return f"{name}_blocks", f"{name}_scales"


class _Mxfp4:
    """Two values to a byte, the first in its lower half; transformers' Mxfp4Config."""

    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        """See `Packing.tensors`."""
        if shape[-1] % _BLOCK:
            message = (
                f"Tensor {name!r} is packed in blocks of {_BLOCK}, which rows of {shape[-1]} values are not made of."
            )
            raise CheckpointError(message, "Check that config.json belongs to these weights.")
        blocks = (*shape[:-1], shape[-1] // _BLOCK)
        packed, scales = mxfp4_tensors(name)
        yield packed, (*blocks, _BLOCK // 2), ("U8",)
        yield scales, blocks, ("U8",)

    def rows(self, checkpoint: Checkpoint, name: str, start: int, stop: int, within: int | None) -> Floats:
        """See `Packing.rows`."""
        packed, scales = (checkpoint.read_packed(n, start, stop, within=within) for n in mxfp4_tensors(name))
        if (scales == _NO_SCALE).any():
            raise CheckpointError(f"Tensor {name + '_scales'!r} has scales that are not numbers.", _DAMAGED)
        values = np.empty((*packed.shape[:-1], _BLOCK), np.float32)  # (rows, blocks, 32)
        values[..., 0::2] = _E2M1[packed & 15]
        values[..., 1::2] = _E2M1[packed >> 4]
        rows: Floats = np.ldexp(values, scales[..., None].astype(np.int32) - _SCALE_BIAS).reshape(stop - start, -1)
        return rows


PACKINGS: Mapping[str, Packing] = {MXFP4: _Mxfp4()}
