"""What settings were tuned on and for, so that another machine, version or model does not take them for its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass
from typing import Self

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.errors import UsageError
from edgeinfer.runtime.system.machine import physical_cores, processor_name, usable_processors
from edgeinfer.version import VERSION

__all__ = ["Fingerprint", "model_digest"]

_MOST_TEXT = 256
# What a user would call that in which two fingerprints differ.
_WORDS = {
    "processor": "processor",
    "cores": "number of cores",
    "processors": "number of processors",
    "system": "system",
    "edgeinfer": "version of edgeinfer",
    "engine": "version of the engine",
    "kernel": "kernel",
}


def model_digest(bundle: Bundle, layout: Layout, backend: str, device: str, exact: bool) -> str:
    """Of a model as it runs: settings are kept under it, and are no other's."""
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    key = json.dumps([files, layout, backend, device, exact], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """A machine, and the versions of what runs on it.

    Attributes:
        processor: its name.
        cores: physical ones.
        processors: threads that this process may run on at once.
        system: name and architecture.
        edgeinfer: version.
        engine: name and version of the library that runs the model.
        kernel: what multiplies.

    Raises:
        UsageError: a value of another type, or out of all proportion.
    """

    processor: str
    cores: int
    processors: int
    system: str
    edgeinfer: str
    engine: str
    kernel: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("cores", "processors"):
                fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            else:
                fits = isinstance(value, str) and len(value) <= _MOST_TEXT
            if not fits:
                raise UsageError(f"{field.name} of the machine is {str(value)[:40]!r}.")

    @classmethod
    def here(cls, engine: str, kernel: str) -> Self:
        """Of this machine."""
        return cls(
            processor=processor_name()[:_MOST_TEXT],
            cores=physical_cores(),
            processors=len(usable_processors()),
            system=f"{platform.system()} {platform.machine()}"[:_MOST_TEXT],
            edgeinfer=VERSION,
            engine=engine[:_MOST_TEXT],
            kernel=kernel[:_MOST_TEXT],
        )

    def difference(self, other: Fingerprint) -> str:
        """In what the other differs, in words: `another processor (A, not B)`; "" if in nothing."""
        for name, word in _WORDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"another {word} ({theirs}, not {mine})"
        return ""

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `dataclasses.asdict` gave.

        Raises:
            UsageError: anything is unknown, missing or of another type.
        """
        if not isinstance(data, dict) or set(data) != {field.name for field in dataclasses.fields(cls)}:
            raise UsageError("The machine is not described as expected.")
        return cls(**data)
