"""The tables of the history and the steps from each version of them to the next; knows nothing of what is kept.

A released step is never changed; a new one is added. `user_version` counts the steps a file has gone.
"""

from __future__ import annotations

import sqlite3

__all__ = ["VERSION", "migrate", "version_of"]

_FIRST = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        system TEXT NOT NULL,
        options TEXT NOT NULL,
        leaf TEXT,
        created REAL NOT NULL,
        updated REAL NOT NULL
    )
    """,
    "CREATE INDEX conversations_updated ON conversations (updated)",
    # `number` gives the order of siblings, and the search index its row ids.
    """
    CREATE TABLE messages (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent TEXT REFERENCES messages (id) ON DELETE CASCADE,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        content TEXT NOT NULL,
        created REAL NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('complete', 'replying', 'stopped', 'error', 'interrupted')),
        failure TEXT,
        figures TEXT,
        holder TEXT
    )
    """,
    "CREATE INDEX messages_conversation ON messages (conversation)",
    "CREATE INDEX messages_parent ON messages (parent)",
    "CREATE INDEX messages_replying ON messages (holder) WHERE status = 'replying'",
)

_STEPS = (_FIRST,)
VERSION = len(_STEPS)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the tables that a file has; 0 is an empty one."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(connection: sqlite3.Connection) -> None:
    """Takes the steps that are missing, inside the transaction that the caller has begun."""
    for number, step in enumerate(_STEPS[version_of(connection) :], version_of(connection) + 1):
        for statement in step:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number}")
