"""The tensors of a bundle as float32, assembled from a checkpoint's as planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import Rows
from edgeinfer.bundle.packing import QuantizedMatrix
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.described import pad_values
from edgeinfer.export.architectures.tensors import Source, TensorPlan
from edgeinfer.export.source.checkpoint import TensorFile
from edgeinfer.export.source.packed import PACKINGS, PackedSource
from edgeinfer.quant.policy import QuantScheme

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Rows that are looked through at a time for those that are asked for.
_RUN_VALUES = 1 << 20


class PlannedRows:
    """Rows of a planned tensor, read from the checkpoint on demand."""

    def __init__(self, checkpoint: TensorFile, plan: TensorPlan) -> None:
        self.shape = plan.shape
        self._checkpoint = checkpoint
        self._sources = plan.sources
        self._packed: dict[Source, PackedSource] = {}
        self._whole: tuple[Source, Floats] | None = None  # a source that is changed as a whole
        self._turned: tuple[tuple[str, int], Floats] | None = None

    def __call__(self, start: int, stop: int) -> Floats:
        parts = [self._read(*part) for part in self._parts(start, stop)]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if stop == self.shape[0]:
            self._turned = self._whole = None  # All of it was read.
        return rows

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
        """The sources of rows start..stop-1, and which of their own rows these are."""
        for source in self._sources:
            count = source.padded_shape[0]
            if start < count and stop > 0:
                yield source, max(start, 0), min(stop, count)
            start, stop = start - count, stop - count

    def _read(self, source: Source, start: int, stop: int) -> Floats:
        if source.padding is None and not source.heads:
            return self._finite(source, start, stop)
        if self._whole is None or self._whole[0] is not source:
            values = self._finite(source, 0, source.shape[0])
            if source.heads:
                values = values.reshape(source.heads, -1, source.shape[1]).swapaxes(1, 2).reshape(source.padded_shape)
            self._whole = source, values if source.padding is None else pad_values(values, source.padding)
        return self._whole[1][start:stop]

    def _finite(self, source: Source, start: int, stop: int) -> Floats:
        values = self._stored(source, start, stop)
        if not np.isfinite(values).all():
            hint = "The checkpoint is damaged or its training diverged."
            raise CheckpointError(f"Tensor {source.name!r} contains values that are not finite.", hint)
        if source.logged:
            values = np.log(-values)
        if source.softplus:
            values = np.logaddexp(values, np.float32(0))
        if source.offset:
            values += np.float32(source.offset)
        if source.scale != 1:
            values *= np.float32(source.scale)
        return values

    def kept(self, scheme: QuantScheme) -> Rows:
        """Reads rows of a packed tensor unchanged, in the scheme of `TensorPlan.kept`."""

        def rows(start: int, stop: int) -> QuantizedMatrix:
            parts = [self._kept(*part, scheme) for part in self._parts(start, stop)]
            if len(parts) == 1:
                return parts[0]
            data, scales = (np.concatenate([getattr(p, field) for p in parts]) for field in ("data", "scales"))
            return QuantizedMatrix(data, scales, None)

        return rows

    def _kept(self, source: Source, start: int, stop: int, scheme: QuantScheme) -> QuantizedMatrix:
        places = places_of(source, start, stop)
        first = places.min()
        whole, chosen = self._opened(source).kept(first, places.max() + 1, scheme), places - first
        if np.array_equal(chosen, np.arange(len(whole.data))):
            return whole
        return QuantizedMatrix(whole.data[chosen], whole.scales[chosen], None)

    def _opened(self, source: Source) -> PackedSource:
        if source not in self._packed:
            within = source.index if source.stacked else None
            self._packed[source] = PACKINGS[source.packing].open(self._checkpoint, source.name, source.shape, within)
        return self._packed[source]

    def _stored(self, source: Source, start: int, stop: int) -> Floats:
        if not (source.pieces or source.paired or source.runs):
            return self._rows_of(source, start, stop)
        places = places_of(source, start, stop)
        first = places.min()
        rows: Floats = self._rows_of(source, first, places.max() + 1)[places - first]
        return rows

    def _rows_of(self, source: Source, start: int, stop: int) -> Floats:
        """Rows start..stop-1 of the tensor of a source, before pieces are taken."""
        within = source.index if source.stacked else None
        if source.packing:
            return self._opened(source).floats(start, stop)
        if source.turned:
            if self._turned is None or self._turned[0] != (source.name, source.index):
                columns = self._checkpoint.read(source.name, within=within)
                self._turned = (source.name, source.index), columns.T
            return self._turned[1][start:stop].copy()
        if source.split > 1:
            first, last = start // source.split, -(-stop // source.split)
            rows = self._checkpoint.read(source.name, first, last).reshape(-1, source.shape[1])
            return rows[start - first * source.split : stop - first * source.split]
        before = source.index * source.shape[-1 if source.joined == 1 else 0]
        if source.joined == 0:
            return self._checkpoint.read(source.name, before + start, before + stop)
        if source.joined == 1:
            rows = self._checkpoint.read(source.name, start, stop)
            return rows[:, before : before + source.shape[1]].copy()
        return self._checkpoint.read(source.name, start, stop, within=within)


def places_of(source: Source, start: int, stop: int) -> Ints:  # (stop - start,)
    """Rows of the checkpoint's tensor that are a source's rows start..stop-1."""
    rows = np.arange(start, stop)
    if source.runs:
        firsts, lasts = np.array(source.runs).T
        ends = np.cumsum(lasts - firsts)
        run = np.searchsorted(ends, rows, side="right")
        places: Ints = rows + (lasts - ends)[run]
        return places
    if source.paired:
        size, turned = source.paired
        within = rows % size
        neighbours = rows - within + 2 * (within % (turned // 2)) + within // (turned // 2)
        return np.where(within < turned, neighbours, rows)
    if not source.pieces:
        return rows
    period, taken, share = source.pieces
    return rows // share * period + taken + rows % share


class PlannedTensors:
    """All planned tensors by canonical name, some `borrowed` from another checkpoint; see
    `quant.calibration.ModelReader`."""

    def __init__(
        self, checkpoint: TensorFile, plans: Iterable[TensorPlan], borrowed: Mapping[str, PlannedRows] | None = None
    ) -> None:
        self._rows = {plan.name: PlannedRows(checkpoint, plan) for plan in plans} | dict(borrowed or {})

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def of(self, name: str) -> PlannedRows:
        return self._rows[name]

    def tensor(self, name: str) -> Floats:
        rows = self._rows[name]
        return rows(0, rows.shape[0])

    def rows(self, name: str, rows: Ints) -> Floats:  # (M,) -> (M, D)
        """Some rows of a matrix, ascending."""
        source = self._rows[name]
        count, width = source.shape
        out = np.empty((len(rows), width), np.float32)
        step = max(1, _RUN_VALUES // width)
        for start in range(0, count, step):
            first, last = np.searchsorted(rows, [start, start + step])
            if first < last:
                out[first:last] = source(start, min(start + step, count))[rows[first:last] - start]
        return out
