"""Files that benchmarks write, and lists of numbers they are given; knows nothing of any benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.apps.cli.parser import command_line
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.errors import StorageError

__all__ = ["names", "numbers", "require_place", "write_results", "write_text"]


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


def write_results(path: Path | None, benchmark: str, data: Mapping[str, Any]) -> None:
    """Writes figures as JSON behind what they depend on: machine, versions, date and the running command.

    Args:
        path: None writes nothing.
        benchmark: its name.

    Raises:
        StorageError: it cannot be written.
    """
    from edgeinfer.apps.bench.environment import run_header

    if path:
        write_text(path, json.dumps({**run_header(benchmark, command_line()), **data}, indent=1) + "\n")


def names(text: str) -> tuple[str, ...]:
    """Words, separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(int(part) for part in text.split(","))
