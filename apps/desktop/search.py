"""Finds conversations by words in them, through FTS5's index where SQLite has it.

Words are found anywhere, also inside longer ones, whatever their case. The index keeps all runs of three characters;
shorter words, and all where there is no index, are looked for text by text.
"""

from __future__ import annotations

import sqlite3

from edgeinfer.apps.desktop.database import Database

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


def prepare(database: Database) -> bool:
    """Makes the index if it is missing; returns whether there is one.

    A file that comes from a machine with the index to one without loses what keeps it in step, so that it can be
    written there, and is indexed again once it is back.
    """
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
    """Whether SQLite has FTS5 with the trigram tokenizer, which came later."""
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.probe USING fts5 (content, tokenize = 'trigram')")
    except sqlite3.OperationalError:
        return False
    connection.execute("DROP TABLE temp.probe")
    return True


def find(database: Database, text: str, *, indexed: bool) -> dict[str, str]:
    """Conversations that hold every word of a text, in their title, in one message or in the name of a
    file; each with that message's text or that name, or "" where the title has them.
    """
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
    """A piece of a message around the first of the words that were looked for."""
    words, folded = text.casefold().split()[:_MOST_WORDS], content.casefold()
    # Folding may lengthen a text; a snippet some characters beside the word does no harm.
    places = [place for word in words if (place := folded.find(word)) >= 0]
    start = max(0, min(places, default=0) - _SNIPPET_BEFORE)
    end = start + _SNIPPET_BEFORE + _SNIPPET_AFTER
    piece = " ".join(content[start:end].split())
    return f"{'…' if start else ''}{piece}{'…' if end < len(content) else ''}"
