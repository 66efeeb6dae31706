"""This user's folders, and the encodings of text files that users give."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from pathlib import Path

from edgeinfer.core.errors import PromptError, StorageError


def user_cache() -> Path:
    """The operating system's folder for data that programs can recreate; it need not exist."""
    return _folder("XDG_CACHE_HOME", Path(".cache"), "Caches", "Set HOME to one that can be written.")


def user_data() -> Path:
    """The operating system's folder for the user's own data; it need not exist."""
    hint = "Set HOME, or name a folder with --data."
    return _folder("XDG_DATA_HOME", Path(".local", "share"), "Application Support", hint)


def make_private(folder: Path) -> None:
    """Make a folder that only this user can read; refuse another user's."""
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
    """When a file or folder was last written, in seconds; 0 where it is unknown."""
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


# UTF-32's first mark begins with UTF-16's. PowerShell 5 writes UTF-16 by default.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Bytes to search for zeros: about half of UTF-16 are, and none of UTF-8 text.
_LOOKED_AT = 4096
_ZEROS = 0.2


def marked_encoding(data: bytes) -> str | None:
    """The encoding of a byte order mark at the start; None where there is none."""
    return next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)


def decode_text(data: bytes, source: object) -> str:
    """Decode text by its byte order mark, or as UTF-8; errors name it `source`."""
    encoding = marked_encoding(data) or "utf-8"
    known = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
    head = data[:_LOOKED_AT]
    if encoding == "utf-8" and head.count(0) > _ZEROS * len(head):
        message = f"{source} is not UTF-8 text: it may be UTF-16 without a byte order mark."
        raise PromptError(message, "Save it as UTF-8, for example with iconv -f UTF-16LE -t UTF-8.")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        hint = "Save it as UTF-8, for example with iconv -t UTF-8."
        raise PromptError(f"{source} is not {known} text (byte {error.start}).", hint) from error
