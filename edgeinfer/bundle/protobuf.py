"""Reads and writes fields of Protocol Buffers messages in their bytes (protobuf.dev/programming-guides/encoding). A
device that runs bundles has no onnx package."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.core.records import dataclass

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Field:
    number: int  # as the message's definition gives it
    whole: bytes  # all bytes of the field
    body: bytes | None  # what a field with a length holds; None for numbers

    @property
    def integer(self) -> int:
        """The number of a field that holds an integer."""
        key, at = _read_varint(self.whole, 0)
        if key & 7 != _VARINT:
            raise IndexError(f"field {self.number} holds no integer")
        return _read_varint(self.whole, at)[0]


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message in their order."""
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
        yield Field(key >> 3, message[start:at], message[body:at] if body >= 0 else None)


def length_delimited(field: int, body: bytes) -> bytes:
    """A field that holds bytes: text or a message."""
    return _varint(field << 3 | _LENGTH) + _varint(len(body)) + body


def number(field: int, value: int) -> bytes:
    """A field that holds an integer that is not negative."""
    return _varint(field << 3 | _VARINT) + _varint(value)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits to a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
