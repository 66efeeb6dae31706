"""The SQLite file of the history: its tables and search index, transactions, damaged files set aside, and disk space
reserved for deleting."""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from edgeinfer.apps.desktop.checks import DiskFullError
from edgeinfer.core.errors import StorageError

# Other processes lock the file for a few milliseconds at a time.
_BUSY_S = 15.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Files that SQLite keeps next to a database.
_JOURNALS = ("-wal", "-shm")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODE = 0xFF  # the primary part of an extended result code


class Database:
    """An open database file."""

    def __init__(self, path: Path, connection: sqlite3.Connection, put_aside: Path | None) -> None:
        self.path = path
        self.put_aside = put_aside  # where a damaged file was moved; None if there was none
        self._connection = connection
        self._lock = threading.RLock()
        self._reserve = Reserve(path.with_suffix(".reserve"))
        self._reserve.keep()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file, or create one that only this user can read; rename a damaged one and start an empty one."""
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
        """Commit all changes of the block, or none if it raises."""
        with self._lock, _storage_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back already if the disk was full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Commit one statement; return how many rows it changed."""
        with self.transaction() as connection:
            return connection.execute(sql, values).rowcount

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock, _storage_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def emptying(self) -> Iterator[None]:
        """Release the reserve inside the block, so that small deletions succeed on a full disk. Each should be a
        transaction of its own, followed by `checkpoint`."""
        with self._lock:
            self._reserve.release()
            try:
                self.checkpoint()
                yield
                self.checkpoint()
            finally:
                self._reserve.keep()

    def checkpoint(self) -> None:
        """Move the journal's content to the file and truncate the journal, as far as possible now."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _open(path: Path) -> sqlite3.Connection:
    # SQLite gives its other files the mode of the database.
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
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):  # 0 is an empty file
        message = f"{path} was written by another edgeinfer (version {version}; this one reads version {VERSION})."
        raise StorageError(message, "Use that edgeinfer, or name another folder with --data.")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # Deleted text must not stay readable in the file.
    connection.execute("PRAGMA secure_delete = ON")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    if version == 0:
        tables = importlib.resources.files("edgeinfer.apps.desktop").joinpath("schema.sql").read_text("utf-8")
        connection.executescript(f"BEGIN IMMEDIATE; {tables} PRAGMA user_version = {VERSION}; COMMIT;")


def _put_aside(path: Path) -> Path:
    """Rename a damaged file and its journal."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while (
        aside := path.with_name(f"{path.stem}.damaged-{stamp}{f'-{number}' if number else ''}{path.suffix}")
    ).exists():
        number += 1
    path.rename(aside)
    for ending in _JOURNALS:
        journal = path.with_name(path.name + ending)
        if journal.exists():
            journal.rename(aside.with_name(aside.name + ending))
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
            hint = "Start the app again: it puts the damaged file aside and starts a new one."
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


# Deleting the longest message, a million characters, writes twice as much to the journal: zeros over its text, and
# changes of the index.
RESERVE_BYTES = 8 * 1024**2
# Room for SQLite's journal, which grows to this size.
_JOURNAL_BYTES = 4 * 1024**2
_CHUNK = bytes(1024**2)


class Reserve:
    """A file without content, deleted when other writes need its room."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Write the file, as large as there is room."""
        with contextlib.suppress(OSError):
            kept = self._path.stat().st_size if self._path.exists() else 0
            free = shutil.disk_usage(self._path.parent).free + kept
            size = min(RESERVE_BYTES, free - _JOURNAL_BYTES) // len(_CHUNK) * len(_CHUNK)
            if size > kept:
                self._write(size)

    def release(self) -> None:
        """Delete the file."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, size: int) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                # Written out, as a sparse file takes no room.
                for _ in range(size // len(_CHUNK)):
                    file.write(_CHUNK)
        except OSError:
            self.release()


VERSION = 4
_SHORTEST_INDEXED = 3
_MOST_WORDS = 16
_SNIPPET_BEFORE, _SNIPPET_AFTER = 40, 100

_TRIGGERS = {
    "messages_found_insert": """
        AFTER INSERT ON messages BEGIN
            INSERT INTO found (rowid, content) VALUES (new.number, new.content);
        END""",
    "messages_found_delete": """
        AFTER DELETE ON messages BEGIN
            INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
        END""",
    "messages_found_update": """
        AFTER UPDATE OF content ON messages BEGIN
            INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
            INSERT INTO found (rowid, content) VALUES (new.number, new.content);
        END""",
}


def prepare_search(database: Database) -> bool:
    """Create the index if it is missing; return whether there is one. Without FTS5 the triggers are dropped, so that a
    file from another machine stays writable; it is indexed again there."""
    with database.transaction() as connection:
        if not _has_fts5(connection):
            for name in _TRIGGERS:
                connection.execute(f"DROP TRIGGER IF EXISTS {name}")
            return False
        names = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master")}
        if {"found", *_TRIGGERS} <= names:
            return True
        connection.execute("DROP TABLE IF EXISTS found")
        connection.execute(
            "CREATE VIRTUAL TABLE found"
            " USING fts5 (content, content = 'messages', content_rowid = 'number', tokenize = 'trigram')"
        )
        connection.execute("INSERT INTO found (found) VALUES ('rebuild')")
        for name, body in _TRIGGERS.items():
            connection.execute(f"DROP TRIGGER IF EXISTS {name}")
            connection.execute(f"CREATE TRIGGER {name} {body}")
        return True


def _has_fts5(connection: sqlite3.Connection) -> bool:
    """Whether SQLite has FTS5 with the trigram tokenizer."""
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.probe USING fts5 (content, tokenize = 'trigram')")
    except sqlite3.OperationalError:
        return False
    connection.execute("DROP TABLE temp.probe")
    return True


def find_conversations(database: Database, text: str, *, indexed: bool) -> dict[str, str]:
    """Find conversations with every word of a text in their title, in one message or in a file name. Maps each to that
    message or name, or to "" for the title. Words match inside longer ones, in any case; the index holds runs of three
    characters, and shorter words are searched for text by text."""
    words = text.split()[:_MOST_WORDS]
    titles = " AND ".join("instr(folded(title), ?)" for _ in words)
    folded = [word.casefold() for word in words]
    hits = {row["id"]: "" for row in database.rows(f"SELECT id FROM conversations WHERE {titles}", folded)}
    in_index = [word for word in words if indexed and len(word) >= _SHORTEST_INDEXED]
    rest = [word.casefold() for word in words if word not in in_index]
    conditions = ["instr(folded(content), ?)" for _ in rest]
    if in_index:
        conditions.insert(0, "number IN (SELECT rowid FROM found WHERE found MATCH ?)")
    quoted = ['"' + word.replace('"', '""') + '"' for word in in_index]
    values = ([" AND ".join(quoted)] if in_index else []) + rest
    query = f"SELECT conversation, content FROM messages WHERE {' AND '.join(conditions)} ORDER BY number"
    for row in database.rows(query, values):
        hits.setdefault(row["conversation"], row["content"])
    names = " AND ".join("instr(folded(name), ?)" for _ in words)
    query = f"SELECT conversation, name FROM attachments JOIN messages ON messages.id = message WHERE {names}"
    for row in database.rows(query, folded):
        hits.setdefault(row["conversation"], row["name"])
    return hits


def snippet(content: str, text: str) -> str:
    """The part of a message around the first search word."""
    words, folded = text.casefold().split()[:_MOST_WORDS], content.casefold()
    # Folding may lengthen a text; a snippet that is off by some characters does no harm.
    places = [place for word in words if (place := folded.find(word)) >= 0]
    start = max(0, min(places, default=0) - _SNIPPET_BEFORE)
    end = start + _SNIPPET_BEFORE + _SNIPPET_AFTER
    piece = " ".join(content[start:end].split())
    return f"{'…' if start else ''}{piece}{'…' if end < len(content) else ''}"
