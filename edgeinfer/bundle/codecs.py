"""Rows of quantized matrices in and out of a weights file, in any layout. Rows travel as `QuantizedMatrix`, the
portable layout. Whatever the size of a matrix, a few MB of it are held at a time; the static layout, whose rows are
columns of the file, is held whole while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.kinds import KINDS, pack_blocks, unpack_blocks
from edgeinfer.bundle.layouts import (
    NATIVE,
    PORTABLE,
    STATIC,
    TILE,
    Layout,
    NativeTiles,
    StaticMatrix,
    covering_tiles,
    from_static,
    pack_tiles,
    segment_bytes,
    tile_rows,
    tiles_of,
    to_static,
    unpack_tiles,
)
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape, blocks_of_file, packed_bytes
from edgeinfer.core.errors import BundleError

# Values of a matrix that are unpacked at a time.
_RUN_VALUES = 1 << 20

# Gives rows start..stop-1 of the matrix that is written.
Rows = Callable[[int, int], QuantizedMatrix]


class Codec(Protocol):
    def read(self, path: Path, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        """Rows start..stop-1 of a tensor in the weights file `path`."""

    def write(self, file: BinaryIO, entry: TensorEntry, rows: Rows) -> None:
        """Writes a whole tensor to its place in an open weights file."""


def read_blob(path: Path, blob: Blob, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """A blob of a weights file, mapped; optionally the run start..stop-1 along its first axis."""
    stop = blob.shape[0] if stop is None else stop
    offset = blob.offset + start * (blob.nbytes // blob.shape[0])
    return np.memmap(path, blob.dtype, "r", offset, (stop - start, *blob.shape[1:]))


def _write_blob(file: BinaryIO, blob: Blob | None, start: int, values: NDArray[Any] | None) -> None:
    """Writes a run along the first axis of a blob."""
    if blob is None or values is None:
        return
    file.seek(blob.offset + start * (blob.nbytes // blob.shape[0]))
    file.write(np.ascontiguousarray(values).data)


def _checked(rows: QuantizedMatrix, name: str) -> QuantizedMatrix:
    if not bfloat16.is_representable(rows.scales):
        raise BundleError(f"{name} has scales that are not bfloat16.", "Export the bundle again.")
    return rows


def read_rows(path: Path, entry: TensorEntry, blob: Blob, start: int, stop: int) -> NDArray[Any]:
    """Rows start..stop-1 of a part that is stored by rows, gate before up where they alternate in the file."""
    if not entry.interleaved:
        return read_blob(path, blob, start, stop)
    turns, half = read_blob(path, blob), entry.shape[0] // 2
    gate, up = (min(start, half), min(stop, half)), (max(start, half) - half, max(stop, half) - half)
    return np.concatenate([turns[2 * run[0] + side : 2 * run[1] + side : 2] for side, run in enumerate((gate, up))])


def take_turns(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:  # 2 x (N, ...) -> (2 N, ...)
    """Alternates rows of two arrays."""
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


class PortableCodec:
    """Rows one after the other."""

    def read(self, path: Path, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        assert entry.scales is not None
        return QuantizedMatrix(
            read_rows(path, entry, entry.data, start, stop),
            read_rows(path, entry, entry.scales, start, stop),
            None if entry.zero_points is None else read_rows(path, entry, entry.zero_points, start, stop),
        )

    def write(self, file: BinaryIO, entry: TensorEntry, rows: Rows) -> None:
        n, k = entry.shape
        halves = 2 if entry.interleaved else 1
        step = max(1, _RUN_VALUES // (halves * k))
        for start in range(0, n // halves, step):
            stop = min(start + step, n // halves)
            run = (
                rows(start, stop)
                if halves == 1
                else QuantizedMatrix.combine([rows(start, stop), rows(n // 2 + start, n // 2 + stop)], take_turns)
            )
            run = _checked(run, entry.name)
            _write_blob(file, entry.data, halves * start, run.data)
            _write_blob(file, entry.scales, halves * start, run.scales)
            _write_blob(file, entry.zero_points, halves * start, run.zero_points)


class NativeCodec:
    """Tiles of 32 rows."""

    def read(self, path: Path, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        if entry.segments:
            return blocks_of_file(_read_blocks(path, entry, start, stop))
        return _join([_read_run(path, entry, *run) for run in _half_runs(entry.quantized, start, stop)])

    def write(self, file: BinaryIO, entry: TensorEntry, rows: Rows) -> None:
        shape = entry.quantized
        if entry.segments:
            _write_blocks(file, entry, rows)
            return
        for first, runs in _tile_runs(shape):
            run = pack_tiles(_checked(_join([rows(*r) for r in runs]), entry.name), shape)
            _write_blob(file, entry.data, first, run.data)
            _write_blob(file, entry.low, first, run.low)
            _write_blob(file, entry.scales, first, run.scales)
            _write_blob(file, entry.zero_points, first, run.zero_points)


class StaticCodec:
    """Columns."""

    def read(self, path: Path, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        # Two rows share a byte at 4 bits.
        first, last = start - start % 2, stop + stop % 2
        cut = slice(packed_bytes(first, entry.bits), packed_bytes(last, entry.bits))
        assert entry.scales is not None
        zeros = entry.zero_points
        columns = StaticMatrix(
            read_blob(path, entry.data)[:, cut],
            read_blob(path, entry.scales)[:, first:last],
            None if zeros is None else read_blob(path, zeros)[:, cut],
        )
        return from_static(columns, entry.quantized)[start - first : stop - first]

    def write(self, file: BinaryIO, entry: TensorEntry, rows: Rows) -> None:
        n, k = entry.shape
        parts = {"data": entry.data, "scales": entry.scales, "zero_points": entry.zero_points}
        whole = {part: np.empty(blob.shape, blob.dtype) for part, blob in parts.items() if blob is not None}
        step = max(2, _RUN_VALUES // k // 2 * 2)
        for start in range(0, n, step):
            stop = min(start + step, n)
            run = to_static(_checked(rows(start, stop), entry.name), entry.quantized)
            cut = slice(packed_bytes(start, entry.bits), packed_bytes(stop, entry.bits))
            whole["data"][:, cut] = run.data
            whole["scales"][:, start:stop] = run.scales
            if run.zero_points is not None:
                whole["zero_points"][:, cut] = run.zero_points
        for part, values in whole.items():
            _write_blob(file, parts[part], 0, values)


CODECS: dict[Layout, Codec] = {NATIVE: NativeCodec(), PORTABLE: PortableCodec(), STATIC: StaticCodec()}


def _tile_runs(shape: QuantizedShape) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """First tiles of runs that fit in memory, with their rows."""
    tiles, step = tiles_of(shape), max(1, _RUN_VALUES // (TILE * shape.k))
    for first in range(0, tiles, step):
        yield first, tile_rows(shape, first, min(first + step, tiles))


def segment_places(shape: QuantizedShape) -> Iterator[tuple[int, int, QuantizedShape]]:
    """First row and first byte of each segment, and the segment as a matrix."""
    row = offset = 0
    for segment in shape.segments:
        part = shape.kept(segment)
        yield row, offset, part
        row, offset = row + part.n, offset + segment_bytes(part)


def _part_places(entry: TensorEntry, offset: int, part: QuantizedShape) -> Iterator[tuple[int, int]]:
    """Where each run of bytes of a segment begins in the file, and how many bytes a tile has of it."""
    for size in KINDS[part.segments[0].kind].tile_bytes(part.k):
        yield entry.data.offset + offset, size
        offset += tiles_of(part) * size


def _write_blocks(file: BinaryIO, entry: TensorEntry, rows: Rows) -> None:
    for row, offset, part in segment_places(entry.quantized):
        for first, runs in _tile_runs(part):
            blocks = _join([rows(row + start, row + stop) for start, stop in runs]).data
            tiles = pack_blocks(part.segments[0].kind, blocks, part.k, paired=part.paired, name=entry.name)
            for run, (place, size) in zip(tiles, _part_places(entry, offset, part), strict=True):
                file.seek(place + first * size)
                file.write(run.data)


def _read_blocks(path: Path, entry: TensorEntry, start: int, stop: int) -> NDArray[np.uint8]:  # (rows, bytes of a row)
    for row, offset, part in segment_places(entry.quantized):
        if row <= start and stop <= row + part.n:
            runs = _half_runs(part, start - row, stop - row)
            return np.concatenate([_read_blocks_of_half(path, entry, offset, part, *run) for run in runs])
    raise AssertionError(f"rows {start} to {stop} of {entry.name} are of several types")


def _read_blocks_of_half(
    path: Path, entry: TensorEntry, offset: int, part: QuantizedShape, start: int, stop: int
) -> NDArray[np.uint8]:  # (rows, bytes of a row)
    first, last = covering_tiles(part, start, stop)
    tiles: list[NDArray[np.uint8]] = [
        np.memmap(path, np.uint8, "r", place + first * size, ((last - first) * size,))
        for place, size in _part_places(entry, offset, part)
    ]
    count = sum(end - begin for begin, end in tile_rows(part, first, last))
    rows = unpack_blocks(part.segments[0].kind, tiles, count, part.k, paired=part.paired)
    before = _rows_before(part, first, last, start)
    return rows[before : before + stop - start]


def _half_runs(shape: QuantizedShape, start: int, stop: int) -> list[tuple[int, int]]:
    """A run of rows, cut where the halves of a paired matrix meet, as both lie in the same tiles."""
    middle = shape.n // 2
    if shape.paired and start < middle < stop:
        return [(start, middle), (middle, stop)]
    return [(start, stop)]


def _read_run(path: Path, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
    """Rows start..stop-1, all of one half, from the tiles that hold them."""
    shape = entry.quantized
    first, last = covering_tiles(shape, start, stop)
    tiles = NativeTiles(
        read_blob(path, entry.data, first, last),
        None if entry.low is None else read_blob(path, entry.low, first, last),
        None if entry.scales is None else read_blob(path, entry.scales, first, last),
        None if entry.zero_points is None else read_blob(path, entry.zero_points, first, last),
    )
    rows, before = unpack_tiles(tiles, shape, first), _rows_before(shape, first, last, start)
    return rows[before : before + stop - start]


def _rows_before(shape: QuantizedShape, first: int, last: int, start: int) -> int:
    """Rows of some tiles that come before row `start`."""
    before = 0
    for run_start, run_stop in tile_rows(shape, first, last):
        if run_start <= start < run_stop:
            return before + start - run_start
        before += run_stop - run_start
    raise AssertionError(f"row {start} is not in tiles {first} to {last}")


def _join(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    return parts[0] if len(parts) == 1 else QuantizedMatrix.combine(parts, np.concatenate)
