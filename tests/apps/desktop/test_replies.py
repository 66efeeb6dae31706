"""Replies from the question to the end, through the app's API and the built-in model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.desktop import replies
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.library import Planner
from edgeinfer.apps.desktop.records import Conversation, Message
from edgeinfer.apps.desktop.replies import messages_for, without_oldest
from edgeinfer.core.errors import BudgetError, StorageError
from tests.apps.desktop.served import Gate, Window, gated, served
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT, wait_until

pytestmark = needs_builtin


SETTINGS = {"options": {"temperature": 0.0, "max_tokens": 12}}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """An app with a model loaded."""
    with served(tmp_path_factory.mktemp("data"), settings=SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Iterator[edgeinfer.Model]:
    """The built-in model, used directly."""
    with edgeinfer.load() as loaded:
        yield loaded


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gated() as made:
        yield made


def test_a_reply_is_what_the_model_says(window: Window, model: edgeinfer.Model) -> None:
    id = window.new(system="Be kind.")
    done = window.ask(id, "Tell me a story.")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
    expected = model.stream_chat(messages, max_tokens=12).complete()
    assert (done["content"], done["status"], done["error"]) == (expected.text, "complete", None)
    figures = done["figures"]
    assert figures["prompt_tokens"] == expected.usage.prompt_tokens
    assert (figures["completion_tokens"], figures["finish_reason"], figures["model"]) == (12, "length", "tales")
    assert figures["context"] == 1024
    assert figures["ttft_ms"] > 0
    assert figures["drafted"] >= figures["accepted"] >= 0
    shown = window.call("GET", f"/conversations/{id}")
    assert shown["messages"][1] == done
    assert (shown["leaf"], shown["replying"], shown["title"]) == (done["id"], None, "Tell me a story.")


def test_what_was_said_before_is_part_of_the_prompt(window: Window) -> None:
    id = window.new()
    first = window.ask(id, "Tell me a story.")
    second = window.ask(id, "And then?", first["id"])
    assert second["figures"]["prompt_tokens"] > first["figures"]["prompt_tokens"]
    assert second["figures"]["cached_tokens"] > 0


def test_the_stream_shows_the_text_as_it_grows(window: Window, gate: Gate) -> None:
    id = window.new()
    kept = window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
    assert (kept["user"]["status"], kept["assistant"]["status"]) == ("complete", "replying")
    gate.let(3)
    begun = window.grown(id)
    assert window.call("GET", f"/conversations/{id}")["replying"] == kept["assistant"]["id"]
    gate.open()
    events = list(window.events(f"/conversations/{id}/reply"))
    assert events[-1][0] == "done"
    assert events[-1][1]["content"].startswith(begun)
    for kind, data in events[:-1]:
        assert (kind, data["id"]) == ("text", kept["assistant"]["id"])
        assert events[-1][1]["content"].startswith(data["content"])


def test_a_reply_is_kept_before_and_while_it_is_made(
    window: Window, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_KEEP_S", 0.0)
    id = window.new()
    window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
    other = History.open(window.folder.history)
    try:
        assert [m.status for m in other.conversation(id).messages] == ["complete", "replying"]
        gate.let(4)
        wait_until(lambda: other.conversation(id).messages[1].content, "the text of a growing reply in the file")
        assert other.conversation(id).messages[1].status == "replying"
    finally:
        other.close()
    gate.open()
    assert window.end(id)["status"] == "complete"


def test_stop(window: Window, gate: Gate) -> None:
    id = window.new()
    window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
    gate.let(4)
    begun = window.grown(id)
    window.call("POST", f"/conversations/{id}/stop", status=202)
    done = window.end(id)
    assert (done["status"], done["figures"]["finish_reason"]) == ("stopped", "cancelled")
    assert done["content"].startswith(begun)
    assert done["figures"]["completion_tokens"] < 12
    # And where there is nothing to stop.
    window.call("POST", f"/conversations/{id}/stop", status=202)


def test_one_reply_of_a_conversation_at_a_time(window: Window, gate: Gate) -> None:
    id = window.new()
    body = {"parent": None, "content": "Hi"}
    reply = window.call("POST", f"/conversations/{id}/messages", body, status=202)["assistant"]["id"]
    window.refused("POST", f"/conversations/{id}/messages", body, status=409, code="conflict")
    for act in ("regenerate", "continue"):
        window.refused("POST", f"/conversations/{id}/messages/{reply}/{act}", status=409, code="conflict")
    other = window.new()
    window.call("POST", f"/conversations/{other}/messages", body, status=202)
    gate.open()
    assert window.end(id)["content"] == window.end(other)["content"] != ""


def test_edit(window: Window) -> None:
    id = window.new()
    first = window.ask(id, "Tell me a story.")
    asked = f"/conversations/{id}/messages/{first['parent']}/edit"
    kept = window.call("POST", asked, {"content": "Tell me of Tom."}, status=202)
    assert (kept["user"]["parent"], kept["assistant"]["parent"]) == (None, kept["user"]["id"])
    assert window.end(id)["id"] == kept["assistant"]["id"]
    said = f"/conversations/{id}/messages/{first['id']}/edit"
    kept = window.call("POST", said, {"content": "Once, *Tom* slept."}, status=202)
    assert set(kept) == {"assistant"}
    assert (kept["assistant"]["status"], kept["assistant"]["parent"]) == ("complete", first["parent"])
    assert "<em>Tom</em>" in kept["assistant"]["html"]
    assert window.end(id) == kept["assistant"]


def test_continue_goes_on_with_the_same_text(window: Window, model: edgeinfer.Model) -> None:
    id = window.new()
    first = window.ask(id, "Tell me a story.")
    kept = window.call("POST", f"/conversations/{id}/messages/{first['id']}/continue", status=202)["assistant"]
    assert (kept["id"], kept["content"], kept["status"]) == (first["id"], first["content"], "replying")
    more = window.end(id)
    ask = [{"role": "user", "content": "Tell me a story."}]
    assert more["content"] == model.stream_chat(ask, max_tokens=24).complete().text
    assert len(window.call("GET", f"/conversations/{id}")["messages"]) == 2


def test_full_context(window: Window) -> None:
    id = window.new()
    context = window.wait("model", status="ready")["context"]
    draft: dict[str, Any] = {"conversation": id, "parent": None, "attachments": []}
    # So long that it is refused before all of it is tokens, and only a little too long.
    for content in ("word " * 9000, "word " * 1100):
        failed = window.ask(id, content)
        error = failed["error"]
        assert (failed["status"], error["code"], failed["content"]) == ("error", "context_full", "")
        # What it takes is counted exactly, as before it is sent.
        assert error["tokens"] == window.call("POST", "/tokens", draft | {"content": content})["tokens"] > context
        assert error["message"] == f"This chat takes {error['tokens']:,} tokens, and the context holds {context:,}."
    # What failed is no part of what comes after.
    done = window.ask(id, "Tell me a story.", failed["id"])
    assert done["status"] == "complete"
    assert done["figures"]["prompt_tokens"] < 100


def test_the_oldest_messages_are_left_out_as_far_as_needed(model: edgeinfer.Model) -> None:
    system = {"role": "system", "content": "Be kind."}
    roles = ["user", "assistant"] * 4 + ["user"]
    turns = [{"role": role, "content": f"{n} " + "Go on. " * 32} for n, role in enumerate(roles)]
    whole = without_oldest(model, [system, *turns], "", 12)
    assert (whole.left_out, whole.messages) == (0, [system, *turns])
    # Nine leave no room for a quarter of the context; two questions at once are left out with what answered them.
    shortened = without_oldest(model, [system, *turns], "", 1024)
    assert (shortened.left_out, shortened.messages) == (4, [system, *turns[4:]])
    assert shortened.tokens == model.tokenize_chat(shortened.messages)
    # The last stays, however long it is.
    turns[-1]["content"] = "word " * 2000
    assert without_oldest(model, turns, "", 12).messages == turns[-1:]


def test_of_a_chat_far_too_long_only_what_may_fit_becomes_tokens(
    model: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"role": role, "content": f"{n} " + "Go on. " * 64} for n in range(100) for role in ("user", "assistant")]
    tokenize, made = model.tokenize_chat, list[int]()

    def counted(*given: Any, **options: Any) -> list[int]:
        ids = tokenize(*given, **options)
        made.append(len(ids))
        return ids

    monkeypatch.setattr(model, "tokenize_chat", counted)
    fitted = without_oldest(model, turns[:-1], "", 12)
    assert fitted.messages == turns[fitted.left_out : -1] and fitted.left_out > 180
    assert max(made) < 8 * model.context
    made.clear()
    without_oldest(model, turns[:1], "", 12)
    assert len(made) == 1


@pytest.mark.slow
def test_the_oldest_messages_make_room_where_the_user_wants_that(window: Window, model: edgeinfer.Model) -> None:
    id, leaf = window.new(system="Be kind."), None
    asked = [f"Tell me a story about {who}. " + "Go on. " * 120 for who in ("Tom", "Anna", "Ben", "Eve")]
    for text in asked:
        done = window.ask(id, text, leaf)
        leaf = done["id"]
        if done["status"] == "error":
            break
    assert done["error"]["code"] == "context_full" and text != asked[1]
    window.call("PATCH", f"/conversations/{id}", {"options": {"when_full": "leave_out_oldest"}})
    window.call("POST", f"/conversations/{id}/messages/{done['id']}/regenerate", status=202)
    answered = window.end(id)
    assert (answered["status"], answered["figures"]["left_out"]) == ("complete", 4)
    whole = window.call("GET", f"/conversations/{id}")["messages"]
    kept = [{"role": m["role"], "content": m["content"]} for m in whole if m["content"]][4:]
    expected = model.stream_chat([{"role": "system", "content": "Be kind."}, *kept[:-1]], max_tokens=12).complete()
    assert answered["content"] == expected.text
    # One message that is too long by itself is still refused.
    alone = window.ask(id, "word " * 2000, answered["id"])
    assert alone["error"]["code"] == "context_full"
    wrong = {"options": {"when_full": "soon"}}
    refused = window.call("PATCH", f"/conversations/{id}", wrong, status=400)
    assert "when_full" in refused["error"]["message"]


def test_short_memory_is_kept_with_the_message(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BudgetError("The reply needs more memory.", "Give more.", minimum_bytes=123)

    monkeypatch.setattr(edgeinfer.Model, "stream_chat", refuse)
    id = window.new()
    error = window.ask(id, "Hi")["error"]
    assert (error["code"], error["minimum_bytes"], error["message"]) == (
        "memory_short",
        123,
        "The reply needs more memory.",
    )


def test_a_fault_of_ours_ends_the_reply_and_nothing_else(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(edgeinfer.Model, "stream_chat", lambda *_, **__: 1 / 0)
        failed = window.ask(window.new(), "Hi")
    assert (failed["status"], failed["error"]["message"]) == ("error", "Unexpected ZeroDivisionError.")
    assert window.ask(window.new(), "Hi")["status"] == "complete"


def test_a_disk_that_is_full_meanwhile(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("The disk is full.", "Free some space.")

    id = window.new()
    with monkeypatch.context() as patch:
        patch.setattr(History, "write", full)
        done = window.ask(id, "Hi")
        assert (done["status"], done["figures"]["completion_tokens"]) == ("complete", 12)
        patch.setattr(History, "finish", full)
        lost = window.ask(id, "And?", done["id"])
        assert lost["status"] == "interrupted"
        assert window.call("GET", f"/conversations/{id}")["replying"] is None
    kept = window.call("POST", f"/conversations/{id}/messages/{lost['id']}/regenerate", status=202)
    again = window.end(id)
    assert (set(kept), again["id"]) == ({"assistant"}, kept["assistant"]["id"])
    assert (again["status"], again["parent"], again["id"] != lost["id"]) == ("complete", lost["parent"], True)
    assert window.call("PATCH", f"/conversations/{id}", {"leaf": lost["id"]})["leaf"] == lost["id"]


def test_a_question_waits_for_the_model_and_fails_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, measure = threading.Event(), Planner.measure

    def held(planner: Planner) -> None:
        assert go_on.wait(TIME_LIMIT)
        measure(planner)

    monkeypatch.setattr(Planner, "measure", held)
    with served(tmp_path, settings=SETTINGS) as window:
        id = window.new()
        try:
            window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
            assert window.call("GET", "/state")["model"]["status"] == "loading"
            assert window.call("GET", f"/conversations/{id}")["messages"][1]["content"] == ""
        finally:
            go_on.set()
        assert window.end(id)["status"] == "complete"
        window.call("POST", "/model/unload", status=202)
        failed = window.ask(window.new(), "Hi")
        assert (failed["status"], failed["error"]["code"]) == ("error", "no_model")


def test_a_deleted_conversation_needs_no_reply(window: Window, gate: Gate) -> None:
    id = window.new()
    window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
    gate.let(1)
    window.call("DELETE", f"/conversations/{id}", status=204)
    window.refused("GET", f"/conversations/{id}", status=404, code="not_found")
    gate.open()
    assert window.ask(window.new(), "Hi")["status"] == "complete"


def test_a_closing_app_keeps_what_there_is(tmp_path: Path, gate: Gate) -> None:
    with served(tmp_path) as window:
        id = window.new()
        window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Hi"}, status=202)
        gate.let(3)
        begun = window.grown(id)
    history = History.open(tmp_path / "history.sqlite3")
    message = history.conversation(id).messages[1]
    history.close()
    assert message.status == "interrupted"
    assert message.content.startswith(begun)


def test_turns_that_failed_are_left_out() -> None:
    turns = [("user", "A"), ("assistant", ""), ("user", "B"), ("assistant", "b"), ("user", "C"), ("assistant", "")]
    messages = [
        Message(str(n), str(n - 1) if n else None, role, content, 0.0)  # type: ignore[arg-type]
        for n, (role, content) in enumerate(turns)
    ]
    conversation = Conversation("c", "", 0.0, 0.0, "S", {}, "5", tuple(messages))
    assert [m["content"] for m in messages_for(conversation, messages[5])] == ["S", "B", "b", "C"]
