"""Finds the tuned settings that a load is to use, and says why it uses none; knows nothing of how they were found."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from edgeinfer.config import LoadConfig
from edgeinfer.errors import StorageError, UsageError
from edgeinfer.runtime.profile.fingerprint import Fingerprint
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.profile.store import TunedProfile, kept_profile, read_profile
from edgeinfer.runtime.system.machine import usable_processors

__all__ = ["OFF", "find_settings"]

_log = logging.getLogger("edgeinfer")

# What LoadConfig.profile says to take none.
OFF = "off"
_KEPT_HINT = "Run edgeinfer tune again, or edgeinfer tune --forget."
_FILE_HINT = "Give a file that edgeinfer tune --out wrote here for this model, or --profile off."


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
        # Nobody who has no home folder tuned anything.
        return UNTUNED
    try:
        profile = read_profile(path)
        _check(profile, path, model(), here())
    except UsageError as error:
        hint = _FILE_HINT if given else _KEPT_HINT
        _log.warning("%s The usual settings are used. %s", error.message, hint)
        return UNTUNED
    settings = profile.settings.beside(config, profile.threads)
    if settings is UNTUNED and profile.settings != UNTUNED:
        # Whoever gave both a file and threads wonders.
        level = logging.WARNING if given else logging.INFO
        text = "The settings in %s were measured with %d threads and are left out with others."
        _log.log(level, text, path, profile.threads)
    return settings


def _check(profile: TunedProfile, path: Path, model: str, here: Fingerprint) -> None:
    """Refuses a profile that is not of this model on this machine, or cannot be."""
    if profile.model != model:
        raise UsageError(f"The settings in {path} are of another model ({profile.name}), or of another way to run it.")
    difference = here.difference(profile.machine)
    if difference:
        raise UsageError(f"The settings in {path} were measured with {difference}.")
    processors = usable_processors()
    if (profile.settings.threads or 0) > len(processors):
        message = f"The settings in {path} are for {profile.threads} threads, and {len(processors)} run here at once."
        raise UsageError(message)
    pinned = profile.settings.affinity.replace(";", ",")
    if pinned and not {int(each) - 1 for each in pinned.split(",")} <= set(processors):
        raise UsageError(f"The settings in {path} name processors that are not here.")
