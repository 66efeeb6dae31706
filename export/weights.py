"""Streams checkpoint tensors into `weights.bin`, quantized or not; knows nothing of graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Blob, TensorEntry
from edgeinfer.bundle.packing import blocks_per_row, packed_bytes
from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures import TensorPlan
from edgeinfer.export.checkpoint import Checkpoint
from edgeinfer.export.head_padding import pad_values
from edgeinfer.quant import QuantPolicy, QuantScheme, quantize

__all__ = ["write_tensors"]

# Values of a tensor held as float32 at a time, 32 MB: exporting needs little memory whatever the tensor's size.
_SLAB_VALUES = 1 << 23
# A blob that fills pages starts on one, so that mapping it touches no neighbour; small ones align to a cache line.
_PAGE_BYTES = 4096
_LINE_BYTES = 64


class WeightFile:
    """Appends aligned arrays to an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0

    def begin(self, dtype: Any, shape: tuple[int, ...]) -> Blob:
        """Reserves the next aligned run of bytes; its contents follow by `append`."""
        blob = Blob(self._end, dtype, shape)
        alignment = _PAGE_BYTES if blob.nbytes >= _PAGE_BYTES else _LINE_BYTES
        padding = -self._end % alignment
        self._file.write(bytes(padding))
        self._end += padding + blob.nbytes
        return Blob(self._end - blob.nbytes, dtype, shape)

    def append(self, values: NDArray[Any]) -> None:
        """Writes the next piece of the run begun last."""
        self._file.write(np.ascontiguousarray(values).data)

    def write(self, values: NDArray[Any]) -> Blob:
        """Writes a whole array."""
        blob = self.begin(values.dtype.name, values.shape)
        self.append(values)
        return blob


def write_tensors(
    file: BinaryIO, checkpoint: Checkpoint, plans: tuple[TensorPlan, ...], policy: QuantPolicy
) -> Iterator[TensorEntry]:
    """Writes every planned tensor and yields its entry as soon as its bytes are down.

    Raises:
        CheckpointError: a file of the checkpoint ended early, or a tensor holds a value that is not finite.
    """
    weights = WeightFile(file)
    for plan in plans:
        scheme = policy.scheme(plan.name, plan.shape)
        if scheme is not None:
            yield _write_quantized(weights, checkpoint, plan, scheme)
        else:
            yield _write_float(weights, checkpoint, plan)


def _slabs(checkpoint: Checkpoint, plan: TensorPlan) -> Iterator[NDArray[np.float32]]:
    """Runs of rows of the planned tensor, in order."""
    for source in plan.sources:
        if source.padding is not None:
            yield pad_values(_read(checkpoint, source.name, 0, source.shape[0]), source.padding)
            continue
        step = max(1, _SLAB_VALUES // math.prod(source.shape[1:]))
        for start in range(0, source.shape[0], step):
            yield _read(checkpoint, source.name, start, min(start + step, source.shape[0]))


def _read(checkpoint: Checkpoint, name: str, start: int, stop: int) -> NDArray[np.float32]:
    values = checkpoint.read(name, start, stop)
    if not np.isfinite(values).all():
        hint = "The checkpoint is damaged or its training diverged."
        raise CheckpointError(f"Tensor {name!r} holds values that are not finite.", hint)
    return values


def _write_float(weights: WeightFile, checkpoint: Checkpoint, plan: TensorPlan) -> TensorEntry:
    # Linear layers are stored as MatMul takes them; vocabulary matrices by rows, which the embedding gathers.
    transposed = len(plan.shape) == 2 and not plan.is_vocabulary
    if transposed:
        whole = np.empty(plan.shape[::-1], np.float32)
        row = 0
        for slab in _slabs(checkpoint, plan):
            whole[:, row : row + len(slab)] = slab.T
            row += len(slab)
        return TensorEntry(plan.name, plan.shape, 32, weights.write(whole), transposed=True)
    blob = weights.begin("float32", plan.shape)
    for slab in _slabs(checkpoint, plan):
        weights.append(slab)
    return TensorEntry(plan.name, plan.shape, 32, blob)


def _write_quantized(weights: WeightFile, checkpoint: Checkpoint, plan: TensorPlan, scheme: QuantScheme) -> TensorEntry:
    n, k = plan.shape
    shape = (n, blocks_per_row(k, scheme.block_size), packed_bytes(scheme.block_size, scheme.bits))
    blob = weights.begin("uint8", shape)
    scales, zeros = [], []
    for slab in _slabs(checkpoint, plan):
        matrix = quantize(slab, scheme)
        weights.append(matrix.data)
        scales.append(matrix.scales)
        if matrix.zero_points is not None:
            zeros.append(matrix.zero_points)
    return TensorEntry(
        plan.name,
        plan.shape,
        scheme.bits,
        blob,
        scheme.block_size,
        weights.write(np.concatenate(scales)),
        weights.write(np.concatenate(zeros)) if zeros else None,
    )
