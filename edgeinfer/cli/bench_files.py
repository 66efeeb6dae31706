"""Files that benchmarks write, and lists of numbers they are given; knows nothing of any benchmark."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.bundle.store import storage_errors, write_file
from edgeinfer.errors import StorageError

__all__ = ["numbers", "require_place", "write_text"]


def require_place(*paths: Path | None) -> None:
    """Refuses files in folders that are not there, before anything is measured in vain; None is no file.

    Raises:
        StorageError: there is no such folder.
    """
    for path in paths:
        if path and not path.absolute().parent.is_dir():
            raise StorageError(f"Cannot write {path}: there is no such folder.", "Choose another place.")


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    with storage_errors(path):
        write_file(path, text.encode("utf-8"))


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(int(part) for part in text.split(","))
