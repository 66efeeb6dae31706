"""Writes the weights of a model while it runs over texts: each matrix is quantized for its own inputs, layer by layer,
so that memory holds one layer and the hidden states."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.weights.planning import WeightPlan, quantized_rows, stored_rows, write_floats, write_quantized
from edgeinfer.quant.blocks import dequantized
from edgeinfer.quant.calibration import Calibration, CalibrationOptions, calibrate, default_streams
from edgeinfer.quant.methods import METHODS, quantize
from edgeinfer.quant.policy import QuantPlan
from edgeinfer.quant.statistics import InputStatistics

Floats = NDArray[np.float32]
_RowsT = TypeVar("_RowsT")

_log = logging.getLogger("edgeinfer")


def write_weights(
    file: BinaryIO,
    spec: DecoderSpec,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: WeightPlan,
    progress: Progress | None = None,
) -> None:
    """Writes all tensors as planned."""
    if plan.text is not None and any(plan.quant.schemes.values()):
        write_calibrated(file, spec, tensors, entries, plan.quant, plan.text.texts, progress)
    else:
        write_plain(file, tensors, entries, plan.quant, progress)


def write_plain(
    file: BinaryIO,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: QuantPlan,
    progress: Progress | None = None,
) -> None:
    """Writes all tensors without calibration, a few MB at a time."""
    written = _Writer(file, tensors, entries, plan, progress)
    for entry in entries:
        written.write(entry.name)


def write_calibrated(
    file: BinaryIO,
    spec: DecoderSpec,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: QuantPlan,
    texts: Sequence[NDArray[np.int64]],
    progress: Progress | None = None,
) -> Calibration:
    """Writes all tensors; matrices are quantized for their inputs on the calibration texts."""
    written = _Writer(file, tensors, entries, plan, progress)
    hessian = METHODS[plan.method].needs == "hessian"
    options = CalibrationOptions(default_streams(written.total) if hessian else "quantized", hessian=hessian)
    found = calibrate(spec, tensors, texts, _Visitor(written), options)
    if found.unused:
        names = ", ".join(found.unused[:5]) + (f" and {len(found.unused) - 5} more" if len(found.unused) > 5 else "")
        _log.warning("No token of the calibration text reached %s, which is quantized without it.", names)
    if spec.tied:
        written.write_rest({"embed": found.head.shared_with_lookups()})
    else:
        written.write_rest({"head": found.head})
    return found


class _Writer:
    """Writes tensors to their places and reports progress in weights."""

    def __init__(
        self,
        file: BinaryIO,
        tensors: PlannedTensors,
        entries: Iterable[TensorEntry],
        plan: QuantPlan,
        progress: Progress | None,
    ) -> None:
        self.tensors, self.plan = tensors, plan
        self._file, self._progress = file, progress
        self._left = {entry.name: entry for entry in entries}
        self.total = sum(math.prod(entry.shape) for entry in self._left.values())
        self._done = 0

    def write(self, name: str, statistics: InputStatistics | None = None) -> None:
        entry, scheme, rows = self._left[name], self.plan.scheme(name), self.tensors.of(name)
        if scheme is None:
            write_floats(self._file, entry, self._telling(entry, rows))
        elif name in self.plan.kept:
            write_quantized(self._file, entry, self._telling(entry, rows.kept(scheme)), scheme)
        else:
            quantized = quantized_rows(rows, entry.shape[1], scheme, self.plan.method, statistics)
            write_quantized(self._file, entry, self._telling(entry, quantized), scheme)
        self._count(name)

    def _telling(self, entry: TensorEntry, rows: Callable[[int, int], _RowsT]) -> Callable[[int, int], _RowsT]:
        """Rows that report progress at each run: an embedding may be most of a model."""
        progress = self._progress
        if progress is None:
            return rows
        width, size, written = math.prod(entry.shape[1:]), math.prod(entry.shape), 0

        def shown(start: int, stop: int) -> _RowsT:
            nonlocal written
            progress(entry.name, self._done + min(written, size), self.total)
            written += (stop - start) * width
            return rows(start, stop)

        return shown

    def write_whole(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        """Writes a matrix that is in memory; returns the written values as floats."""
        entry, scheme = self._left[name], self.plan.scheme(name)
        if scheme is None:
            write_floats(self._file, entry, lambda start, stop: weight[start:stop])
        else:
            n, k = weight.shape
            rows = quantized_rows(lambda start, stop: weight[start:stop], k, scheme, self.plan.method, statistics)
            matrix = rows(0, n)
            write_quantized(self._file, entry, stored_rows(matrix), scheme)
            weight = dequantized(matrix, scheme, k)
        self._count(name)
        return weight

    def write_rest(self, statistics: dict[str, InputStatistics]) -> None:
        for name in tuple(self._left):
            self.write(name, statistics.get(name))

    def _count(self, name: str) -> None:
        self._done += math.prod(self._left.pop(name).shape)
        if self._progress is not None:
            self._progress(name, self._done, self.total)


class _Visitor:
    """Quantizes and writes the matrices that calibration visits; see `quant.calibration.Visitor`."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """Returns the rows as they are written."""
        plan = self._writer.plan
        scheme = plan.scheme("embed")
        if scheme is None:
            return rows
        return dequantized(quantize(rows, scheme, method=plan.method), scheme, rows.shape[1])

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        return self._writer.write_whole(name, weight, statistics)
