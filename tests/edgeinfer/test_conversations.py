"""Conversations: messages, replies cut short, sessions that go on as if never saved, texts that outgrow the context."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.core.errors import ContextLengthError, EdgeInferError, ModelError, PromptError, StorageError, UsageError
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from edgeinfer.runtime.kv_cache.session_file import is_session
from tests.edgeinfer.conftest import TEMPLATE
from tests.speculation import load_eager, needs_builtin, random_bundle
from tests.tables import each_row

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
QUESTION = "Tell me about the little dog and the cat that is not here"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgeinfer.Model]:
    """A model of the same shape with other weights."""
    bundle = random_bundle(
        tmp_path_factory.mktemp("stranger"), chat_template=TEMPLATE, max_position_embeddings=512, seed=1
    )
    with load_eager(bundle) as model:
        yield model


def talk(model: edgeinfer.Model) -> edgeinfer.Chat:
    chat = model.chat(system="Be brief, but not too brief, and never say that you do not know.")
    chat.send(QUESTION, temperature=0.8, seed=3, **OPTIONS)
    return chat


def test_a_chat_goes_on_without_being_evaluated_again(model: edgeinfer.Model, tmp_path: Path) -> None:
    chat = talk(model)
    chat.save(tmp_path / "talk.session")
    expected = chat.send("And now?", **OPTIONS)
    model.score([5, 6])  # empties the cache
    opened = model.load_chat(tmp_path / "talk.session")
    assert opened.messages == chat.messages[:-2]
    reply = opened.send("And now?", **OPTIONS)
    assert reply.token_ids == expected.token_ids
    assert reply.timings.cached_prompt_tokens == expected.timings.cached_prompt_tokens > 30


def test_sampled_text_goes_on_the_same_in_another_process_or_model(
    model: edgeinfer.Model,
    small_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = talk(model)
    chat.save(tmp_path / "talk.session")
    expected = chat.send("And now?", temperature=1.0, seed=9, **OPTIONS)
    with load_eager(small_bundle) as other:
        reply = other.load_chat(tmp_path / "talk.session").send("And now?", temperature=1.0, seed=9, **OPTIONS)
        assert "sampled by" not in caplog.text
        monkeypatch.setattr("edgeinfer.lifecycle.SAMPLING", expected.sampling + 1)
        other.load_chat(tmp_path / "talk.session")
    assert f"sampled by version {expected.sampling}" in caplog.text
    assert reply.token_ids == expected.token_ids
    assert reply.timings.cached_prompt_tokens == expected.timings.cached_prompt_tokens


def test_the_name_decides_what_is_written_and_the_content_how_it_is_read(
    model: edgeinfer.Model, tmp_path: Path
) -> None:
    chat = talk(model)
    chat.save(tmp_path / "talk.session")
    chat.save(tmp_path / "talk.json")
    assert is_session(tmp_path / "talk.session") and not is_session(tmp_path / "talk.json")
    (tmp_path / "talk.session").rename(tmp_path / "first")
    (tmp_path / "talk.json").rename(tmp_path / "second.session")
    for name in ("first", "second.session"):
        assert model.load_chat(tmp_path / name).messages == chat.messages


def test_another_conversation_in_the_cache_is_not_written(model: edgeinfer.Model, tmp_path: Path) -> None:
    chat = talk(model)
    model.generate("Something else", **OPTIONS)
    chat.save(tmp_path / "talk.session")
    assert b"Something else" not in (tmp_path / "talk.session").read_bytes()
    assert (tmp_path / "talk.session").stat().st_size < 5000
    assert model.load_chat(tmp_path / "talk.session").send("And now?", **OPTIONS).token_ids


def test_another_model_answers_anew(
    model: edgeinfer.Model, stranger: edgeinfer.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = talk(model)
    chat.save(tmp_path / "talk.session")
    opened = stranger.load_chat(tmp_path / "talk.session")
    assert "another model's" in caplog.text
    assert opened.messages == chat.messages
    assert opened.send("And now?", **OPTIONS).timings.cached_prompt_tokens < 30
    model.save_session(tmp_path / "plain.session")
    with pytest.raises(ModelError, match="another model"):
        stranger.load_session(tmp_path / "plain.session")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"exact": False}, "other settings"), ({"backend": "reference"}, "other settings"), ({"context": 16}, "smaller")],
)
def test_another_way_of_running_evaluates_anew(
    model: edgeinfer.Model,
    small_bundle: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    reason: str,
) -> None:
    prompt = model.tokenize(QUESTION)
    model.generate(prompt, **OPTIONS)
    model.save_session(tmp_path / "text.session")
    with load_eager(small_bundle, **options) as other:
        assert other.load_session(tmp_path / "text.session")[: len(prompt)] == prompt
        assert reason in caplog.text
        assert other.generate(prompt[:10], max_tokens=1).timings.cached_prompt_tokens == 0


def test_plain_text_goes_on(model: edgeinfer.Model, small_bundle: Path, tmp_path: Path) -> None:
    first = model.generate(QUESTION, **OPTIONS)
    model.save_session(tmp_path / "text.session")
    text = [*model.tokenize(QUESTION), *first.token_ids]
    expected = model.generate(text, **OPTIONS)
    with load_eager(small_bundle) as other:
        # The last token was chosen, but not yet fed.
        assert other.load_session(tmp_path / "text.session") == text[:-1]
        reply = other.generate(text, **OPTIONS)
    assert reply.token_ids == expected.token_ids
    assert reply.timings.cached_prompt_tokens == len(text) - 1


def test_damage_is_refused_and_loses_nothing(model: edgeinfer.Model, tmp_path: Path) -> None:
    path = tmp_path / "talk.session"
    chat = talk(model)
    chat.save(path)
    data = path.read_bytes()
    for damaged in (data[:-1], data[:100], data + b"x", data[:2000] + b"?" + data[2001:]):
        path.write_bytes(damaged)
        for load in (model.load_chat, model.load_session):
            with pytest.raises(UsageError, match=r"talk\.session"):
                load(path)
    reply = chat.send("And now?", **OPTIONS)
    assert reply.timings.cached_prompt_tokens > 30


def test_a_session_of_plain_text_is_no_chat(model: edgeinfer.Model, tmp_path: Path) -> None:
    model.generate(QUESTION, **OPTIONS)
    model.save_session(tmp_path / "text.session")
    with pytest.raises(UsageError, match=r"Chat\.save"):
        model.load_chat(tmp_path / "text.session")


def test_saving_ends_a_running_reply(model: edgeinfer.Model, tmp_path: Path) -> None:
    chat = talk(model)
    stream = chat.stream("And now?", **OPTIONS)
    next(stream)
    chat.save(tmp_path / "talk.session")
    assert stream.result.finish_reason == "cancelled"
    assert chat.messages[-1] == {"role": "assistant", "content": stream.result.text}


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX systems")
def test_a_session_is_private_and_written_whole(model: edgeinfer.Model, tmp_path: Path) -> None:
    chat = talk(model)
    chat.save(tmp_path / "talk.session")
    assert stat.S_IMODE((tmp_path / "talk.session").stat().st_mode) == 0o600
    before = (tmp_path / "talk.session").read_bytes()
    with pytest.raises(StorageError):
        chat.save(tmp_path / "missing" / "talk.session")
    assert (tmp_path / "talk.session").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["talk.session"]


def test_conversations_kept_beside_the_current_one(small_bundle: Path) -> None:
    """Two chats by turns: the prefix cache finds both, and changes no token."""
    replies: dict[int, list[tuple[int, ...]]] = {}
    cached: dict[int, list[int]] = {}
    for size in (0, 1_000_000):
        with load_eager(small_bundle, prefix_cache=size) as model:
            chats = [model.chat(f"You are number {n}, and you never tell anyone what you are.") for n in range(2)]
            results = [chat.send(text, **OPTIONS) for text in (QUESTION, "Go on", "And then?") for chat in chats]
            replies[size] = [result.token_ids for result in results]
            cached[size] = [result.timings.cached_prompt_tokens for result in results]
    assert replies[0] == replies[1_000_000]
    assert all(kept > lost + 30 for kept, lost in zip(cached[1_000_000][2:], cached[0][2:], strict=True))


@pytest.mark.slow
def test_every_type_of_cache_keeps_saves_and_shortens_conversations(small_bundle: Path, tmp_path: Path) -> None:
    """Rows that come back from kept conversations and from files are those that would be evaluated, to the last bit."""
    sampled: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    beginnings = ["The little dog " * 8, "A cat sat there " * 6, "The little dog " * 8 + "went home " * 12]
    for kv in PAGED_KV:
        with load_eager(small_bundle, kv=kv) as alone:
            expected = [alone.generate(text, **sampled).token_ids for text in beginnings]
            with load_eager(small_bundle, kv=kv, prefix_cache=2_000_000) as keeping:
                for turn, text in enumerate([*beginnings, *beginnings[::-1]]):
                    reply = keeping.generate(text, **sampled)
                    assert reply.token_ids == expected[turn if turn < 3 else 5 - turn]
                    if turn >= 3:
                        assert reply.timings.cached_prompt_tokens == len(keeping.tokenize(text)) - 1
                keeping.save_session(tmp_path / "text.session")
            alone.score([5, 6])
            assert alone.load_session(tmp_path / "text.session")
            reply = alone.generate(beginnings[0], **sampled)
            assert (reply.token_ids, reply.timings.cached_prompt_tokens > 20) == (expected[0], True)
        with load_eager(small_bundle, kv=kv, context=128, overflow="window") as short:
            texts = [short.generate(beginnings[1], **sampled | {"max_tokens": 200}).token_ids for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 200


def test_a_session_survives_the_bundle_being_moved(model: edgeinfer.Model, small_bundle: Path, tmp_path: Path) -> None:
    model.generate(QUESTION, **OPTIONS)
    model.save_session(tmp_path / "text.session")
    shutil.copytree(small_bundle, tmp_path / "elsewhere")
    with load_eager(tmp_path / "elsewhere") as other:
        other.load_session(tmp_path / "text.session")
        assert other.generate(QUESTION, **OPTIONS).timings.cached_prompt_tokens > 5


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
    expected = model.generate(
        f"<s>system: Be brief.\nuser: Hello\nassistant: {first.text}\nuser: And now?\nassistant:", **OPTIONS
    )
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


STORY = "Once upon a time there was a dog. The dog liked to play with a ball in the park. One day the ball was gone. "


@needs_builtin
@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_goes_on_and_says_what_was_lost(policy: str) -> None:
    with load_eager(context=64, overflow=policy, remember=False) as model:
        short = model.generate("Once", max_tokens=10, speculation="off")
        assert short.overflow == edgeinfer.core.results.Overflow(policy)
        assert short.overflow.lossless
        long = model.generate(STORY * 4, max_tokens=50, ignore_eos=True, seed=1, temperature=0.5)
        assert len(long.token_ids) == 50
        assert long.finish_reason == "length"
        shown = long.to_dict()["overflow"]
        assert shown["policy"] == policy
        assert shown["events"] > 2
        assert shown["lossless"] is False
        fed = long.usage.total_tokens - 1
        assert fed - 64 <= shown["dropped"] + shown["merged"] <= fed - 64 + 8
        again = model.generate(STORY * 4, max_tokens=50, ignore_eos=True, seed=1, temperature=0.5, speculation="off")
        assert again.token_ids == long.token_ids
        scores = model.score(model.tokenize(STORY * 4))
        assert len(scores.logprobs) == len(model.tokenize(STORY * 4)) - 1


@needs_builtin
def test_without_a_policy_a_long_text_is_refused() -> None:
    with load_eager(context=64, remember=False) as model:
        with pytest.raises(ContextLengthError, match="overflow='window'"):
            model.generate(STORY * 4)
        assert model.generate("Once", max_tokens=2).overflow.policy == "stop"


def test_a_policy_that_cannot_work_says_so(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path)
    with pytest.raises(UsageError, match="at least 32 tokens"):
        edgeinfer.load(bundle, context=16, overflow="cluster", threads=1, remember=False)
