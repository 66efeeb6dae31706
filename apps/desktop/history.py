"""The user's conversations in a database.

A reply's row exists before its first token and grows with the reply. If its program dies, the reply is "interrupted"
when the history is next opened, with the text it had.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from edgeinfer.apps.desktop.checks import DiskFullError, NotFoundError
from edgeinfer.apps.desktop.database import Database, find_conversations, prepare_search, snippet
from edgeinfer.apps.desktop.records import (
    Attachment,
    Conversation,
    Figures,
    Message,
    ModelChoice,
    ReplyFailure,
    Role,
    Status,
    Summary,
    from_json,
)
from edgeinfer.apps.mcp.turns import ToolCall
from edgeinfer.core.errors import UsageError

MOST_ATTACHMENTS = 10
# In all files of a message: some 100,000 tokens, more than models on a device hold.
MOST_CHARACTERS = 400_000
# Seconds for which files of drafts are kept.
_DRAFT_S = 7 * 24 * 3600.0
_COLUMNS = "id, name, kind, bytes, content, pages, document, tokens"
# Most files kept for later messages.
MOST_KEPT = 100
_DRAFT = "message IS NULL AND document IS NOT id"


class Attachments:
    """The files of messages; methods may be called from any thread. Files are stored when they are attached, so that a
    draft's files survive a restart. Sending the message assigns them to it, or they are kept for later messages."""

    def __init__(self, database: Database) -> None:
        self._database = database
        old, oldest = f"{_DRAFT} AND created < ?", time.time() - _DRAFT_S
        if database.rows(f"SELECT 1 FROM attachments WHERE {old} LIMIT 1", (oldest,)):
            database.execute(f"DELETE FROM attachments WHERE {old}", (oldest,))

    def add(self, attachment: Attachment) -> None:
        """Add a file of a draft."""
        with self._database.transaction() as connection:
            insert(connection, None, attachment)

    def get(self, id: str) -> Attachment:
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM attachments WHERE id = ?", (id,))
        if not rows:
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        return Attachment(**dict(rows[0]))

    def discard(self, id: str) -> None:
        """Delete a file of a draft; any other stays."""
        self._database.execute(f"DELETE FROM attachments WHERE id = ? AND {_DRAFT}", (id,))

    def require_room(self, id: str) -> None:
        """Check that a file can be kept for later."""
        if not self._database.rows("SELECT 1 FROM attachments WHERE id = ? AND message IS NULL", (id,)):
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        if len(self.kept_ids()) >= MOST_KEPT:
            raise UsageError(f"{MOST_KEPT} files are kept already.", "Remove one of them first.")

    def keep(self, id: str, tokens: int) -> Attachment:
        """Keep a file of a draft for later messages."""
        statement = "UPDATE attachments SET document = id, tokens = ? WHERE id = ? AND message IS NULL"
        if not self._database.execute(statement, (tokens, id)):
            raise NotFoundError("The attached file is no longer there.", "Attach it again.")
        return self.get(id)

    def kept(self) -> list[Attachment]:
        """The kept files in order of attachment."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM attachments WHERE document = id ORDER BY number")
        return [Attachment(**dict(row)) for row in rows]

    def kept_ids(self) -> frozenset[str]:
        return frozenset(row["id"] for row in self._database.rows("SELECT id FROM attachments WHERE document = id"))

    def remove(self, id: str, forget: Callable[[Attachment], None]) -> None:
        """Stop keeping a file; sent messages have copies of their own."""
        if id not in self.kept_ids():
            raise NotFoundError("There is no such kept file.", "It may already have been removed.")
        forget(self.get(id))
        self._database.execute("DELETE FROM attachments WHERE document = id AND id = ?", (id,))

    def chosen(self, ids: Sequence[str]) -> tuple[Attachment, ...]:
        """Return the files of a message that is about to be sent."""
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
        """The files of a conversation by message, in order of attachment."""
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
    """Insert a file inside the caller's transaction, or assign a draft's file to its message."""
    a = attachment
    done = connection.execute(
        "INSERT INTO attachments (id, message, name, kind, bytes, pages, content, created, document, tokens)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET message = excluded.message WHERE message IS NULL",
        (a.id, message, a.name, a.kind, a.bytes, a.pages, a.content, time.time(), a.document, a.tokens),
    )
    if done.rowcount == 0:
        raise NotFoundError(f"{a.name} has been sent with another message.", "Attach it again.")


_LONGEST_TITLE = 60
_CLOCK_S = 2.0


class History:
    """Conversations in a database. Methods may be called from any thread, and have written to disk when they return."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._indexed = prepare_search(database)
        self.attachments = Attachments(database)
        # Identifies this process, distinct from later ones with the same process id.
        self._holder = f"{os.getpid()}@{psutil.Process().create_time()}"
        self.put_aside = database.put_aside  # where a damaged file was moved; None if there was none
        self._interrupt_lost()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create a history."""
        database = Database.open(path)
        try:
            return cls(database)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        self._database.close()

    def summaries(self, text: str = "") -> list[Summary]:
        """List the conversations, latest first; with `text`, those that contain every word of it."""
        hits = find_conversations(self._database, text, indexed=self._indexed) if text.strip() else None
        rows = self._database.rows(
            "SELECT id, title, created, updated FROM conversations ORDER BY updated DESC, rowid DESC"
        )
        return [
            Summary(**row, snippet=snippet(hits[row["id"]], text) if hits and hits[row["id"]] else "")
            for row in map(dict, rows)
            if hits is None or row["id"] in hits
        ]

    def conversation(self, id: str) -> Conversation:
        """Return a conversation with all its messages."""
        found = self._database.rows("SELECT * FROM conversations WHERE id = ?", (id,))
        if not found:
            raise NotFoundError("There is no such conversation.", "It may have been deleted; open another.")
        rows = self._database.rows("SELECT * FROM messages WHERE conversation = ? ORDER BY number", (id,))
        head, files = dict(found[0]), self.attachments.of(id)
        options, choice = json.loads(head.pop("options")), head.pop("choice")
        return Conversation(
            **head,
            options=options,
            choice=None if choice is None else ModelChoice(**json.loads(choice)),
            messages=tuple(_message(row, files.get(row["id"], ())) for row in rows),
        )

    def create(
        self,
        title: str = "",
        system: str = "",
        options: Mapping[str, Any] | None = None,
        choice: ModelChoice | None = None,
    ) -> Conversation:
        now = time.time()
        made = Conversation(uuid.uuid4().hex, title.strip(), now, now, system, dict(options or {}), choice=choice)
        self.add(made)
        return made

    def add(self, conversation: Conversation) -> None:
        """Insert a whole conversation, whose ids are new."""
        c = conversation
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO conversations (id, title, system, options, leaf, created, updated, choice)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (c.id, c.title, c.system, _json(c.options), c.leaf, c.created, c.updated, _optional_json(c.choice)),
            )
            for message in c.messages:
                self._insert(connection, c.id, message)

    def change(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        leaf: str | None = None,
        choice: ModelChoice | None = None,
    ) -> Conversation:
        """Change the given fields of a conversation; options are merged, and None removes one."""
        given = {"title": title, "system": system, "leaf": leaf, "choice": _optional_json(choice)}
        changes = {name: value for name, value in given.items() if value is not None}
        with self._database.transaction() as connection:
            before = self.conversation(id)
            if leaf is not None:
                self._require(before, leaf)
            if options is not None:
                merged = {**before.options, **options}
                changes["options"] = _json({name: value for name, value in merged.items() if value is not None})
            if changes:
                names = ", ".join(f"{name} = ?" for name in changes)
                connection.execute(f"UPDATE conversations SET {names} WHERE id = ?", (*changes.values(), id))
        return self.conversation(id)

    def delete(self, id: str) -> None:
        """Delete a conversation, even on a full disk."""
        try:
            self._delete(id)
        except DiskFullError:
            with self._database.emptying():
                # Last first: deleting a message deletes all that follow it at once.
                rows = self._database.rows(
                    "SELECT number FROM messages WHERE conversation = ? ORDER BY number DESC", (id,)
                )
                for file in (file for files in self.attachments.of(id).values() for file in files):
                    self._delete_row("attachments", "id", file.id)
                for row in rows:
                    self._delete_row("messages", "number", row["number"])
                self._delete(id)

    def _delete_row(self, table: str, column: str, value: str | int) -> None:
        """Delete a row so that its room can be reused at once."""
        self._database.execute(f"DELETE FROM {table} WHERE {column} = ?", (value,))
        self._database.checkpoint()

    def _delete(self, id: str) -> None:
        if not self._database.execute("DELETE FROM conversations WHERE id = ?", (id,)):
            raise NotFoundError("There is no such conversation.", "It may already have been deleted.")

    def ask(
        self, id: str, parent: str | None, content: str, files: Sequence[str] = (), choice: ModelChoice | None = None
    ) -> tuple[Message, Message]:
        """Add a user's message after `parent`, and the row of its reply."""
        chosen = tuple(file.sent() for file in self.attachments.chosen(files))
        return self._ask(self.conversation(id), parent, content, chosen, choice)

    def _ask(
        self,
        conversation: Conversation,
        parent: str | None,
        content: str,
        files: tuple[Attachment, ...],
        choice: ModelChoice | None,
    ) -> tuple[Message, Message]:
        if parent is not None and self._require(conversation, parent).role == "user":
            raise UsageError("A user's message follows a reply.", "Give the id of a reply as parent, or null.")
        if not content.strip() and not files:
            raise UsageError("The message is empty.", "Write something.")
        asked = dataclasses.replace(_new("user", parent, content), attachments=files)
        reply = _new("assistant", asked.id, "", "replying")
        self._append(conversation, asked, reply, choice=choice)
        return asked, reply

    def edit_question(
        self, id: str, message: str, content: str, choice: ModelChoice | None = None
    ) -> tuple[Message, Message]:
        """Add another version of a user's message with the same files, and the row of its reply."""
        conversation = self.conversation(id)
        old = self._require(conversation, message)
        files = tuple(dataclasses.replace(file, id=uuid.uuid4().hex) for file in old.attachments)
        return self._ask(conversation, old.parent, content, files, choice)

    def edit_reply(self, id: str, message: str, content: str) -> Message:
        """Add another version of a reply, as the user wrote it."""
        return self._add_version(id, message, content, "complete")

    def regenerate(self, id: str, message: str) -> Message:
        """Add the row of another version of a reply."""
        return self._add_version(id, message, "", "replying")

    def _add_version(self, id: str, message: str, content: str, status: Status) -> Message:
        conversation = self.conversation(id)
        reply = _new("assistant", self._require_reply(conversation, message).parent, content, status)
        self._append(conversation, reply)
        return reply

    def go_on(self, id: str, message: str) -> Message:
        """Let a reply continue from its end."""
        conversation = self.conversation(id)
        old = self._require_reply(conversation, message)
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE messages SET status = 'replying', failure = NULL, holder = ? WHERE id = ?",
                (self._holder, old.id),
            )
            _touch(connection, id, old.id)
        return dataclasses.replace(old, status="replying", failure=None)

    def write(self, message: str, content: str, calls: Sequence[ToolCall] = ()) -> None:
        """Save the text and the calls of a reply in progress."""
        values = (content, _calls_json(calls), message)
        self._database.execute("UPDATE messages SET content = ?, calls = ? WHERE id = ?", values)

    def finish(
        self,
        message: str,
        content: str,
        status: Status,
        failure: ReplyFailure | None = None,
        figures: Figures | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> None:
        """Save a finished reply."""
        values = (content, status, _optional_json(failure), _optional_json(figures), _calls_json(calls), message)
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE messages SET content = ?, status = ?, failure = ?, figures = ?, calls = ?, holder = NULL"
                " WHERE id = ?",
                values,
            )
            connection.execute(
                "UPDATE conversations SET updated = ? WHERE id = (SELECT conversation FROM messages WHERE id = ?)",
                (time.time(), message),
            )

    def _append(self, conversation: Conversation, *messages: Message, choice: ModelChoice | None = None) -> None:
        """Add messages, the last of which becomes the leaf, and give an unnamed conversation a title."""
        first = messages[0]
        with self._database.transaction() as connection:
            for message in messages:
                self._insert(connection, conversation.id, message)
            _touch(connection, conversation.id, messages[-1].id)
            if choice is not None:
                connection.execute(
                    "UPDATE conversations SET choice = ? WHERE id = ?", (_optional_json(choice), conversation.id)
                )
            if first.role == "user":
                connection.execute(
                    "UPDATE conversations SET title = ? WHERE id = ? AND title = ''",
                    (_title(first.content if first.content.strip() else first.attachments[0].name), conversation.id),
                )

    def _insert(self, connection: sqlite3.Connection, conversation: str, message: Message) -> None:
        m = message
        ended = _optional_json(m.failure), _optional_json(m.figures), _calls_json(m.calls)
        holder = self._holder if m.status == "replying" else None
        try:
            connection.execute(
                "INSERT INTO messages"
                " (id, conversation, parent, role, content, created, status, failure, figures, calls, holder)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (m.id, conversation, m.parent, m.role, m.content, m.created, m.status, *ended, holder),
            )
        except sqlite3.IntegrityError as error:  # deleted by another window
            raise NotFoundError("This conversation no longer exists.", "Open another.") from error
        for attachment in m.attachments:
            insert(connection, m.id, attachment)

    @staticmethod
    def _require(conversation: Conversation, id: str) -> Message:
        found = conversation.message(id)
        if found is None:
            raise NotFoundError("The conversation has no such message.", "Reload the page.")
        return found

    def _require_reply(self, conversation: Conversation, id: str) -> Message:
        found = self._require(conversation, id)
        if found.role != "assistant":
            raise UsageError("That is a user's message.", "Choose a reply.")
        return found

    def _interrupt_lost(self) -> None:
        """Mark the replies of dead processes; a living one may still be writing its own."""
        rows = self._database.rows("SELECT DISTINCT holder FROM messages WHERE status = 'replying'")
        lost = [row["holder"] for row in rows if not _alive(row["holder"])]
        ended = "UPDATE messages SET status = 'interrupted', holder = NULL WHERE status = 'replying' AND holder IS ?"
        for holder in lost:
            self._database.execute(ended, (holder,))


def _alive(holder: str | None) -> bool:
    pid, _, started = (holder or "").partition("@")
    try:
        # Correcting the clock shifts start times of processes.
        return abs(psutil.Process(int(pid)).create_time() - float(started)) < _CLOCK_S
    except (ValueError, psutil.Error):
        return False


def _new(role: Role, parent: str | None, content: str, status: Status = "complete") -> Message:
    return Message(uuid.uuid4().hex, parent, role, content, time.time(), status)


def _touch(connection: sqlite3.Connection, conversation: str, leaf: str) -> None:
    connection.execute("UPDATE conversations SET leaf = ?, updated = ? WHERE id = ?", (leaf, time.time(), conversation))


def _title(content: str) -> str:
    """The first line of a text, shortened at a word."""
    line = " ".join(content.strip().splitlines()[0].split())
    if len(line) <= _LONGEST_TITLE:
        return line
    head = line[: _LONGEST_TITLE - 1]
    return f"{head.rsplit(' ', 1)[0] if ' ' in head[_LONGEST_TITLE // 2 :] else head}…"


def _message(row: sqlite3.Row, files: tuple[Attachment, ...]) -> Message:
    return Message(
        **{name: row[name] for name in ("id", "parent", "role", "content", "created", "status")},
        failure=None if row["failure"] is None else from_json(ReplyFailure, json.loads(row["failure"])),
        figures=None if row["figures"] is None else from_json(Figures, json.loads(row["figures"])),
        attachments=files,
        calls=tuple(from_json(ToolCall, call) for call in json.loads(row["calls"] or "[]")),
    )


def _calls_json(calls: Sequence[ToolCall]) -> str | None:
    return json.dumps([dataclasses.asdict(call) for call in calls], ensure_ascii=False) if calls else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _optional_json(value: ReplyFailure | Figures | ModelChoice | None) -> str | None:
    return None if value is None else _json(dataclasses.asdict(value))
