"""Files of named arrays in the safetensors format, written in any number of pieces and read strictly, piece by piece.

A file is the header's length in 8 bytes, the header as JSON padded with spaces to a multiple of 8, and the arrays one
behind the other to the file's very end. Own code instead of the `safetensors` library: that maps what it reads, whose
pages would count against a budget, takes all arrays at once, and has no bfloat16 for numpy.

Nothing in a file is trusted: whoever reads one gives the size it has, and gets only arrays that lie inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass

Arrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # the type, as the format spells it, and the shape of each array

LENGTH_BYTES = 8
# The format's own limit on the header, from the safetensors specification.
MOST_HEADER_BYTES = 100_000_000
_NOTES = "__metadata__"
_MOST_DIMENSIONS = 16
_FIELDS = {"dtype", "shape", "data_offsets"}
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
# Types that numpy has, as they are stored.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    **{"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BOOL": np.dtype("?")},
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1")},
    **{"U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1")},
}
_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class ArrayFileError(ValueError):
    """Bytes that are no such file; the message is to be read after the file's name."""


@dataclass(frozen=True)
class StoredArray:
    name: str
    dtype: str  # as the format spells it: F32, BF16 and so on
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    nbytes: int

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ArrayIndex:
    notes: Mapping[str, Any]  # texts about the arrays
    arrays: tuple[StoredArray, ...]  # in the order of the file
    header: bytes  # the bytes before the first array


def encode_header(shapes: Shapes, notes: Mapping[str, str]) -> bytes:
    """Length and JSON of a header; the arrays follow it in the order of `shapes`."""
    entries: dict[str, Any] = {_NOTES: dict(notes)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def type_name(dtype: np.dtype[Any]) -> str:
    return _NAMES[dtype.newbyteorder("<")]


def encode_arrays(arrays: Arrays, notes: Mapping[str, str]) -> bytes:
    """A whole file of small arrays, of the types in NUMPY_TYPES."""
    header = encode_header({name: (type_name(a.dtype), a.shape) for name, a in arrays.items()}, notes)
    stored = (a.astype(a.dtype.newbyteorder("<"), copy=False).tobytes() for a in arrays.values())
    return b"".join([header, *stored])


def decode_arrays(data: bytes, types: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a whole file, read-only and of the given types of NUMPY_TYPES, and its notes."""
    index = parse_index(data, len(data))
    notes = index.notes
    if not all(isinstance(text, str) for text in notes.values()):
        raise ArrayFileError("has notes that are no texts")
    arrays: dict[str, NDArray[Any]] = {}
    for stored in index.arrays:
        if stored.dtype not in types:
            raise ArrayFileError(f"has an array of type {stored.dtype!r}")
        kind = NUMPY_TYPES[stored.dtype]
        array = np.frombuffer(data, kind, math.prod(stored.shape), stored.offset).reshape(stored.shape)
        if kind.kind == "f" and not np.isfinite(array).all():
            raise ArrayFileError(f"has numbers in {stored.name!r} that are not finite")
        arrays[stored.name] = array
    return arrays, dict(notes)


def read_index(file: BinaryIO, size: int, most_header: int = MOST_HEADER_BYTES) -> ArrayIndex:
    """Reads the header of an open file from its beginning, of at most `most_header` bytes."""
    start = file.read(LENGTH_BYTES)
    length = header_bytes(start, size, most_header)
    return parse_index(start + file.read(length), size, most_header)


def header_bytes(start: bytes, size: int, most: int = MOST_HEADER_BYTES) -> int:
    """The length of the header's JSON, by the first bytes of a file of this size."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES or not 0 < length <= min(size - LENGTH_BYTES, most):
        raise ArrayFileError(f"is truncated or not a safetensors file: {size} bytes, header of {length}")
    return length


def parse_index(data: bytes, size: int, most_header: int = MOST_HEADER_BYTES) -> ArrayIndex:
    """Reads the header in the first bytes of a file."""
    end = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES], size, most_header)
    try:
        entries = json.loads(data[LENGTH_BYTES:end])
    except (ValueError, RecursionError) as error:
        raise ArrayFileError(f"has a header that is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ArrayFileError("has a header that is not a JSON object")
    notes = entries.pop(_NOTES, {})
    if not isinstance(notes, dict):
        raise ArrayFileError("has notes that are no object")
    found = [_read_entry(name, entry, end) for name, entry in entries.items()]
    arrays = tuple(sorted(found, key=lambda array: (array.offset, array.nbytes)))
    _check_extent(arrays, end, size)
    return ArrayIndex(notes, arrays, data[:end])


def read_into(file: BinaryIO, out: NDArray[Any]) -> None:
    """Fills an array with the next bytes of a file."""
    view, done = out.reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        if not count:
            raise ArrayFileError("ended before an array did")
        done += count


def _read_entry(name: str, entry: Any, base: int) -> StoredArray:
    fields: Any = entry if isinstance(entry, dict) and entry.keys() == _FIELDS else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    well_formed = isinstance(dtype, str) and _are_counts(shape) and len(shape) <= _MOST_DIMENSIONS
    if not well_formed or not _are_counts(offsets) or len(offsets) != 2:
        raise ArrayFileError(f"has a malformed entry of {name!r} in its header")
    if dtype not in _ITEM_BYTES:
        raise ArrayFileError(f"has an array {name!r} of an unknown type, so its entry is malformed")
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise ArrayFileError(f"has {offsets[1] - offsets[0]} bytes of {name!r}, whose shape and type need {nbytes}")
    return StoredArray(name, dtype, tuple(shape), base + offsets[0], nbytes)


def _check_extent(arrays: tuple[StoredArray, ...], start: int, size: int) -> None:
    """Refuses arrays that do not fill the file from the header to its end, one after another."""
    end = start
    for stored in arrays:
        if stored.offset != end:
            raise ArrayFileError(f"has tensors that overlap or leave gaps at byte {end}")
        end += stored.nbytes
    if end > size:
        raise ArrayFileError(f"is truncated: {size} bytes, its header describes {end}")
    if end < size:
        raise ArrayFileError(f"has {size - end} bytes that its header does not describe")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
