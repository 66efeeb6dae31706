"""The metadata of a GGUF file's architecture, read key by key: which were asked for, and values of those left out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.core.errors import UnsupportedArchitectureError

LLAMA_HINT = "Run it with llama.cpp: pip install 'edgeinfer[gguf]', then --backend llamacpp."
_WHOLE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def unread(what: str) -> UnsupportedArchitectureError:
    """The refusal of a file that llama.cpp may run: names a key, a tensor or a part."""
    return UnsupportedArchitectureError(f"{what if what.isprintable() else ascii(what)}.", LLAMA_HINT)


def written(value: float) -> float:
    """The shortest number whose float32 a file has: 1e-06 instead of 9.999999974752427e-07."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if float(np.float32(value)) == value else value


class GgufKeys:
    """Keys of an architecture by their names without it.

    Args:
        defaults: what llama.cpp takes where a file leaves a key out, and asks for it nevertheless.
    """

    def __init__(self, gguf: GgufFile, architecture: str, defaults: Mapping[str, float]) -> None:
        self.tensors = gguf.by_name  # of the file
        self.metadata, self._root, self._defaults = gguf.metadata, f"{architecture}.", defaults
        self._seen: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._root + name in self.metadata

    @property
    def left(self) -> list[str]:
        """Keys of the architecture that were not asked for."""
        return sorted(key for key in self.metadata if key.startswith(self._root) and key not in self._seen)

    def integer(self, name: str, default: int | None = None) -> int:
        usual = self._defaults.get(name, default)
        return self.metadata.integer(self._key(name), None if usual is None else int(usual))

    def number(self, name: str, default: float | None = None) -> float:
        usual, key = self._defaults.get(name, default), self._key(name)
        return float(usual) if usual is not None and key not in self.metadata else written(self.metadata.number(key))

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self.metadata.flag(self._key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        return self.metadata.text(self._key(name), default)

    def by_layer(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """A whole number for each layer, which a file may give once for all."""
        if not self.is_array(name):
            return [self.integer(name, default)] * layers
        values = self.metadata.array(self._key(name), *_WHOLE).numbers()
        if len(values) < layers or min(values, default=0) < 0:
            raise unread(f"{self._root}{name} has {len(values)} numbers for {layers} layers")
        return [int(value) for value in values[:layers]]

    def flags(self, name: str, layers: int) -> list[bool]:
        values = self.metadata.array(self._key(name), "bool", *_WHOLE).numbers()
        if len(values) < layers:
            raise unread(f"{self._root}{name} has {len(values)} values for {layers} layers")
        return [bool(value) for value in values[:layers]]

    def numbers(self, name: str, layers: int) -> list[float]:
        """A number for each layer, which a file may give once for all."""
        if not self.is_array(name):
            return [self.number(name)] * layers
        values = self.metadata.array(self._key(name), "float32", "float64").numbers()
        if len(values) < layers:
            raise unread(f"{self._root}{name} has {len(values)} numbers for {layers} layers")
        return [written(float(value)) for value in values[:layers]]

    def is_array(self, name: str) -> bool:
        return isinstance(self.metadata.get(self._root + name), GgufArray)

    def expect(self, name: str, *values: float | str | bool) -> None:
        """Refuses a key that says something other than these values, where the file has it."""
        found = self.metadata.get(self._key(name), values[0])
        if found not in values:
            raise unread(f"{self._root}{name} is {found}")

    def ignore(self, *names: str) -> None:
        """Keys that say nothing on what is computed."""
        self._seen.update(self._root + name for name in names)

    def _key(self, name: str) -> str:
        self._seen.add(self._root + name)
        return self._root + name
