"""The metadata of a GGUF file: typed look-ups, and arrays that stay in the file until asked for; parses no header."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.types import BOOL, ITEM_TYPES, STRING
from edgeinfer.errors import BundleError
from edgeinfer.records import dataclass

AGAIN = "The file is damaged, incomplete or not meant to be run: download or export it again."
_LENGTH = struct.Struct("<Q")


def damaged(path: Path, what: str) -> BundleError:
    """The error of a file that is not as it should be."""
    return BundleError(f"{path}: {what}.", AGAIN)


@dataclass(frozen=True)
class GgufArray:
    """An array of metadata, which was checked when the file was read and is read again whenever its values are used.

    Attributes:
        item_type: name of an `ItemType`, never "array".
        count: of items.
        path, offset, nbytes: where the items lie, strings with their lengths before them.
    """

    item_type: str
    count: int
    path: Path
    offset: int
    nbytes: int

    def values(self) -> NDArray[Any] | list[str]:  # (count,)
        """The items: text as a list, numbers and booleans as an array."""
        return self.strings() if self.item_type == ITEM_TYPES[STRING].name else self.numbers()

    def numbers(self) -> NDArray[Any]:  # (count,)
        """The items of an array of numbers or booleans."""
        kind = next(kind for kind in ITEM_TYPES.values() if kind.name == self.item_type)
        if kind.number == STRING:
            raise damaged(self.path, "an array that should hold numbers holds text")
        items = np.frombuffer(self._bytes(), kind.dtype)  # (count,)
        return items.astype(np.bool_) if kind.number == BOOL else items

    def strings(self) -> list[str]:
        """The items of an array of text."""
        try:
            return [spelling.decode("utf-8") for spelling in self.spellings()]
        except UnicodeDecodeError as error:
            raise damaged(self.path, "it changed while it was read") from error

    def spellings(self) -> Iterator[bytes]:
        """The items of an array of text one by one, in UTF-8."""
        if self.item_type != ITEM_TYPES[STRING].name:
            raise damaged(self.path, "an array that should hold text holds numbers")
        data, at = self._bytes(), 0
        for _ in range(self.count):
            start = at + _LENGTH.size
            if start > len(data):
                raise damaged(self.path, "it changed while it was read")
            at = start + _LENGTH.unpack_from(data, at)[0]
            yield data[start:at]

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


class Metadata(Mapping[str, Value]):
    """Keys and values of a file, with look-ups that insist on a type.

    All of them raise BundleError where the value is of another type, or is not there and has no default.
    """

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
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
        """Yes or no."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise damaged(self._path, f"{key} is neither true nor false")
        return value

    def array(self, key: str, *item_types: str) -> GgufArray:
        """An array whose items are of one of the types."""
        value = self._value(key, None)
        if not isinstance(value, GgufArray) or value.item_type not in item_types:
            raise damaged(self._path, f"{key} is not an array of {' or '.join(item_types)}")
        return value

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise damaged(self._path, f"it does not say {key}")
        return value
