"""The history as a store: trees, titles, search, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.apps.desktop.checks import NotFoundError
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.records import Figures, Message, ReplyFailure
from edgeinfer.errors import UsageError

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
