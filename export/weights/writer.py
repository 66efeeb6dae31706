"""Writes tensors into `weights.bin`, quantized or not, each at its offset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import CODECS, Rows, take_turns
from edgeinfer.bundle.experts import find_expert, widen
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape
from edgeinfer.bundle.tables import Outline
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.quant.blocks import Grid, packed
from edgeinfer.quant.methods import method_for
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import InputStatistics

# Values of a float32 tensor in memory at a time, 32 MB: exporting needs little memory whatever the tensor's size.
_SLAB_VALUES = 1 << 23
_PAIRED = ".gate_up"
# Bits and blocks whose passes are faster with inline scales: docs/log/2026-11-25.md, "scales among the weights".
_INLINE = ((4, 32), (4, 64))

# Gives rows start..stop-1 of a float32 tensor.
FloatRows = Callable[[int, int], NDArray[np.float32]]


def outline(plan: TensorPlan, scheme: QuantScheme | None) -> Outline:
    """What a planned tensor becomes in the bundle."""
    if scheme is None:
        # Linear layers are stored as MatMul takes them; vocabulary matrices by rows, which the embedding gathers.
        return Outline(plan.name, plan.shape, transposed=len(plan.shape) == 2 and not plan.is_vocabulary)
    return Outline(plan.name, plan.shape, _shape(plan.name, plan.shape, scheme))


def _shape(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> QuantizedShape:
    n, k = shape
    zeros, paired = not scheme.symmetric, name.endswith(_PAIRED)
    # The directory that the operator of experts reads has a place for scales of their own.
    inline = (scheme.bits, scheme.block_size) in _INLINE and not scheme.e2m1 and find_expert(name) is None
    return QuantizedShape(n, k, scheme.bits, scheme.block_size, zeros, paired, scheme.e2m1, inline, scheme.vectors)


def quantized_rows(
    rows: FloatRows, k: int, scheme: QuantScheme, method: str = "rtn", statistics: InputStatistics | None = None
) -> Rows:
    """Rows of a matrix of K columns, quantized as they are asked for."""
    solver = method_for(method, statistics).set_up(Grid.of(scheme), k, statistics)
    return lambda start, stop: packed(solver, rows(start, stop), scheme)


def stored_rows(matrix: QuantizedMatrix) -> Rows:
    """Rows of a matrix that is quantized already."""

    def rows(start: int, stop: int) -> QuantizedMatrix:
        zeros = None if matrix.zero_points is None else matrix.zero_points[start:stop]
        return QuantizedMatrix(matrix.data[start:stop], matrix.scales[start:stop], zeros)

    return rows


def write_quantized(file: BinaryIO, entry: TensorEntry, rows: Rows, scheme: QuantScheme) -> None:
    """Writes a quantized matrix to its place, which may be wider than the scheme: experts share one format."""
    source = _shape(entry.name, entry.shape, scheme)
    CODECS[entry.layout].write(file, entry, lambda start, stop: widen(rows(start, stop), source, entry.quantized))


def write_floats(file: BinaryIO, entry: TensorEntry, rows: FloatRows) -> None:
    """Writes a float32 tensor to its place."""
    count, width = entry.shape[0], math.prod(entry.shape[1:])
    step = max(1, _SLAB_VALUES // width)
    file.seek(entry.data.offset)
    if entry.transposed:
        whole = np.empty(entry.data.shape, np.float32)
        for start, stop in _runs(count, step):
            whole[:, start:stop] = rows(start, stop).T
        file.write(whole.data)
        return
    if entry.interleaved:
        half = count // 2
        for start, stop in _runs(half, max(1, step // 2)):
            file.write(take_turns(rows(start, stop), rows(half + start, half + stop)).data)
        return
    for start, stop in _runs(count, step):
        file.write(np.ascontiguousarray(rows(start, stop)).data)


def _runs(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, count)) for start in range(0, count, step))
