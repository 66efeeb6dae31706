"""Conversations: their messages, replies cut short, and saving them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import ContextLengthError, EdgeInferError, PromptError, UsageError
from tests.tables import each_row

OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


def test_turns_become_messages(model: edgeinfer.Model) -> None:
    chat = model.chat(system="Be brief.")
    first = chat.send("Hello", **OPTIONS)
    second = chat.send("And now?", **OPTIONS)
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": second.text},
    ]


def test_the_model_sees_the_whole_conversation(model: edgeinfer.Model) -> None:
    chat = model.chat(system="Be brief.")
    first = chat.send("Hello", **OPTIONS)
    second = chat.send("And now?", **OPTIONS)
    text = f"<s>system: Be brief.\nuser: Hello\nassistant: {first.text}\nuser: And now?\nassistant:"
    expected = model.generate(text, **OPTIONS)
    assert second.text == expected.text
    assert second.usage.prompt_tokens == expected.usage.prompt_tokens


def test_earlier_turns_are_not_evaluated_again(model: edgeinfer.Model) -> None:
    chat = model.chat()
    chat.send("Tell me about the little dog and the cat", **OPTIONS)
    second = chat.send("Go on", **OPTIONS)
    first_turn = len(model.tokenize("<s>user: Tell me about the little dog and the cat\nassistant:"))
    assert second.timings.cached_prompt_tokens >= first_turn


def test_a_history_may_have_parts_and_a_developer(model: edgeinfer.Model) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    chat = model.chat(history=[{"role": "developer", "content": parts}, {"role": "user", "content": parts}])
    assert chat.messages == [{"role": role, "content": "Be brief."} for role in ("system", "user")]
    for wrong in ([{"type": "image_url"}], ["x"], [{"type": "text"}], None, 5):
        with pytest.raises(UsageError, match=r"history\[0\]"):
            model.chat(history=[{"role": "user", "content": wrong}])


def test_messages_are_a_copy(model: edgeinfer.Model) -> None:
    chat = model.chat()
    chat.send("Hello", **OPTIONS)
    chat.messages[0]["content"] = "changed"
    chat.messages.clear()
    assert chat.messages[0] == {"role": "user", "content": "Hello"}


def test_resetting_keeps_the_system_message(model: edgeinfer.Model) -> None:
    chat = model.chat(system="Be brief.")
    reply = chat.send("Hello", **OPTIONS)
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.send("Hello", **OPTIONS).token_ids == reply.token_ids


def test_a_reply_left_early_stays_as_far_as_it_came(model: edgeinfer.Model) -> None:
    chat = model.chat()
    stream = chat.stream("Hello", max_tokens=200, ignore_eos=True)
    text = "".join(next(stream).text for _ in range(6))
    assert chat.messages == []
    stream.close()
    assert [m["content"] for m in chat.messages] == ["Hello", text]


@each_row("text", ["", "  \n"])
def test_an_empty_message(model: edgeinfer.Model, text: str) -> None:
    chat = model.chat()
    with pytest.raises(PromptError, match="empty"):
        chat.send(text)
    assert chat.messages == []


def test_a_refused_message_leaves_the_conversation_unchanged(model: edgeinfer.Model) -> None:
    chat = model.chat()
    chat.send("Hello", **OPTIONS)
    before = chat.messages
    with pytest.raises(ContextLengthError):
        chat.send("dog " * 600)
    with pytest.raises(UsageError):
        chat.send("Hello", heat=3)  # type: ignore[call-arg]
    assert chat.messages == before
    assert chat.send("Hello", **OPTIONS).token_ids


def test_a_chat_without_a_system_message_is_saved_too(model: edgeinfer.Model, tmp_path: Path) -> None:
    chat = model.chat()
    chat.save(tmp_path / "talk")
    assert model.load_chat(tmp_path / "talk").messages == []


def saved(**changes: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Hi"}]
    return {"format": "edgeinfer-chat", "version": 1, "model": "x", "system": None, "turns": turns} | changes


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps(saved(version=99)),
        json.dumps(saved(format="other")),
        json.dumps(saved(system=5)),
        json.dumps(saved(turns="Hi")),
        json.dumps(saved(turns=[{"role": "user"}])),
        json.dumps(saved(turns=[{"role": "wizard", "content": "Hi"}])),
        json.dumps(saved(turns=[{"role": "user", "content": 5}])),
        json.dumps({k: v for k, v in saved().items() if k != "system"}),
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
    ids=range(14),
)
def test_what_is_no_saved_chat(model: edgeinfer.Model, tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "talk"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match="talk"):
        model.load_chat(path)


def test_a_missing_file(model: edgeinfer.Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing-here"):
        model.load_chat(tmp_path / "nothing-here")


def test_a_template_error_is_ours(model: edgeinfer.Model) -> None:
    with pytest.raises(EdgeInferError):
        model.stream_chat([{"role": "user"}], **OPTIONS)
