"""The folders of this user: what programs can make again, and what is the user's own."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from edgeinfer.errors import StorageError


def user_cache() -> Path:
    """The folder of what programs can make again, by the custom of the operating system; it need not exist."""
    return _folder("XDG_CACHE_HOME", Path(".cache"), "Caches", "Set HOME to one that can be written.")


def user_data() -> Path:
    """The folder of what is the user's own, by the custom of the operating system; it need not exist."""
    hint = "Set HOME, or name a folder with --data."
    return _folder("XDG_DATA_HOME", Path(".local", "share"), "Application Support", hint)


def make_private(folder: Path) -> None:
    """Makes a folder this user's own; one that is not is refused."""
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


def _folder(variable: str, usual: Path, mac: str, hint: str) -> Path:
    # platformdirs follows XDG's variables on macOS too, asks Windows before LOCALAPPDATA, and makes a folder named "~"
    # where there is no home: files that lie in these folders already would not be found again.
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        if sys.platform == "darwin":
            return Path.home() / "Library" / mac
        return Path(os.environ.get(variable) or Path.home() / usual)
    except RuntimeError as error:
        raise StorageError("This user has no home folder.", hint) from error
