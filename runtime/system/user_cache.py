"""The folder where this user's programs keep what they can make again."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from edgeinfer.errors import StorageError

__all__ = ["make_private", "user_cache", "written"]


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


def make_private(folder: Path) -> None:
    """Makes a folder this user's own; one that is not is refused.

    Raises:
        StorageError: it is no folder, or another user's.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{folder} is not a folder.", "Remove it.")
    if sys.platform != "win32":
        if status.st_uid != os.getuid():
            raise StorageError(f"{folder} is another user's.", "Remove it.")
        if stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)


def written(path: Path) -> float:
    """When a file or folder was last written, in seconds, by which the oldest make room; 0 where nothing tells."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise StorageError("This user has no home folder.", "Set HOME to one that can be written.") from error
