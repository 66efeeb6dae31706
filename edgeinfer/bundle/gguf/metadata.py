"""The number types of GGUF files, and their metadata: typed look-ups, and arrays that stay in the file until used."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass


@dataclass(frozen=True)
class GgmlType:
    """How the values of a tensor are stored: in blocks along a row."""

    name: str  # as ggml writes it, such as "Q4_K"
    number: int  # in files
    # `block_values`, `block_bytes`: of one block; plain numbers are blocks of one value.
    block_values: int
    block_bytes: int

    @property
    def quantized(self) -> bool:
        return self.block_values > 1

    @property
    def bits(self) -> float:
        """Stored bits of a value, scales included."""
        return 8 * self.block_bytes / self.block_values

    def row_bytes(self, values: int) -> int:
        assert values % self.block_values == 0, f"{values} values are no whole blocks of {self.name}"
        return values // self.block_values * self.block_bytes


@dataclass(frozen=True)
class ItemType:
    """How a metadata value is stored."""

    name: str  # as the format's description writes it, such as "uint32"
    number: int
    size: int  # bytes of a value; 0 for strings and arrays
    dtype: str  # of numpy, little-endian; empty for strings and arrays


def _types(*rows: tuple[int, str, int, int]) -> dict[int, GgmlType]:
    return {number: GgmlType(name, number, values, size) for number, name, values, size in rows}


# By their numbers in files. The missing numbers were withdrawn, and no program reads them any more.
GGML_TYPES: dict[int, GgmlType] = _types(
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
)

_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


def ggml_type(name: str) -> GgmlType:
    return _BY_NAME[name]


STRING, ARRAY, BOOL = 8, 9, 7

# By their numbers in files.
ITEM_TYPES: dict[int, ItemType] = {
    kind.number: kind
    for kind in (
        ItemType("uint8", 0, 1, "<u1"),
        ItemType("int8", 1, 1, "<i1"),
        ItemType("uint16", 2, 2, "<u2"),
        ItemType("int16", 3, 2, "<i2"),
        ItemType("uint32", 4, 4, "<u4"),
        ItemType("int32", 5, 4, "<i4"),
        ItemType("float32", 6, 4, "<f4"),
        ItemType("bool", BOOL, 1, "<u1"),
        ItemType("string", STRING, 0, ""),
        ItemType("array", ARRAY, 0, ""),
        ItemType("uint64", 10, 8, "<u8"),
        ItemType("int64", 11, 8, "<i8"),
        ItemType("float64", 12, 8, "<f8"),
    )
}


AGAIN = "The file is damaged, incomplete or not meant to be run: download or export it again."
_LENGTH = struct.Struct("<Q")


def damaged(path: Path, what: str) -> BundleError:
    return BundleError(f"{path}: {what}.", AGAIN)


@dataclass(frozen=True)
class GgufArray:
    """An array of metadata, which was checked when the file was read and is read again whenever its values are used."""

    item_type: str  # name of an `ItemType`, never "array"
    count: int
    # `path`, `offset`, `nbytes`: the place of the items, strings with their lengths before them.
    path: Path
    offset: int
    nbytes: int

    def values(self) -> NDArray[Any] | list[str]:  # (count,)
        """The items: text as a list, numbers and booleans as an array."""
        return self.strings() if self.item_type == ITEM_TYPES[STRING].name else self.numbers()

    def numbers(self) -> NDArray[Any]:  # (count,)
        kind = next(kind for kind in ITEM_TYPES.values() if kind.name == self.item_type)
        if kind.number == STRING:
            raise damaged(self.path, "an array that should hold numbers holds text")
        items = np.frombuffer(self._bytes(), kind.dtype)  # (count,)
        return items.astype(np.bool_) if kind.number == BOOL else items

    def strings(self) -> list[str]:
        try:
            return [spelling.decode("utf-8") for spelling in self.spellings()]
        except UnicodeDecodeError as error:
            raise damaged(self.path, "it changed while it was read") from error

    def spellings(self) -> Iterator[bytes]:
        """The items of an array of text one by one, in UTF-8."""
        if self.item_type != ITEM_TYPES[STRING].name:
            raise damaged(self.path, "an array that should hold text holds numbers")
        data, at, length_of = self._bytes(), 0, _LENGTH.unpack_from
        try:
            for _ in range(self.count):
                start = at + _LENGTH.size
                at = start + length_of(data, at)[0]
                yield data[start:at]
        except struct.error as error:
            raise damaged(self.path, "it changed while it was read") from error

    def _bytes(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.nbytes)
        except OSError as error:
            raise BundleError(f"Cannot read {self.path}: {error.strerror}.", "Check the file.") from error
        if len(data) != self.nbytes:
            raise damaged(self.path, "it changed while it was read")
        return data


Value = bool | int | float | str | GgufArray


class Metadata(dict[str, Value]):
    """The metadata of a file, with look-ups that raise BundleError for a missing value or one of another type."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        super().__init__(values)
        self._path = path

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise damaged(self._path, f"{key} is not text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise damaged(self._path, f"{key} is not a whole number of at least 0")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._value(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise damaged(self._path, f"{key} is not a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise damaged(self._path, f"{key} is neither true nor false")
        return value

    def array(self, key: str, *item_types: str) -> GgufArray:
        """An array whose items have one of the types."""
        value = self._value(key, None)
        if not isinstance(value, GgufArray) or value.item_type not in item_types:
            raise damaged(self._path, f"{key} is not an array of {' or '.join(item_types)}")
        return value

    def _value(self, key: str, default: Value | None) -> Value:
        value = self.get(key, default)
        if value is None:
            raise damaged(self._path, f"it does not say {key}")
        return value
