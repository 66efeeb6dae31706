"""The files of messages in the history's database: there from the moment they are attached, so that a draft's files
survive a restart, handed over to the message when it is sent, or kept for messages to come."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from edgeinfer.apps.desktop.checks import NotFoundError
from edgeinfer.apps.desktop.database import Database
from edgeinfer.apps.desktop.records import Attachment
from edgeinfer.errors import UsageError

MOST_ATTACHMENTS = 10
# Of all files of a message together: some 100,000 tokens, more than models on a device hold.
MOST_CHARACTERS = 400_000
# Files that were never sent are kept for so long.
_DRAFT_S = 7 * 24 * 3600.0
_COLUMNS = "id, name, kind, bytes, content, pages, document, tokens"
# Files that are kept for messages to come.
MOST_KEPT = 100
_DRAFT = "message IS NULL AND document IS NOT id"


class Attachments:
    """The table of files; every method may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        if database.rows(f"SELECT 1 FROM attachments WHERE {_DRAFT} AND created < ? LIMIT 1", (_oldest(),)):
            with database.transaction() as connection:
                connection.execute(f"DELETE FROM attachments WHERE {_DRAFT} AND created < ?", (_oldest(),))

    def add(self, attachment: Attachment) -> None:
        """Takes a file whose message has not been sent yet."""
        with self._database.transaction() as connection:
            insert(connection, None, attachment)

    def get(self, id: str) -> Attachment:
        """One file."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM attachments WHERE id = ?", (id,))
        if not rows:
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        return Attachment(**dict(rows[0]))

    def discard(self, id: str) -> None:
        """Forgets a file that was not sent; one that was, is kept, or is not there, is left as it is."""
        with self._database.transaction() as connection:
            connection.execute(f"DELETE FROM attachments WHERE id = ? AND {_DRAFT}", (id,))

    def require_room(self, id: str) -> None:
        """Checks that a file can be kept for later."""
        if not self._database.rows("SELECT 1 FROM attachments WHERE id = ? AND message IS NULL", (id,)):
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        if len(self.kept_ids()) >= MOST_KEPT:
            raise UsageError(f"{MOST_KEPT} files are kept already.", "Remove one of them first.")

    def keep(self, id: str, tokens: int) -> Attachment:
        """Keeps a file that was not sent for messages to come."""
        with self._database.transaction() as connection:
            done = connection.execute(
                "UPDATE attachments SET document = id, tokens = ? WHERE id = ? AND message IS NULL", (tokens, id)
            )
        if done.rowcount == 0:
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        return self.get(id)

    def kept(self) -> list[Attachment]:
        """The files that are kept for messages to come, in the order in which they were attached."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM attachments WHERE document = id ORDER BY number")
        return [Attachment(**dict(row)) for row in rows]

    def kept_ids(self) -> frozenset[str]:
        """Their ids alone."""
        return frozenset(row["id"] for row in self._database.rows("SELECT id FROM attachments WHERE document = id"))

    def remove(self, id: str, forget: Callable[[Attachment], None]) -> None:
        """Keeps a file no longer; messages that were sent with it have their own copy."""
        if id not in self.kept_ids():
            raise NotFoundError("There is no such kept file.", "It may already have been removed.")
        forget(self.get(id))
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM attachments WHERE document = id AND id = ?", (id,))

    def chosen(self, ids: Sequence[str]) -> tuple[Attachment, ...]:
        """The files of a message that is about to be sent."""
        if len(ids) > MOST_ATTACHMENTS:
            message = f"A message takes at most {MOST_ATTACHMENTS} files, and these are {len(ids)}."
            raise UsageError(message, "Remove some of them.")
        found = tuple(map(self.get, dict.fromkeys(ids)))
        characters = sum(len(each.content) for each in found)
        if characters > MOST_CHARACTERS:
            message = f"The files have {characters:,} characters together; a message takes {MOST_CHARACTERS:,}."
            raise UsageError(message, "Remove some of them, or attach a part.")
        return found

    def of(self, conversation: str) -> dict[str, tuple[Attachment, ...]]:
        """The files of a conversation by their message, in the order in which they were attached."""
        names = ", ".join(f"attachments.{name}" for name in _COLUMNS.split(", "))
        rows = self._database.rows(
            f"SELECT message, {names} FROM attachments JOIN messages ON messages.id = attachments.message"
            " WHERE conversation = ? ORDER BY attachments.number",
            (conversation,),
        )
        found: dict[str, tuple[Attachment, ...]] = {}
        for row in map(dict, rows):
            message = row.pop("message")
            found[message] = (*found.get(message, ()), Attachment(**row))
        return found


def insert(connection: sqlite3.Connection, message: str | None, attachment: Attachment) -> None:
    """Keeps a file with its message, inside the caller's transaction; one that waited for its message gets it."""
    a = attachment
    done = connection.execute(
        "INSERT INTO attachments (id, message, name, kind, bytes, pages, content, created, document, tokens)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET message = excluded.message WHERE message IS NULL",
        (a.id, message, a.name, a.kind, a.bytes, a.pages, a.content, time.time(), a.document, a.tokens),
    )
    if done.rowcount == 0:
        raise NotFoundError(f"{a.name} has been sent with another message.", "Attach it again.")


def _oldest() -> float:
    return time.time() - _DRAFT_S
