"""Where tuned settings are kept, how they are written, and which of them a load is to use.

One file of JSON for each model, in a folder of the user's cache that other users cannot read, or wherever the user
wants it. Nothing read from it is trusted: it is small, has exactly the fields expected, and each is within bounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.config import LoadConfig
from edgeinfer.errors import StorageError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.profile.settings import UNTUNED, Fingerprint, TunedSettings
from edgeinfer.runtime.system.machine import usable_processors
from edgeinfer.user_files import make_private, user_cache, written

_FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
# A profile is a kilobyte; affinities of a thousand threads are ten.
_MOST_BYTES = 1 << 16
_MOST_KEPT = 256
_MOST_TEXT = 256
_log = logging.getLogger("edgeinfer")
# What LoadConfig.profile says to take none.
OFF = "off"
_KEPT_HINT = "Run edgeinfer tune again, or edgeinfer tune --forget."
_FILE_HINT = "Use a file that edgeinfer tune --out wrote on this machine for this model, or off."


@dataclass(frozen=True)
class TunedProfile:
    """Settings, and what they hold for.

    Attributes:
        model: its digest, as `model_digest` gives it.
        name: of the model, for people.
        machine: where they were measured.
        threads: that they were proved with.
        settings: what is better than the usual ones.
        measured: when, UTC, ISO 8601.

    Raises:
        UsageError: a value is impossible.
    """

    model: str
    name: str
    machine: Fingerprint
    threads: int
    settings: TunedSettings
    measured: str

    def __post_init__(self) -> None:
        texts = (self.model, self.name, self.measured)
        fits = all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts)
        if not fits or not _DIGEST.fullmatch(self.model):
            raise UsageError("It does not say which model it is for.")
        # The same bounds as of a setting.
        TunedSettings(threads=self.threads)
        if not isinstance(self.threads, int) or self.settings.threads not in (None, self.threads):
            raise UsageError("It does not say with how many threads it was measured.")
        pinned = self.settings.affinity.count(";") + 2 if self.settings.affinity else self.threads
        if pinned != self.threads:
            raise UsageError(f"It names processors for {pinned} threads, not for {self.threads}.")

    def to_json(self) -> str:
        """The text of its file."""
        return json.dumps({"format": _FORMAT} | dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Takes back what `to_json` gave."""
        data = json.loads(text)
        names = {"format", *(field.name for field in dataclasses.fields(cls))}
        if not isinstance(data, dict) or set(data) != names:
            strange = sorted(set(data) ^ names) if isinstance(data, dict) else ["no object"]
            raise UsageError(f"Its fields are not as expected: {', '.join(strange)[:80]}.")
        fields: dict[str, Any] = dict(data)
        if fields.pop("format") != _FORMAT:
            raise UsageError("It has another format.")
        fields["machine"] = Fingerprint.from_dict(fields["machine"])
        fields["settings"] = TunedSettings.from_dict(fields["settings"])
        return cls(**fields)


def kept_profile(model: str) -> Path:
    """Where this user's profile of a model is kept; it need not exist."""
    return _folder() / f"{model}.json"


def _folder() -> Path:
    return user_cache() / "edgeinfer" / "tuned"


def keep_profile(profile: TunedProfile) -> Path:
    """Keeps a profile for this user's next sessions, in the place of an older one; where."""
    path = kept_profile(profile.model)
    with storage_errors(path.parent):
        make_private(path.parent)
        _make_room(path)
    write_profile(profile, path)
    return path


def write_profile(profile: TunedProfile, path: Path) -> None:
    """Writes a profile, whole or not at all."""
    write_file(path, profile.to_json().encode())


def forget_profile(model: str) -> bool:
    """Removes the kept profile of a model; whether there was one."""
    path = kept_profile(model)
    with storage_errors(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
    return True


def read_profile(path: Path) -> TunedProfile:
    """The profile in a file."""
    try:
        if not path.is_file():
            raise UsageError(f"{path} is not a file.")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{path} is too large for a profile.")
        return TunedProfile.from_json(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except UsageError as error:
        if str(path) in error.message:
            raise
        raise UsageError(f"{path} is not an edgeinfer profile: {error.message}") from error
    # What damage makes json raise; RecursionError of a deeply nested file.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not an edgeinfer profile.") from error


def _make_room(path: Path) -> None:
    """Removes the profiles that were written longest ago beyond a number of them."""
    others = [each for each in path.parent.glob("*.json") if each != path]
    for old in sorted(others, key=written)[: max(0, len(others) + 1 - _MOST_KEPT)]:
        with contextlib.suppress(OSError):
            old.unlink()


def find_settings(config: LoadConfig, model: Callable[[], str], here: Callable[[], Fingerprint]) -> TunedSettings:
    """The settings to load with: of the caller's file, or those kept for this user; beside what the caller set.

    A profile that cannot be used is warned of, and the model runs with the usual settings.

    Args:
        model: gives its digest, where that is needed.
        here: gives the fingerprint of this machine, where that is needed.
    """
    if config.profile == OFF:
        return UNTUNED
    given = config.profile is not None
    try:
        path = Path(config.profile) if config.profile is not None else kept_profile(model())
        if not given and not os.path.lexists(path):
            return UNTUNED
    except StorageError:
        # Without a home folder nothing was tuned.
        return UNTUNED
    try:
        profile = read_profile(path)
        _check(profile, path, model(), here())
    except UsageError as error:
        hint = _FILE_HINT if given else _KEPT_HINT
        _log.warning("%s The default settings are used. %s", error.message, hint)
        return UNTUNED
    settings = profile.settings.beside(config, profile.threads)
    if settings is UNTUNED and profile.settings != UNTUNED:
        # Whoever gave both a file and threads wonders.
        level = logging.WARNING if given else logging.INFO
        text = "The settings in %s were measured with %d threads and do not apply to another number of threads."
        _log.log(level, text, path, profile.threads)
    return settings


def _check(profile: TunedProfile, path: Path, model: str, here: Fingerprint) -> None:
    """Refuses a profile that is not of this model on this machine, or cannot be."""
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
