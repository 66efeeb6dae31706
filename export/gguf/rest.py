"""A GGUF file again from the bundle that was made of it, byte for byte.

Rows of tensors that the weights have as the file does are read from there. Everything else, which is the header and a
few vectors, lies in a compressed file of the bundle.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor, read_gguf
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.store import Bundle, reading
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import BundleError, StorageError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures.planned_tensors import places_of
from edgeinfer.export.architectures.tensors import Source, TensorPlan

# What a bundle's weights lack of the file that it was made of; without it there is no way back.
REST = "source.gguf.rest"
# Bytes of the file and of its header, before the compressed bytes.
_HEAD = struct.Struct("<QQ")
# A bundle that lacks more than this share of its file, or this many bytes, has no way back.
_MOST_SHARE, _MOST_BYTES = 0.05, 64 << 20
_PIECE, _RUN_VALUES = 1 << 20, 1 << 20
_FLOATS = {"F32": "<f4", "F16": "<f2"}

# The bundle's tensors of a file: their plans, and their entries in the same order.
Planned = tuple[Sequence[TensorPlan], Sequence[TensorEntry]]


@dataclass(frozen=True)
class _Rows:
    """Rows of one of our tensors that a file's tensor has."""

    entry: TensorEntry
    first: int
    source: Source

    @property
    def count(self) -> int:
        return self.source.shape[0]


def _kept(gguf: GgufFile, planned: Planned) -> dict[str, list[_Rows]]:
    """The file's tensors of which the bundle has every bit, with the rows that they are made of."""
    found: dict[str, list[_Rows]] = {}
    for plan, entry in zip(*planned, strict=True):
        first = 0
        for source in plan.sources:
            tensor = gguf.by_name.get(source.name)
            if tensor is not None and (entry.segments or _same_floats(source, tensor)):
                found.setdefault(source.name, []).append(_Rows(entry, first, source))
            first += source.padded_shape[0]
    return {
        name: rows
        for name, rows in found.items()
        if sum(part.count * math.prod(part.source.shape[1:]) for part in rows) == gguf.by_name[name].size
    }


def _same_floats(source: Source, tensor: GgufTensor) -> bool:
    """Whether values are the file's, which float32 holds exactly."""
    plain = replace(source, scale=1.0, offset=0.0, softplus=False, logged=False, padding=None)
    return source == plain and tensor.type.name in _FLOATS


def _holes(gguf: GgufFile, kept: dict[str, list[_Rows]]) -> Iterator[tuple[int, int]]:
    """Runs of the file's bytes that the weights do not have: first and last + 1."""
    at = 0
    for tensor in sorted((gguf.by_name[name] for name in kept), key=lambda each: each.offset):
        if at < tensor.offset:
            yield at, tensor.offset
        at = tensor.offset + tensor.nbytes
    if at < gguf.size:
        yield at, gguf.size


def write_rest(folder: Path, gguf: GgufFile, planned: Planned) -> None:
    """Writes what a bundle in the folder lacks of its file, unless that is much."""
    if len(gguf.splits) > 1:
        return
    holes = [*_holes(gguf, _kept(gguf, planned))]
    if sum(stop - start for start, stop in holes) > max(_MOST_BYTES, _MOST_SHARE * gguf.size):
        return
    squeezed = zlib.compressobj()
    with reading(gguf.path), gguf.path.open("rb") as source, (folder / REST).open("wb") as file:
        file.write(_HEAD.pack(gguf.size, holes[0][1]))
        for start, stop in holes:
            source.seek(start)
            for at in range(start, stop, _PIECE):
                file.write(squeezed.compress(source.read(min(_PIECE, stop - at))))
        file.write(squeezed.flush())


def restore(
    bundle: Bundle,
    out: Path,
    planned: Callable[[GgufFile], Planned],
    progress: Progress | None = None,
    *,
    replace_existing: bool = False,
) -> None:
    """Writes the GGUF file that a bundle was made of, whole or not at all.

    Args:
        planned: the tensors of a bundle that is made of a file.
    """
    if not bundle.has(REST):
        hint = "Bundles that edgeinfer convert or run made of one .gguf file become that file again."
        raise UsageError(f"{bundle.path} was not made of a .gguf file, or lacks too much of it.", hint)
    if out.exists() and not replace_existing:
        raise StorageError(f"{out} already exists.", "Choose another name, or add --force to replace it.")
    rest = _Rest(bundle.file(REST))
    with storage_errors(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        path = Path(folder, out.name)
        with path.open("wb") as file:
            file.write(rest.read(rest.header))
            file.truncate(rest.size)
        gguf = read_gguf(path)
        plans, entries = planned(gguf)
        kept = _kept(gguf, (plans, entries))
        with path.open("r+b") as file:
            for start, stop in _holes(gguf, kept):
                file.seek(max(start, rest.header))
                file.write(rest.read(stop - max(start, rest.header)))
            for index, (name, parts) in enumerate(kept.items()):
                if progress is not None:
                    progress(name, index, len(kept))
                for part in parts:
                    _write_rows(file, bundle, gguf.by_name[name], part)
            os.fsync(file.fileno())
        if read_gguf(path).fingerprint != bundle.manifest.export.get("fingerprint"):
            raise BundleError(f"{bundle.path} gives another file than the one that it was made of.", "Make it again.")
        path.replace(out)


class _Rest:
    """The bytes of REST, in order."""

    def __init__(self, path: Path) -> None:
        with reading(path):
            data = path.read_bytes()
        try:
            self.size, self.header = _HEAD.unpack_from(data)
            most = max(_MOST_BYTES, int(_MOST_SHARE * self.size))
            self._bytes, self._at = zlib.decompressobj().decompress(data[_HEAD.size :], most), 0
        except (struct.error, zlib.error) as error:
            raise BundleError(f"{path} cannot be read: {error}.", "Make the bundle again.") from error

    def read(self, count: int) -> bytes:
        self._at += count
        return self._bytes[self._at - count : self._at]


def _write_rows(file: BinaryIO, bundle: Bundle, tensor: GgufTensor, part: _Rows) -> None:
    width = math.prod(part.source.shape[1:])
    size, step = tensor.type.row_bytes(width), max(1, _RUN_VALUES // width)
    for start in range(0, part.count, step):
        stop = min(start + step, part.count)
        rows = _rows(bundle, tensor, part, start, stop)
        places = places_of(part.source, start, stop)
        order = np.argsort(places)
        for run in np.split(order, np.flatnonzero(np.diff(places[order]) != 1) + 1):
            file.seek(tensor.offset + int(places[run[0]]) * size)
            file.write(np.ascontiguousarray(rows[run]).data)


def _rows(bundle: Bundle, tensor: GgufTensor, part: _Rows, start: int, stop: int) -> NDArray[np.uint8]:
    """Rows as the file has them, (rows, bytes of a row)."""
    first, last = part.first + start, part.first + stop
    if part.entry.segments:
        return bundle.rows(part.entry, first, last).data
    floats = bundle.tensor(part.entry.name)[first:last].astype(_FLOATS[tensor.type.name])
    return np.ascontiguousarray(floats).reshape(last - first, -1).view(np.uint8)
