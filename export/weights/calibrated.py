"""Writes the weights of a model while it runs over texts: each matrix is quantized for its own inputs.

Layer by layer, so that memory holds one of them and the hidden states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.weights.folding import fold_head, fold_layer
from edgeinfer.export.weights.planning import WeightPlan
from edgeinfer.export.weights.writer import quantized_rows, stored_rows, write_floats, write_quantized
from edgeinfer.quant.blocks import dequantized
from edgeinfer.quant.calibration import Calibration, CalibrationOptions, calibrate, default_streams
from edgeinfer.quant.methods import METHODS, quantize
from edgeinfer.quant.plan import QuantPlan
from edgeinfer.quant.statistics import InputStatistics
from edgeinfer.results import Progress

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
    """Writes all tensors as planned; errors as `write_plain` and `write_calibrated`."""
    if plan.text is not None and plan.is_calibrated:
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
    """Writes all tensors without looking at their inputs, a few MB at a time."""
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
    """Writes all tensors; matrices are quantized by the plan's method on their inputs for the calibration texts."""
    written = _Writer(file, tensors, entries, plan, progress)
    method = METHODS[plan.method]
    # Also the search of scales that are folded looks at outputs, not only at the size of each input.
    hessian = method.needs == "hessian" or method.folds
    streams = default_streams(written.total) if method.needs == "hessian" else "quantized"
    options = CalibrationOptions(streams, hessian=hessian, preview=method.folds)
    found = calibrate(spec, tensors, texts, _Visitor(spec, written), options)
    if found.unused:
        names = ", ".join(found.unused[:5]) + (f" and {len(found.unused) - 5} more" if len(found.unused) > 5 else "")
        _log.warning("No token of the calibration text reached %s, which is quantized without it.", names)
    if spec.tied:
        # Fitted to what enters the head, a shared matrix is a worse embedding: a 15M model loses 0.0012 nats by one of
        # four bits, and 0.0004 by one that is only rounded to nearest (docs/log).
        written.write_rest({})
    else:
        written.write_rest({"head": fold_head(tensors, plan, found.head) if method.folds else found.head})
    return found


class _Writer:
    """Writes tensors to their places and counts what is done, in weights."""

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
        """Writes a tensor in runs of rows."""
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
        """The same rows, with progress at each run of them: an embedding may be most of a model."""
        progress = self._progress
        if progress is None:
            return rows
        width, size, written = math.prod(entry.shape[1:]), math.prod(entry.shape), 0

        def told(start: int, stop: int) -> _RowsT:
            nonlocal written
            progress(entry.name, self._done + min(written, size), self.total)
            written += (stop - start) * width
            return rows(start, stop)

        return told

    def write_whole(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        """Writes a matrix that is in memory; returns what was written, as floats."""
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
        """Writes the tensors that are left."""
        for name in tuple(self._left):
            self.write(name, statistics.get(name))

    def _count(self, name: str) -> None:
        self._done += math.prod(self._left.pop(name).shape)
        if self._progress is not None:
            self._progress(name, self._done, self.total)


class _Visitor:
    """Quantizes and writes the matrices that calibration visits; see `quant.calibration.Visitor`."""

    def __init__(self, spec: DecoderSpec, writer: _Writer) -> None:
        self._spec, self._writer = spec, writer

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        """See `Visitor.layer`."""
        fold_layer(self._spec, self._writer.tensors, self._writer.plan, layer, statistics)

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """See `Visitor.embedding`; the same as is written."""
        plan = self._writer.plan
        scheme = plan.scheme("embed")
        if scheme is None:
            return rows
        return dequantized(quantize(rows, scheme, method=plan.method), scheme, rows.shape[1])

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        """See `Visitor.matrix`."""
        return self._writer.write_whole(name, weight, statistics)
