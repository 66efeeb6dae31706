"""Texts and numbers that no honest page sends: refused by name, stored nowhere, and never taken for a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from edgeinfer.apps.desktop.history import History
from tests.apps.desktop.served import Window, served
from tests.speculation import needs_builtin

# What a text of many lines may not hold, and what a name may not either.
NO_TEXT = ["\0", "a\0b", "a" * 60 + "\0"]
NO_NAME = [*NO_TEXT, "a\nb", "\x1b[31m", "\x7f", "\x85", "\u202egpj", "a\u2066b", "x" * 5_000]
SURROGATE = '"a\\ud800b"'
SEARCHES = [
    *('"', '""', '"a', "*", "a*", "NEAR", "NEAR(a b, 2)", "a NEAR/2 b", "AND", "a OR", "NOT a", "(", ")", "((", "a:b"),
    *("content:a", "^a", "-a", "+a", "{a}", "'", "';--", "\\", "%", "_", "''", "a''b"),
    *("\ufeff", "日本語", "é", "👩‍👩‍👧", "İ"),
    *('"' * 999, "* " * 400, "ab " * 333, "a" * 1_000, "NEAR " * 200, " ", "\u3000", "\u00a0"),
]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    with served(tmp_path_factory.mktemp("hostile"), settings={"options": {"max_tokens": 2}}) as opened:
        opened.wait("model", status="ready")
        yield opened


def bodies(id: str, message: str) -> list[tuple[str, str, str, bool]]:
    """Every text that a client can send: method, path, the field, whether it is a name."""
    one = f"/conversations/{id}"
    return [
        ("PATCH", "/settings", "model", True),
        ("PATCH", "/settings", "theme", True),
        ("PATCH", "/settings", "memory", True),
        ("PATCH", "/settings", "system", False),
        ("POST", "/plan", "model", True),
        ("POST", "/plan", "kv", True),
        ("POST", "/model/load", "model", True),
        ("POST", "/downloads", "id", True),
        ("POST", "/conversations", "title", True),
        ("POST", "/conversations", "system", False),
        ("PATCH", one, "title", True),
        ("PATCH", one, "leaf", True),
        ("PATCH", one, "system", False),
        ("POST", f"{one}/messages", "content", False),
        ("POST", f"{one}/messages", "parent", True),
        ("POST", f"{one}/messages/{message}/edit", "content", False),
    ]


@needs_builtin
def test_texts_that_cannot_be(window: Window) -> None:
    id = window.new()
    message = window.ask(id, "Hello")["id"]
    before = window.call("GET", "/state")["settings"], window.call("GET", f"/conversations/{id}")
    listed = window.call("GET", "/conversations")
    for method, path, name, is_name in bodies(id, message):
        for text in NO_NAME if is_name else NO_TEXT:
            said = window.refused(method, path, {name: text}, status=400, code="invalid")
            assert name in said, (path, name, text[:20])
        answer = window.http.request(
            method,
            f"/app/api{path}",
            content=f'{{"{name}": {SURROGATE}}}',
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400, (path, name)
    for path in ("/settings", f"/conversations/{id}"):
        for options in ({"speculation": "a\0"}, {"a\0": 1}, {"seed": 10**400}, {"temperature": 1e300}):
            window.refused("PATCH", path, {"options": options}, status=400, code="invalid")
    assert (window.call("GET", "/state")["settings"], window.call("GET", f"/conversations/{id}")) == before
    assert window.call("GET", "/conversations") == listed


@needs_builtin
def test_names_in_addresses_that_cannot_be(window: Window) -> None:
    for name in map(quote, ("a\0", "a\0b", "a\nb", "\u202eb", "x" * 5_000)):
        for method, path in (
            ("GET", f"/conversations/{name}"),
            ("DELETE", f"/conversations/{name}"),
            ("POST", f"/conversations/{name}/stop"),
            ("GET", f"/conversations/{name}/reply"),
            ("GET", f"/conversations/{name}/export"),
            ("POST", f"/conversations/a/messages/{name}/continue"),
            ("DELETE", f"/downloads/{name}"),
        ):
            answer = window.http.request(method, f"/app/api{path}")
            assert answer.json()["error"]["code"] in ("invalid", "not_found"), path
            assert answer.status_code in (400, 404), path


@needs_builtin
def test_what_is_searched_for(window: Window) -> None:
    id = window.new(title="Needle")
    window.ask(id, "He said \"NEAR(a b)\" * and 'so' on; 日本語 100% a_b ^x -y {z} content:a")
    for text in SEARCHES:
        window.call("GET", f"/conversations?search={quote(text)}")
    for text in ("NEAR(", '"NEAR', "100%", "日本語", "content:a", "{z}", "^x", "'so'", "*", '"'):
        found = window.call("GET", f"/conversations?search={quote(text)}")["conversations"]
        assert id in [each["id"] for each in found], text
    for text in ("\0", "needle\0", "a\nb", "\u202e", "a" * 1_001, "word " * 5_000):
        window.refused("GET", f"/conversations?search={quote(text)}", status=400, code="invalid")


def test_many_words_are_searched_for_at_once(tmp_path: Path) -> None:
    history = History.open(tmp_path / "history.sqlite3")
    id = history.create().id
    history.ask(id, None, "some words " * 1_000)
    assert [found.id for found in history.summaries("some words " * 5_000)] == [id]
    assert history.summaries("nothing " * 5_000) == []
    history.close()
