"""Streams checkpoint tensors into `weights.bin`, quantized or not, each to its place; knows nothing of graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import TensorEntry
from edgeinfer.bundle.codecs import CODECS
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape
from edgeinfer.bundle.tables import Outline
from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures import Source, TensorPlan
from edgeinfer.export.checkpoint import Checkpoint
from edgeinfer.export.head_padding import pad_values
from edgeinfer.quant import QuantPolicy, QuantScheme, quantize

__all__ = ["outline", "write_tensors"]

# Values of a float32 tensor held at a time, 32 MB: exporting needs little memory whatever the tensor's size.
_SLAB_VALUES = 1 << 23
_PAIRED = ".mlp.gate_up"


def outline(plan: TensorPlan, policy: QuantPolicy) -> Outline:
    """What a planned tensor becomes in the bundle."""
    scheme = policy.scheme(plan.name, plan.shape)
    if scheme is None:
        # Linear layers are stored as MatMul takes them; vocabulary matrices by rows, which the embedding gathers.
        return Outline(plan.name, plan.shape, transposed=len(plan.shape) == 2 and not plan.is_vocabulary)
    n, k = plan.shape
    paired = plan.name.endswith(_PAIRED)
    shape = QuantizedShape(n, k, scheme.bits, scheme.block_size, not scheme.symmetric, paired)
    return Outline(plan.name, plan.shape, shape)


def write_tensors(
    file: BinaryIO, checkpoint: Checkpoint, plans: Sequence[TensorPlan], tensors: Sequence[TensorEntry]
) -> Iterator[TensorEntry]:
    """Writes every planned tensor to the place its entry says and yields the entry as soon as its bytes are down.

    Raises:
        CheckpointError: a file of the checkpoint ended early, or a tensor holds a value that is not finite.
    """
    for plan, entry in zip(plans, tensors, strict=True):
        rows = _PlannedRows(checkpoint, plan)
        if entry.bits < 32:
            CODECS[entry.layout].write(file, entry, _Quantizer(rows, entry))
        else:
            _write_float(file, rows, entry)
        yield entry


class _PlannedRows:
    """Rows of a planned tensor, read from the checkpoint as they are asked for."""

    def __init__(self, checkpoint: Checkpoint, plan: TensorPlan) -> None:
        self._checkpoint = checkpoint
        self._sources = plan.sources
        self._padded: tuple[Source, NDArray[np.float32]] | None = None

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1."""
        parts, offset = [], 0
        for source in self._sources:
            count = source.padded_shape[0]
            first, last = max(start - offset, 0), min(stop - offset, count)
            if first < last:
                parts.append(self._read(source, first, last))
            offset += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, source: Source, start: int, stop: int) -> NDArray[np.float32]:
        if source.padding is None:
            return self._finite(source.name, start, stop)
        if self._padded is None or self._padded[0] is not source:
            self._padded = source, pad_values(self._finite(source.name, 0, source.shape[0]), source.padding)
        return self._padded[1][start:stop]

    def _finite(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        values = self._checkpoint.read(name, start, stop)
        if not np.isfinite(values).all():
            hint = "The checkpoint is damaged or its training diverged."
            raise CheckpointError(f"Tensor {name!r} holds values that are not finite.", hint)
        return values


class _Quantizer:
    """Quantized rows of a planned tensor, as a codec asks for them."""

    def __init__(self, rows: _PlannedRows, entry: TensorEntry) -> None:
        self._rows = rows
        self._scheme = QuantScheme(entry.bits, entry.block_size, symmetric=entry.zero_points is None)

    def __call__(self, start: int, stop: int) -> QuantizedMatrix:
        """Rows start..stop-1."""
        return quantize(self._rows(start, stop), self._scheme)


def _write_float(file: BinaryIO, rows: _PlannedRows, entry: TensorEntry) -> None:
    count, width = entry.shape[0], math.prod(entry.shape[1:])
    step = max(1, _SLAB_VALUES // width)
    runs = ((start, min(start + step, count)) for start in range(0, count, step))
    file.seek(entry.data.offset)
    if entry.transposed:
        whole = np.empty(entry.data.shape, np.float32)
        for start, stop in runs:
            whole[:, start:stop] = rows(start, stop).T
        file.write(whole.data)
        return
    for start, stop in runs:
        file.write(np.ascontiguousarray(rows(start, stop)).data)
