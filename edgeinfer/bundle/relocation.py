"""Renames the weights file that an ONNX graph reads, in the graph's bytes; knows no more of ONNX than that.

A device that converts a bundle has no onnx package. The names lie at one known place of the Protocol Buffers message
(protobuf.dev/programming-guides/encoding), and everything else is copied as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.errors import BundleError

__all__ = ["relocate"]

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.external_data.
_TO_ENTRIES = (7, 5, 13)
# StringStringEntryProto: key and value.
_KEY, _VALUE = 1, 2
_LOCATION = b"location"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def relocate(model: bytes, old: str, new: str) -> bytes:
    """The same model with its initializers in the file `new` instead of `old`.

    Raises:
        BundleError: the bytes are not an ONNX model.
    """
    try:
        return _rewrite(model, _TO_ENTRIES, old.encode(), new.encode())
    except IndexError as error:
        raise BundleError("The model file is not an ONNX graph.", "Export or download the bundle again.") from error


def _rewrite(message: bytes, path: tuple[int, ...], old: bytes, new: bytes) -> bytes:
    """Rewrites the entries that lie at `path` of a message; an empty path says that the message is an entry."""
    if not path:
        return _rewrite_entry(message, old, new)
    pieces = []
    for number, start, body, end in _fields(message):
        if number == path[0] and body >= 0:
            inner = _rewrite(message[body:end], path[1:], old, new)
            pieces.append(_length_delimited(number, inner))
        else:
            pieces.append(message[start:end])
    return b"".join(pieces)


def _rewrite_entry(entry: bytes, old: bytes, new: bytes) -> bytes:
    fields = {number: entry[body:end] for number, _, body, end in _fields(entry) if body >= 0}
    if fields.get(_KEY) != _LOCATION or fields.get(_VALUE) != old:
        return entry
    return _length_delimited(_KEY, _LOCATION) + _length_delimited(_VALUE, new)


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Number of each field, where it starts, where its bytes start if it has a length (else -1), and where it ends."""
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        body, kind = -1, key & 7
        if kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _LENGTH:
            size, body = _read_varint(message, at)
            at = body + size
        else:
            raise IndexError(f"wire type {kind}")
        if at > len(message):
            raise IndexError("a field reaches past its message")
        yield key >> 3, start, body, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits to a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _length_delimited(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
