"""Settings that tuning may change, and the machine and model that they were tuned for."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self

from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.core.version import VERSION
from edgeinfer.runtime.profile.kept import KeptFiles
from edgeinfer.runtime.system.machine import processor_name, usable_cores, usable_processors

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
        return tuple(name for name, value in dataclasses.asdict(self).items() if value not in (None, ""))

    def left_open_by(self, config: LoadOptions, proved_with: int) -> TunedSettings:
        """Settings that the caller left open; with other threads than `proved_with`, they were not measured."""
        if (config.threads or self.threads or usable_cores()) != proved_with:
            return UNTUNED
        own_weights = config.weights is not None or config.expert_memory is not None
        return dataclasses.replace(
            self,
            threads=None if config.threads is not None else self.threads,
            prefill_chunk=None if config.prefill_chunk is not None else self.prefill_chunk,
            weights=None if own_weights else self.weights,
        )


UNTUNED = TunedSettings()


@dataclass(frozen=True)
class Fingerprint:
    """A machine, and the versions of what runs on it."""

    processor: str
    cores: int  # that this process can keep busy
    processors: int  # threads that this process may run on at once
    system: str
    edgeinfer: str
    engine: str
    kernel: str  # what multiplies

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (len(value) > _MOST_TEXT) if isinstance(value, str) else value < 1:
                raise UsageError(f"{field.name} of the machine is {str(value)[:40]!r}.")

    @classmethod
    def here(cls, engine: str, kernel: str) -> Self:
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
        """Describe the first difference, as in "another processor (A, not B)"; "" if there is none."""
        for name, word in _WORDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"another {word} ({theirs}, not {mine})"
        return ""


_DIGEST = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger("edgeinfer")
# What LoadOptions.profile says to take none.
OFF = "off"
_KEPT_HINT = "Run edgeinfer tune again, or edgeinfer tune --forget."
_FILE_HINT = "Use a file that edgeinfer tune --out wrote on this machine for this model, or off."


@dataclass(frozen=True)
class TunedProfile:
    """Tuned settings, the model's digest and the machine that they hold for, and when they were measured (UTC, ISO
    8601)."""

    model: str
    name: str
    machine: Fingerprint
    threads: int
    settings: TunedSettings
    measured: str

    def __post_init__(self) -> None:
        fits = all(len(text) <= _MOST_TEXT for text in (self.model, self.name, self.measured))
        if not fits or not _DIGEST.fullmatch(self.model):
            raise UsageError("It does not say which model it is for.")
        # The same bounds as of a setting.
        TunedSettings(threads=self.threads)
        if self.settings.threads not in (None, self.threads):
            raise UsageError("It does not say with how many threads it was measured.")
        pinned = self.settings.affinity.count(";") + 2 if self.settings.affinity else self.threads
        if pinned != self.threads:
            raise UsageError(f"It names processors for {pinned} threads, not for {self.threads}.")


KEPT_SETTINGS = KeptFiles(TunedProfile, "tuned")


def find_settings(config: LoadOptions, model: Callable[[], str], here: Callable[[], Fingerprint]) -> TunedSettings:
    """Find the settings to load with, in the caller's file or kept for this user, except those that the caller set. A
    profile that cannot be used is warned of. `model` gives the digest and `here` the fingerprint when needed."""
    if config.profile == OFF:
        return UNTUNED
    given = config.profile is not None
    try:
        path = Path(config.profile) if config.profile is not None else KEPT_SETTINGS.path(model())
        if not given and not os.path.lexists(path):
            return UNTUNED
    except StorageError:
        # Without a home folder nothing was tuned.
        return UNTUNED
    try:
        profile = KEPT_SETTINGS.read(path)
        _check(profile, path, model(), here())
    except UsageError as error:
        hint = _FILE_HINT if given else _KEPT_HINT
        _log.warning("%s The default settings are used. %s", error.message, hint)
        return UNTUNED
    settings = profile.settings.left_open_by(config, profile.threads)
    if settings is UNTUNED and profile.settings != UNTUNED:
        # Whoever gave both a file and threads wonders.
        level = logging.WARNING if given else logging.INFO
        text = "The settings in %s were measured with %d threads and do not apply to another number of threads."
        _log.log(level, text, path, profile.threads)
    return settings


def _check(profile: TunedProfile, path: Path, model: str, here: Fingerprint) -> None:
    """Refuse a profile of another model or machine."""
    if profile.model != model:
        raise UsageError(
            f"The settings in {path} belong to another model ({profile.name}), or to another way to run it."
        )
    difference = here.difference(profile.machine)
    if difference:
        raise UsageError(f"The settings in {path} were measured with {difference}.")
    processors = usable_processors()
    if (profile.settings.threads or 0) > len(processors):
        message = (
            f"The settings in {path} are for {profile.threads} threads, and only {len(processors)} can run "
            "here at once."
        )
        raise UsageError(message)
    pinned = profile.settings.affinity.replace(";", ",")
    if pinned and not {int(each) - 1 for each in pinned.split(",")} <= set(processors):
        raise UsageError(f"The settings in {path} name processors that are not here.")
