"""Tokens on disk, read where they are needed and never all at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.writing import new_file
from edgeinfer.errors import StorageError, UsageError

__all__ = ["TokenFile", "open_tokens", "write_tokens"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenFile:
    """Documents one after the other, mapped into memory.

    Attributes:
        ids: of all. (T,)
        digest: of them.
    """

    ids: NDArray[np.uint32]
    digest: str

    def __len__(self) -> int:
        return len(self.ids)

    def require(self, count: int, what: str) -> None:
        """Refuses too little data.

        Raises:
            UsageError: there are fewer tokens than `count`.
        """
        if len(self) < count:
            raise UsageError(f"{what} has {len(self)} tokens, and {count} are needed.", "Give more text.")

    def first(self, count: int) -> TokenFile:
        """So many of the first tokens, or all."""
        return TokenFile(self.ids[:count], f"{self.digest}[:{min(count, len(self))}]")

    def split(self, share: float) -> tuple[TokenFile, TokenFile]:
        """The first tokens, and the last of so large a share, which are kept for measuring."""
        at = len(self) - int(len(self) * share)
        return TokenFile(self.ids[:at], f"{self.digest}[:{at}]"), TokenFile(self.ids[at:], f"{self.digest}[{at}:]")

    def batch(self, seed: int, step: int, rows: int, length: int) -> Ints:
        """Windows from random places, which the seed and the step decide. (rows, length)"""
        starts = np.random.default_rng((seed, step)).integers(0, len(self) - length + 1, rows)
        return np.stack([self.ids[start : start + length] for start in starts]).astype(np.int64)

    def windows(self, length: int, most: int) -> Ints:
        """Windows spread evenly over all. (n, length)"""
        count = min(most, len(self) // length)
        starts = np.linspace(0, len(self) - length, count).astype(np.int64)
        return np.stack([self.ids[start : start + length] for start in starts]).astype(np.int64)


def write_tokens(path: Path, documents: Iterable[NDArray[np.integer]]) -> TokenFile:  # (n,) each
    """Writes documents one after the other, as they come.

    Raises:
        StorageError: the file cannot be written, or the disk is full.
    """
    with new_file(path) as file:
        for ids in documents:
            file.write(ids.astype("<u4").tobytes())
    return open_tokens(path)


def open_tokens(path: Path) -> TokenFile:
    """Maps what `write_tokens` wrote.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        ids = np.memmap(path, np.dtype("<u4"), "r") if path.stat().st_size else np.empty(0, np.uint32)
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read {path}: {error}.", "Remove it; it is made again.") from error
    return TokenFile(ids, digest)
