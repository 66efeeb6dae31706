"""One SQLite file with one connection and a lock around it; knows nothing of the tables beyond how they are made.

Every change is on disk when its transaction returns: a killed process or a power cut loses none, and leaves no half of
one. Another process may use the same file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from edgeinfer.apps.desktop.errors import DiskFullError
from edgeinfer.apps.desktop.reserve import Reserve
from edgeinfer.apps.desktop.schema import VERSION, migrate, version_of
from edgeinfer.errors import StorageError

__all__ = ["Database"]

# Another process holds the file for a few milliseconds at a time.
_BUSY_S = 15.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Files that SQLite keeps beside a database, which belong to it.
_BESIDE = ("-wal", "-shm")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODE = 0xFF  # the primary part of an extended result code


class Database:
    """An open database file.

    Attributes:
        path: of the file.
        put_aside: where a damaged file was moved to; None where there was none.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, put_aside: Path | None) -> None:
        self.path = path
        self.put_aside = put_aside
        self._connection = connection
        self._lock = threading.RLock()
        self._reserve = Reserve(path.with_suffix(".reserve"))
        self._reserve.keep()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a file, or makes one that only this user can read; a damaged one is renamed, and a new one begun.

        Raises:
            StorageError: the file cannot be opened or written, or a newer edgeinfer wrote it.
        """
        with _storage_errors(path):
            try:
                return cls(path, _open(path), None)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
            aside = _put_aside(path)
            return cls(path, _open(path), aside)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Changes that are kept together, or not at all where the block raises.

        Raises:
            DiskFullError: there is no room for them.
            StorageError: they cannot be written.
        """
        with self._lock, _storage_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite itself has already rolled back where the disk was full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """What a query finds."""
        with self._lock, _storage_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def emptying(self) -> Iterator[None]:
        """Has room for small changes that free some, though the disk is full: what is put by for that is given up
        inside the block. Each should be a transaction of its own, with `settle` after it."""
        with self._lock:
            self._reserve.release()
            try:
                self.settle()
                yield
                self.settle()
            finally:
                self._reserve.keep()

    def settle(self) -> None:
        """Moves what is in the journal to its place and cuts the journal off, as far as that can be done now."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()


def _open(path: Path) -> sqlite3.Connection:
    # SQLite gives the files beside a database the mode of the database itself.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    connection.create_function("folded", 1, lambda text: str(text).casefold(), deterministic=True)
    if version_of(connection) > VERSION:
        message = (
            f"{path} was written by a newer edgeinfer (version {version_of(connection)}, this one knows {VERSION})."
        )
        raise StorageError(message, "Update edgeinfer, or name another folder with --data.")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # What was deleted shall not stay readable in the file.
    connection.execute("PRAGMA secure_delete = ON")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    if version_of(connection) < VERSION:
        connection.execute("BEGIN IMMEDIATE")
        migrate(connection)
        connection.execute("COMMIT")


def _put_aside(path: Path) -> Path:
    """Renames a damaged file and what belongs to it; nothing of it is deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while (
        aside := path.with_name(f"{path.stem}.damaged-{stamp}{f'-{number}' if number else ''}{path.suffix}")
    ).exists():
        number += 1
    path.rename(aside)
    for ending in _BESIDE:
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + ending))
    return aside


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & _CODE) in _DAMAGED


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        if _is_damage(error):
            hint = "Start the app again: it puts the damaged file aside and begins a new one."
            raise StorageError(f"{path} is damaged: {error}.", hint) from error
        if getattr(error, "sqlite_errorcode", 0) & _CODE == sqlite3.SQLITE_FULL:
            raise _full(path) from error
        hint = "Free some space, check its permissions, or name another folder with --data."
        raise StorageError(f"The history {path} cannot be used: {error}.", hint) from error
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path) from error
        hint = "Check its permissions, or name another folder with --data."
        raise StorageError(f"The history {path} cannot be used: {error.strerror or error}.", hint) from error


def _full(path: Path) -> DiskFullError:
    hint = "Free some space, or delete conversations: what they took is used for new ones."
    return DiskFullError(f"The disk is full: nothing more can be kept in {path}.", hint)
