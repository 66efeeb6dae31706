"""A GGUF model file (github.com/ggml-org/ggml/blob/master/docs/gguf.md), or its parts, as one table of tensors.

Nothing in a file is trusted: sizes are Python's integers, every count is compared with the bytes that are left before
anything is allocated for it, and only names, shapes and scalars are kept. Tensors must lie one after the other in the
order of the table, as llama.cpp insists.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import mmap
import os
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import (
    ARRAY,
    BOOL,
    GGML_TYPES,
    ITEM_TYPES,
    STRING,
    GgmlType,
    GgufArray,
    Metadata,
    Value,
    damaged,
)
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass

# The largest headers, of vocabularies of 260,000 tokens with their merges, have some 17 MB.
MAX_HEADER_BYTES = 64_000_000
MAX_METADATA = 4096  # published models have some dozens
MAX_TENSORS = 65_536  # published models have at most some thousands
# In all arrays together; published models have at most three quarters of a million.
MAX_STRINGS = 1_500_000
MAX_TEXT_BYTES = 8_000_000  # of keys, names and single strings, chat templates among them
MAX_ITEM_BYTES = 1_000_000  # of a string in an array
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 65_536

_MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)
_U32, _U64, _COUNTS = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<QQ")
_DIMENSIONS = [struct.Struct(f"<{count}Q") for count in range(1, MAX_DIMENSIONS + 1)]
_PLACE = struct.Struct("<IQ")
_FIXED = len(_MAGIC) + _U32.size + _COUNTS.size
# Lengths of the shortest entries: a name of one letter, and a byte; one dimension.
_LEAST_PAIR, _LEAST_TENSOR = 14, 33
# Bytes of strings whose encoding is checked at a time.
_RUN = 2_000_000


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]  # in numpy's order, (rows, columns) for a matrix
    type: GgmlType
    offset: int  # in its file
    nbytes: int
    split: int = 0  # number of its file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """The header of one file."""

    path: Path
    size: int  # bytes of the file
    version: int
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]
    alignment: int
    header_bytes: int  # up to the end of the tensor table
    data_offset: int  # where tensors begin


def read_part(path: Path, split: int = 0) -> Part:
    """Reads the header of one file and checks that its tensors lie in it."""
    try:
        if not path.is_file():
            raise BundleError(f"{path} is not a file.", "Give the path of a .gguf file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FIXED:
                raise damaged(path, f"its {size} bytes are too few for a GGUF file")
            with mmap.mmap(file.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                return _Header(path, size, data).read(split)
    except OSError as error:
        raise BundleError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from error


class _Header:
    """A header that is read front to back."""

    def __init__(self, path: Path, size: int, data: mmap.mmap) -> None:
        self._path = path
        self._size = size
        self._data = data
        self._limit = len(data)
        self._at = 0
        self._strings = 0
        self._text_bytes = 0

    def read(self, split: int) -> Part:
        version = self._read_version()
        tensors, pairs = self._take(_COUNTS, "the counts")
        self._check_count(pairs, MAX_METADATA, _LEAST_PAIR, "metadata entries")
        self._check_count(tensors, MAX_TENSORS, _LEAST_TENSOR, "tensors")
        metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = self._name("a key", MAX_KEY_BYTES)
            if key in metadata:
                raise self._bad(f"{_short(key)} is there twice")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        table = self._table(tensors, alignment)
        start = _padded(self._at, alignment)
        for tensor in table:
            if start + tensor.offset + tensor.nbytes > self._size:
                what = f"tensor {_short(tensor.name)}"
                raise self._bad(f"it has {self._size} bytes, and {what} reaches past its end")
        placed = tuple(dataclasses.replace(tensor, offset=start + tensor.offset, split=split) for tensor in table)
        return Part(self._path, self._size, version, metadata, placed, alignment, self._at, start)

    def _bad(self, what: str) -> BundleError:
        return damaged(self._path, what)

    def _read_version(self) -> int:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise BundleError(f"{self._path} is not a GGUF file.", "Give a .gguf file or a bundle directory.")
        self._at = len(_MAGIC)
        version: int = self._take(_U32, "the version")[0]
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            kind = "written for big-endian machines" if swapped else f"of version {version}"
            hint = f"edgeinfer reads versions {' and '.join(map(str, _VERSIONS))} with the lowest byte first."
            raise BundleError(f"{self._path} is a GGUF file {kind}.", hint)
        return version

    # Runs of bytes

    def _need(self, count: int, what: str) -> None:
        """Refuses a file with fewer bytes left."""
        if count > self._size - self._at:
            raise self._bad(f"it ends inside {what}")
        if count > self._limit - self._at:
            raise self._cut(what)

    def _cut(self, what: str) -> BundleError:
        """The error of a header that continues past the last byte that is read."""
        if self._limit < self._size:
            return self._bad(f"its header has more than {MAX_HEADER_BYTES // 10**6} MB")
        return self._bad(f"it ends inside {what}")

    def _take(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        self._need(layout.size, what)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _check_count(self, count: int, most: int, least_bytes: int, what: str) -> None:
        """Refuses counts that the rest of the file cannot hold, or that no published model has."""
        if count > most:
            raise self._bad(f"it claims {count} {what}, more than the {most} that are read")
        self._need(count * least_bytes, f"{count} {what}")

    def _text(self, most: int, what: str) -> str:
        (length,) = self._take(_U64, what)
        if length > most:
            raise self._bad(f"{what} has {length} bytes, more than the {most} that are read")
        self._need(length, what)
        self._text_bytes += length
        if self._text_bytes > MAX_TEXT_BYTES:
            raise self._bad(f"it has more than {MAX_TEXT_BYTES // 10**6} MB of keys, names and strings")
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"{what} is not UTF-8") from error

    # Metadata

    def _name(self, what: str, most: int) -> str:
        name = self._text(most, what)
        if not name or not name.isprintable():
            raise self._bad(f"{what} is {_short(name)}")
        return name

    def _value(self, key: str) -> Value:
        what = _short(key)
        (number,) = self._take(_U32, what)
        if number == ARRAY:
            return self._array(what)
        if number == STRING:
            return self._text(MAX_TEXT_BYTES, what)
        kind = ITEM_TYPES.get(number)
        if kind is None:
            raise self._bad(f"{what} has the unknown type {number}")
        if key == _ALIGNMENT and kind.name != "uint32":
            raise self._bad(f"{what} is a {kind.name}")
        self._need(kind.size, what)
        value: int | float = np.frombuffer(self._data[self._at : self._at + kind.size], kind.dtype)[0].item()
        self._at += kind.size
        if number == BOOL and value > 1:
            raise self._bad(f"{what} is neither true nor false")
        if value != value:
            raise self._bad(f"{what} is not a number")
        return bool(value) if number == BOOL else value

    def _array(self, what: str) -> GgufArray:
        (number,) = self._take(_U32, what)
        (count,) = self._take(_U64, what)
        kind = ITEM_TYPES.get(number)
        if kind is None or number == ARRAY:
            fault = f"the unknown type {number}" if kind is None else "arrays inside arrays"
            raise self._bad(f"{what} is an array with {fault}")
        if number == STRING:
            self._strings += count
            self._check_count(self._strings, MAX_STRINGS, 0, "strings")
        self._need(count * (kind.size or _U64.size), what)
        start = self._at
        if number == STRING:
            self._at = self._skip_strings(count, what)
        else:
            self._at += count * kind.size
        if number == BOOL and count and np.frombuffer(self._data, np.uint8, count, start).max() > 1:
            raise self._bad(f"{what} holds values that are neither true nor false")
        return GgufArray(kind.name, count, self._path, start, self._at - start)

    def _skip_strings(self, count: int, what: str) -> int:
        """The end of an array of strings."""
        data, at, limit, unpack = self._data, self._at, self._limit, _U64.unpack_from
        if not count:
            return at
        starts = array("q")
        try:
            for _ in range(count):
                starts.append(at)
                at += _U64.size + unpack(data, at)[0]
                if at > limit:
                    raise self._cut(what)
        except struct.error as error:
            raise self._cut(what) from error
        places = np.frombuffer(starts, np.int64)  # (count,)
        longest = max(int(np.diff(places).max(initial=0)), at - starts[-1]) - _U64.size
        if longest > MAX_ITEM_BYTES:
            raise self._bad(f"{what} holds a string of {longest} bytes, more than the {MAX_ITEM_BYTES} that are read")
        self._check_encoding(places, at, what)
        return at

    def _check_encoding(self, places: NDArray[np.int64], end: int, what: str) -> None:  # (count,)
        """Refuses strings that are not UTF-8; many are decoded at a time, with their lengths as spaces between them."""
        first = 0
        while first < len(places):
            last = max(first + 1, int(np.searchsorted(places, places[first] + _RUN)))
            start, stop = int(places[first]), int(places[last]) if last < len(places) else end
            run = bytearray(self._data[start:stop])
            for byte in range(_U64.size):
                np.frombuffer(run, np.uint8)[places[first:last] - start + byte] = 0x20
            try:
                run.decode("utf-8")
            except UnicodeDecodeError as error:
                raise self._bad(f"{what} holds text that is not UTF-8") from error
            first = last

    def _alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._bad(f"{_ALIGNMENT} is not a power of two from 8 to {MAX_ALIGNMENT}")
        return value

    # Tensors

    def _table(self, count: int, alignment: int) -> list[GgufTensor]:
        """The tensors, which neither overlap nor leave gaps; offsets are relative to the first one's."""
        table: dict[str, GgufTensor] = {}
        expected = 0
        for _ in range(count):
            tensor = self._tensor()
            if tensor.name in table:
                raise self._bad(f"tensor {_short(tensor.name)} is there twice")
            if tensor.offset != expected:
                fault = "overlaps the one before it" if tensor.offset < expected else "leaves a gap before it"
                fault = f"is not aligned to {alignment} bytes" if tensor.offset % alignment else fault
                raise self._bad(f"tensor {_short(tensor.name)} {fault}")
            table[tensor.name] = tensor
            expected = _padded(expected + tensor.nbytes, alignment)
        return list(table.values())

    def _tensor(self) -> GgufTensor:
        name = self._name("a tensor's name", MAX_NAME_BYTES)
        what = f"tensor {_short(name)}"
        (count,) = self._take(_U32, what)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._bad(f"{what} has {count} dimensions")
        dims = self._take(_DIMENSIONS[count - 1], what)
        number, offset = self._take(_PLACE, what)
        kind = GGML_TYPES.get(number)
        if kind is None:
            raise self._bad(f"{what} has the unknown type {number}")
        values = math.prod(dims)
        if not 1 <= values < 1 << 63:
            raise self._bad(f"{what} has the impossible shape {dims}")
        if dims[0] % kind.block_values:
            raise self._bad(f"{what} has rows of {dims[0]} values, which is not a multiple of {kind.name}'s blocks")
        return GgufTensor(name, dims[::-1], kind, offset, kind.row_bytes(values))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _short(name: str) -> str:
    """A name shortened for a message."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_SPLITS = 1024
# Evenly spaced samples of each file's data, so that gigabytes take some milliseconds.
_SAMPLES, _SAMPLE_BYTES = 64, 16_384
_CHUNK = 1 << 20
_MAPPED_ALIGNMENT = 32  # ggml's TENSOR_ALIGNMENT


@dataclass(frozen=True)
class GgufFile:
    """The header of a model file, checked against the file."""

    metadata: Metadata  # of the first file; arrays are read when their values are used
    tensors: tuple[GgufTensor, ...]  # of all files, in their order
    splits: tuple[Part, ...]  # the files that hold it, most often one

    @property
    def path(self) -> Path:
        """The file, or the first of its parts."""
        return self.splits[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(split.size for split in self.splits)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @functools.cached_property
    def mappable(self) -> bool:
        """Whether llama.cpp can use all tensors in the mapped files; the format allows smaller alignments."""
        return not any(tensor.offset % _MAPPED_ALIGNMENT for tensor in self.tensors)

    @functools.cached_property
    def by_name(self) -> dict[str, GgufTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @functools.cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that depend on headers, sizes and samples of the data, not on all of it."""
        digest = hashlib.sha256()
        for split in self.splits:
            digest.update(f"{split.size} {split.header_bytes} ".encode())
            try:
                _sample(split, digest)
            except OSError as error:
                raise BundleError(f"Cannot read {split.path}: {error.strerror}.", "Check the file.") from error
        return digest.hexdigest()


def _sample(split: Part, digest: hashlib._Hash) -> None:
    with split.path.open("rb") as file:
        left = split.header_bytes
        while chunk := file.read(min(left, _CHUNK)):
            digest.update(chunk)
            left -= len(chunk)
        span = max(0, split.size - split.data_offset - _SAMPLE_BYTES)
        for start in sorted({split.data_offset + span * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a model file; given the first part of a split model, the headers of all parts."""
    first = read_part(path)
    metadata = Metadata(path, first.metadata)
    count = metadata.integer("split.count", 1)
    if count <= 1:
        return GgufFile(metadata, first.tensors, (first,))
    parts = [first]
    for number, sibling in enumerate(_siblings(path, metadata, count)):
        if number:
            parts.append(read_part(sibling, number))
            _check_part(parts[-1], metadata, number)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    if len(tensors) != metadata.integer("split.tensors.count", len(tensors)):
        raise damaged(path, f"its parts have {len(tensors)} tensors, not as many as it says")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise damaged(path, "a tensor is in two of its parts")
    return GgufFile(metadata, tensors, tuple(parts))


def _siblings(path: Path, metadata: Metadata, count: int) -> list[Path]:
    """The files of all parts, the given first one included."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        hint = "Keep the names that the parts were published with: NAME-00001-of-00003.gguf and so on."
        raise BundleError(f"{path} is one of {count} parts, and its name does not say so.", hint)
    if count > _MAX_SPLITS:
        raise damaged(path, f"it claims to be one of {count} parts, more than the {_MAX_SPLITS} that are read")
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if metadata.integer("split.no", 0) or int(name[2]) != 1:
        raise BundleError(f"{path} is not the first of its {count} parts.", f"Give {paths[0]}.")
    missing = [part for part in paths if not part.is_file()]
    if missing:
        raise BundleError(f"{path} is one of {count} parts: {missing[0]} is missing.", "Put all parts into one folder.")
    return paths


def _check_part(part: Part, metadata: Metadata, number: int) -> None:
    own = Metadata(part.path, part.metadata)
    for key, expected in (("split.no", number), ("split.count", metadata.integer("split.count"))):
        if own.integer(key) != expected:
            raise damaged(part.path, f"its {key} is {own.integer(key)}, not {expected}")
    total = metadata.get("split.tensors.count")
    if own.get("split.tensors.count", total) != total:
        raise damaged(part.path, "it counts other tensors than the first part")
