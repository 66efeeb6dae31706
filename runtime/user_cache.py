"""The folder where this user's programs keep what they can make again; knows nothing of what is kept there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edgeinfer.errors import StorageError

__all__ = ["user_cache"]


def user_cache() -> Path:
    """The folder, by the custom of the operating system; it need not exist.

    Raises:
        StorageError: this user has no home folder.
    """
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise StorageError("This user has no home folder.", "Set HOME to one that can be written.") from error
