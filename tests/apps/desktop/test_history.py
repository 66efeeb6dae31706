"""The history as a store: trees, titles, search, refusals; export and import."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.desktop import transfer
from edgeinfer.apps.desktop.checks import NotFoundError, TooLargeError
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.records import Conversation, Figures, Message, ReplyFailure
from edgeinfer.core.errors import UsageError
from tests.recorded import check_recorded
from tests.tables import each_row

FIGURES = Figures(10, 4, 20, 12.5, 80.0, 6, 3, 1024, "stop", "tales")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    opened = History.open(tmp_path / "history.sqlite3")
    yield opened
    opened.close()


def exchange(history: History, id: str, parent: str | None, question: str, answer: str) -> Message:
    """A question with its finished answer, which is returned."""
    _, reply = history.ask(id, parent, question)
    history.finish(reply.id, answer, "complete", figures=FIGURES)
    return reply


def test_a_question_and_its_reply(history: History) -> None:
    id = history.create(system="Be brief.", options={"temperature": 0.5}).id
    asked, reply = history.ask(id, None, "How are you?")
    assert (asked.status, reply.status, reply.parent) == ("complete", "replying", asked.id)
    history.write(reply.id, "Fi")
    assert history.conversation(id).messages[1].content == "Fi"
    history.finish(reply.id, "Fine.", "complete", figures=FIGURES)
    kept = history.conversation(id)
    assert (kept.system, dict(kept.options), kept.leaf) == ("Be brief.", {"temperature": 0.5}, reply.id)
    assert [(m.role, m.content, m.status, m.figures) for m in kept.messages] == [
        ("user", "How are you?", "complete", None),
        ("assistant", "Fine.", "complete", FIGURES),
    ]


def test_branches(history: History) -> None:
    id = history.create().id
    first = exchange(history, id, None, "A", "one")
    exchange(history, id, first.id, "B", "two")
    again = history.regenerate(id, first.id)
    history.finish(again.id, "uno", "complete")
    kept = history.conversation(id)
    assert kept.leaf == again.id
    assert [m.content for m in kept.path(kept.leaf)] == ["A", "uno"]
    question = kept.messages[0]
    other, reply = history.edit_question(id, question.id, "Z")
    assert (other.parent, reply.parent) == (None, other.id)
    written = history.edit_reply(id, first.id, "mine")
    assert (written.parent, written.status) == (question.id, "complete")
    changed = history.change(id, leaf=first.id)
    assert [m.content for m in changed.path(changed.leaf)] == ["A", "one"]
    assert len(changed.messages) == 8


def test_a_reply_goes_on(history: History) -> None:
    id = history.create().id
    _, reply = history.ask(id, None, "A")
    history.finish(reply.id, "Once upon", "error", failure=ReplyFailure("No.", "Try.", "context_full"))
    assert history.conversation(id).messages[1].failure == ReplyFailure("No.", "Try.", "context_full")
    more = history.go_on(id, reply.id)
    assert (more.content, more.status, more.failure) == ("Once upon", "replying", None)


def test_what_makes_no_tree_is_refused(history: History) -> None:
    id = history.create().id
    asked, reply = history.ask(id, None, "A")
    other = history.create().id
    with pytest.raises(NotFoundError):
        history.ask(other, reply.id, "from another conversation")
    with pytest.raises(NotFoundError):
        history.ask("nowhere", None, "A")
    with pytest.raises(UsageError, match="follows a reply"):
        history.ask(id, asked.id, "after a question")
    with pytest.raises(UsageError, match="empty"):
        history.ask(id, reply.id, " \n")
    with pytest.raises(UsageError, match="user's message"):
        history.regenerate(id, asked.id)
    with pytest.raises(NotFoundError):
        history.change(id, leaf="nothing")
    with pytest.raises(NotFoundError):
        history.delete("nowhere")


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("  Hello\nthere", "Hello"),
        ("word " * 30, "word word word word word word word word word word word…"),
        ("x" * 100, "x" * 59 + "…"),
        ("日本語\r\nsecond", "日本語"),
    ],
)
def test_title_is_the_first_line(history: History, content: str, title: str) -> None:
    id = history.create().id
    history.ask(id, None, content)
    assert history.conversation(id).title == title


def test_a_given_title_stays(history: History) -> None:
    id = history.create(title="Mine").id
    reply = exchange(history, id, None, "A question", "yes")
    history.change(id, title="Yours")
    exchange(history, id, reply.id, "Another", "yes")
    assert history.conversation(id).title == "Yours"


def test_the_latest_comes_first(history: History) -> None:
    ids = [history.create(title=str(number)).id for number in range(3)]
    exchange(history, ids[0], None, "A", "B")
    assert [line.title for line in history.summaries()] == ["0", "2", "1"]
    history.delete(ids[2])
    assert [line.title for line in history.summaries()] == ["0", "1"]


@pytest.fixture(params=["index", "no index"])
def searched(request: pytest.FixtureRequest, history: History) -> History:
    if request.param == "no index":
        history._indexed = False
    elif not history._indexed:
        pytest.skip("this SQLite has no FTS5")
    return history


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dragon", ["Tales"]),
        ("DRAG", ["Tales"]),
        ("agon castle", ["Tales"]),
        ("dragon nothing", []),
        ("talES", ["Tales"]),
        ("本語", ["Words"]),
        ("größe", ["Words"]),
        ('"quo"te', ["Words"]),
        ("NEAR(", ["Words"]),
        ("a", ["Tales", "Words"]),
        ("100%", ["Words"]),
        ("_", []),
    ],
)
def test_search(searched: History, text: str, found: list[str]) -> None:
    tales, words = searched.create(title="Tales").id, searched.create(title="Words").id
    exchange(searched, tales, None, "Tell me of a castle", "A dragon lived in the castle.")
    exchange(searched, words, None, "日本語 GRÖSSE Größe", 'say "quo"te, NEAR( or 100%')
    assert sorted(line.title for line in searched.summaries(text)) == found


def test_search_follows_changes(searched: History) -> None:
    id = searched.create(title="T").id
    _, reply = searched.ask(id, None, "question")
    searched.write(reply.id, "first words")
    assert [line.snippet for line in searched.summaries("first words")] == ["first words"]
    searched.finish(reply.id, "other text", "complete")
    assert searched.summaries("first words") == []
    assert len(searched.summaries("other text")) == 1
    searched.delete(id)
    assert searched.summaries("other text") == []


def test_snippet_shows_the_place(history: History) -> None:
    id = history.create(title="T").id
    exchange(history, id, None, "q", "begin " + "filler " * 40 + "needle\nin the hay " + "filler " * 40)
    (line,) = history.summaries("NEEDLE")
    assert "needle in the hay" in line.snippet
    assert line.snippet.startswith("…")
    assert line.snippet.endswith("…")
    assert len(line.snippet) < 160


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
        (lambda d: d.update(title="a\nb"), "control characters"),
        (lambda d: d.update(system="\ud800"), "half of a surrogate pair"),
        (lambda d: d.update(system="\0"), "NUL character"),
        (lambda d: d["messages"][0].update(content="\0"), "NUL character"),
        (lambda d: d["messages"][0].update(id="\ud800"), "half of a surrogate pair"),
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
        (lambda d: d["messages"][1].update(error={"message": "", "minimum_bytes": 10**400}), "too large"),
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
