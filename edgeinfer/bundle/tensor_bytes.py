"""Named arrays as the bytes of a safetensors file, read strictly with numpy alone; knows nothing of what they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError

__all__ = ["Arrays", "decode_tensors", "encode_tensors"]

Arrays = Mapping[str, NDArray[Any]]

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I32": np.dtype("<i4")}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_NOTES = "__metadata__"
_LENGTH_BYTES = 8
# A file of heads has a dozen tensors; each takes a hundred bytes of the header.
_MOST_HEADER_BYTES = 1 << 20
_MOST_DIMENSIONS = 4
_AGAIN = "Download the bundle again, or train what the file holds again."


def encode_tensors(arrays: Arrays, notes: Mapping[str, str]) -> bytes:
    """The file: the header's length in 8 bytes, the header as JSON padded to a multiple of 8, then the arrays.

    Args:
        arrays: of float32, float16 or int32.
        notes: texts that say what the arrays are.
    """
    entries: dict[str, Any] = {_NOTES: dict(notes)}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
        parts.append(stored.tobytes())
        end = offset + len(parts[-1])
        kind = _NAMES[stored.dtype]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])


def decode_tensors(data: bytes, source: str) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a file, which cannot be written to, and its notes.

    Args:
        source: the file's name, for errors.

    Raises:
        BundleError: the bytes are not those of such a file: the arrays must lie one behind the other to its very end.
    """
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    inside = len(data) > _LENGTH_BYTES and 0 < size <= min(_MOST_HEADER_BYTES, len(data) - _LENGTH_BYTES)
    _require(inside, source, "has no header")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size])
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source} has a header that is not valid JSON.", _AGAIN) from error
    _require(isinstance(header, dict), source, "has a header that is not an object")
    notes = header.pop(_NOTES, {})
    texts = isinstance(notes, dict) and all(isinstance(text, str) for text in notes.values())
    _require(texts, source, "has metadata that is not text")
    arrays: dict[str, NDArray[Any]] = {}
    start = offset = _LENGTH_BYTES + size
    for name, entry in sorted(header.items(), key=lambda item: _begin(item[1], source)):
        dtype, shape, end = _read_entry(entry, source)
        _require(_begin(entry, source) == offset - start, source, f"has a gap before {name!r}")
        nbytes = dtype.itemsize * math.prod(shape)
        _require(end - (offset - start) == nbytes and offset + nbytes <= len(data), source, f"cuts {name!r} short")
        array = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
        finite = dtype.kind == "i" or bool(np.isfinite(array).all())
        _require(finite, source, f"has numbers in {name!r} that are not finite")
        arrays[name] = array
        offset += nbytes
    _require(offset == len(data), source, "goes on behind its last array")
    return arrays, notes


def _begin(entry: object, source: str) -> int:
    """Where an entry says that its array begins."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
    _require(pair, source, "has an array without a place")
    assert isinstance(offsets, list)
    return int(offsets[0])


def _read_entry(entry: dict[str, Any], source: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Type, shape and end of an array."""
    _require(entry.keys() == {"dtype", "shape", "data_offsets"}, source, "has an array with unknown fields")
    known = isinstance(entry["dtype"], str) and entry["dtype"] in _TYPES
    _require(known, source, f"has an array of type {entry['dtype']!r}")
    shape = entry["shape"]
    sizes = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS and all(map(_is_count, shape))
    _require(sizes, source, "has an array of an impossible shape")
    return _TYPES[entry["dtype"]], tuple(shape), int(entry["data_offsets"][1])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _require(condition: bool, source: str, what: str) -> None:
    if not condition:
        raise BundleError(f"{source} {what}.", _AGAIN)
