"""Room on the disk that is kept for deleting when there is none left; knows nothing of what is deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["RESERVE_BYTES", "Reserve"]

# Deleting the longest message, a million characters, writes twice as much to the journal: zeros over its text, and what
# takes its words out of the index.
RESERVE_BYTES = 8 * 1024**2
# What SQLite's journal grows to before it begins anew: left to it.
_JOURNAL_BYTES = 4 * 1024**2
_CHUNK = bytes(1024**2)


class Reserve:
    """A file of nothing that is given up for what must be written.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Puts the room by, or less where there is not enough of it."""
        with contextlib.suppress(OSError):
            kept = self._path.stat().st_size if self._path.exists() else 0
            free = shutil.disk_usage(self._path.parent).free + kept
            size = min(RESERVE_BYTES, free - _JOURNAL_BYTES) // len(_CHUNK) * len(_CHUNK)
            if size > kept:
                self._write(size)

    def release(self) -> None:
        """Gives the room to whoever writes next."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, size: int) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                # Written, as a file that is merely long takes no room.
                for _ in range(size // len(_CHUNK)):
                    file.write(_CHUNK)
        except OSError:
            self.release()
