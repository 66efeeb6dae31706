"""Settings that tuning may change, and the machine and model that they were tuned for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from typing import Any, Self

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.system.machine import processor_name, usable_cores, usable_processors
from edgeinfer.version import VERSION

# Of WEIGHTS_MODES: the others are concessions to a budget.
TUNED_WEIGHTS = ("packed", "mapped")
_MOST_THREADS, _FEWEST_CHUNK, _MOST_CHUNK = 1024, 8, 4096
# onnxruntime's own form: lists of processors, counted from 1, for every thread but the one that calls.
_AFFINITY = re.compile(r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*(;[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*)*")
_MOST_AFFINITY = 16_384
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


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise UsageError(f"A tuned {name} of {str(value)[:40]!r} is not valid.", f"It must be {rule}.")


def _between(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class TunedSettings:
    """Settings of a model on a device; None leaves one as it is without tuning.

    Attributes:
        threads: of the linear algebra.
        affinity: processors of these threads, as onnxruntime's session.intra_op_thread_affinities; "" leaves them to
            the system.
        prefill_chunk: tokens of a prompt evaluated per pass, where there is memory for it.
        weights: one of TUNED_WEIGHTS, where there is memory for it.

    Raises:
        UsageError: a value is impossible.
    """

    threads: int | None = None
    affinity: str = ""
    prefill_chunk: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        fits = self.threads is None or _between(self.threads, 1, _MOST_THREADS)
        _require(fits, "threads", self.threads, f"from 1 to {_MOST_THREADS}")
        chunk = self.prefill_chunk
        fits = chunk is None or _between(chunk, _FEWEST_CHUNK, _MOST_CHUNK)
        _require(fits, "prefill_chunk", chunk, f"from {_FEWEST_CHUNK} to {_MOST_CHUNK}")
        known = f"one of {', '.join(TUNED_WEIGHTS)}"
        _require(self.weights is None or self.weights in TUNED_WEIGHTS, "weights", self.weights, known)
        text = self.affinity
        fits = isinstance(text, str) and len(text) <= _MOST_AFFINITY
        fits = fits and (not text or _AFFINITY.fullmatch(text) is not None)
        _require(fits, "affinity", text, "lists of processors, such as 2;3;4")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the settings that differ from the usual ones."""
        return tuple(name for name, value in self.to_dict().items() if value not in (None, ""))

    def beside(self, config: LoadConfig, proved_with: int) -> TunedSettings:
        """Those that hold beside what the caller set himself, which is never overridden.

        Args:
            proved_with: threads that the settings were proved with; with another number they were not measured.
        """
        if (config.threads or self.threads or usable_cores()) != proved_with:
            return UNTUNED
        own_weights = config.weights is not None or config.expert_memory is not None
        return dataclasses.replace(
            self,
            threads=None if config.threads is not None else self.threads,
            prefill_chunk=None if config.prefill_chunk is not None else self.prefill_chunk,
            weights=None if own_weights else self.weights,
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts it to JSON's types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave.

        Raises:
            UsageError: anything is unknown, missing or impossible.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            strange = sorted(set(data) ^ names) if isinstance(data, Mapping) else ["no object"]
            raise UsageError(f"Tuned settings are not as expected: {', '.join(map(str, strange))[:80]}.")
        return cls(**data)


UNTUNED = TunedSettings()


def model_digest(bundle: Bundle, layout: Layout, backend: str, device: str, exact: bool) -> str:
    """A digest of a model and of how it runs, under which its settings are kept."""
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    key = json.dumps([files, layout, backend, device, exact], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """A machine, and the versions of what runs on it.

    Attributes:
        processor: its name.
        cores: that this process can keep busy.
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
        """Describes this machine."""
        return cls(
            processor=processor_name()[:_MOST_TEXT],
            cores=usable_cores(),
            processors=len(usable_processors()),
            system=f"{platform.system()} {platform.machine()}"[:_MOST_TEXT],
            edgeinfer=VERSION,
            engine=engine[:_MOST_TEXT],
            kernel=kernel[:_MOST_TEXT],
        )

    def difference(self, other: Fingerprint) -> str:
        """Says in words what differs: `another processor (A, not B)`; "" where nothing does."""
        for name, word in _WORDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"another {word} ({theirs}, not {mine})"
        return ""

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `dataclasses.asdict` gave."""
        if not isinstance(data, dict) or set(data) != {field.name for field in dataclasses.fields(cls)}:
            raise UsageError("The machine is not described as expected.")
        return cls(**data)
