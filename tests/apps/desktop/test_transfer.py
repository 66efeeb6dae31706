"""Conversations as files: there and back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.desktop import transfer
from edgeinfer.apps.desktop.checks import TooLargeError
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.records import Conversation, Figures, ReplyFailure
from edgeinfer.errors import UsageError
from tests.recorded import check_recorded
from tests.tables import each_row


@pytest.fixture
def conversation(tmp_path: Path) -> Conversation:
    history = History.open(tmp_path / "history.sqlite3")
    id = history.create(system="Be kind.\nBe brief.", options={"top_p": 0.5}).id
    _, reply = history.ask(id, None, "Hello 日本\nsecond line")
    history.finish(reply.id, "Good *day*.", "complete", figures=Figures(1, 0, 2, 3.0, 4.5, 0, 0, 64, "stop", "m"))
    again = history.regenerate(id, reply.id)
    history.finish(again.id, "No", "error", failure=ReplyFailure("Full.", "Begin anew.", "context_full"))
    history.ask(id, again.id, "And?")
    kept = history.conversation(id)
    history.close()
    return kept


def test_json_there_and_back(conversation: Conversation, tmp_path: Path) -> None:
    read = transfer.read_json(transfer.write_json(conversation).encode())
    same = (read.title, read.system, dict(read.options), read.created)
    assert same == (conversation.title, conversation.system, dict(conversation.options), conversation.created)
    assert read.id != conversation.id
    check_recorded(
        "transferred", json.loads(transfer.write_json(conversation)), without=("id", "parent", "leaf", "created")
    )
    assert {m.id for m in read.messages}.isdisjoint(m.id for m in conversation.messages)
    pairs = list(zip(read.messages, conversation.messages, strict=True))
    for new, old in pairs:
        assert (new.role, new.content, new.figures, new.failure) == (old.role, old.content, old.figures, old.failure)
    # A copy of a reply that was growing does not grow.
    assert [new.status for new, _ in pairs] == ["complete", "complete", "error", "complete", "interrupted"]
    assert [m.content for m in read.path(read.leaf)] == [m.content for m in conversation.path(conversation.leaf)]
    history = History.open(tmp_path / "other.sqlite3")
    history.add(read)
    assert history.conversation(read.id) == read
    assert len(history.summaries("日本")) == 1
    history.close()


def test_markdown_is_the_branch_on_show(conversation: Conversation) -> None:
    assert transfer.write_markdown(conversation) == (
        "# Hello 日本\n\n> Be kind.\n> Be brief.\n\n## You\n\nHello 日本\nsecond line\n\n"
        "## Assistant (error)\n\nNo\n\n## You\n\nAnd?\n\n## Assistant (replying)\n"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="other"), "not an exported conversation"),
        (lambda d: d.update(version=2), "version is 2"),
        (lambda d: d.update(version=True, format="edgeinfer-conversation", x=1), "unknown fields: 'x'"),
        (lambda d: d.update(messages={}), "messages must be a list"),
        (lambda d: d.update(leaf="nothing"), "leaf must be"),
        (lambda d: d.update(leaf=[]), "leaf must be"),
        (lambda d: d.update(title=3), "title must be a string"),
        (lambda d: d.update(system="\ud800"), "half of a surrogate pair"),
        (lambda d: d.update(created=float("nan")), "too large"),
        (lambda d: d.update(created=-5), "created must be"),
        (lambda d: d.update(options={"memory": 1}), "Unknown option"),
        (lambda d: d.update(options={"temperature": -1}), "temperature"),
        (lambda d: d["messages"].append("text"), "must be an object"),
        (lambda d: d["messages"].append(d["messages"][0]), "id of its own"),
        (lambda d: d["messages"][0].update(parent=d["messages"][1]["id"]), "an earlier message"),
        (lambda d: d["messages"][1].update(parent=[]), "an earlier message"),
        (lambda d: d["messages"][1].update(role="system"), "role must be one of"),
        (lambda d: d["messages"][1].update(role=[]), "role must be one of"),
        (lambda d: d["messages"][1].update(role="user"), "must alternate"),
        (lambda d: d["messages"][1].update(status="done"), "status must be one of"),
        (lambda d: d["messages"][1].update(html="<b>"), "unknown fields: 'html'"),
        (lambda d: d["messages"][1].update(figures={"speed": 1}), "figures must be"),
        (lambda d: d["messages"][1]["figures"].update(model=1), "wrong type"),
        (lambda d: d["messages"][1].update(error={}), "lacks 'message'"),
    ],
)
def test_what_cannot_be_is_refused(
    conversation: Conversation, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    data = json.loads(transfer.write_json(conversation))
    change(data)
    with pytest.raises(UsageError, match=says):
        transfer.read_json(json.dumps(data).encode())


@each_row("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b'"text"', b"{", b"1" * 5000])
def test_what_is_no_export_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"not JSON|not an exported"):
        transfer.read_json(data)


def test_too_large_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_BYTES", 10)
    with pytest.raises(TooLargeError):
        transfer.read_json(b"{}" + b" " * 9)
