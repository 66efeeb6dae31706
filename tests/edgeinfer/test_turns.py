"""Replies of one model that take turns: each has the text it would have alone, whatever runs in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.core.errors import UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.generation import TokenStream
from tests.cache import made
from tests.cli import TIME_LIMIT
from tests.factories import make_checkpoint
from tests.gguf_models import builtin_gguf
from tests.speculation import BUILTIN, load_eager, needs_builtin
from tests.tables import each_row

PROMPTS = (
    "Once upon a time there was a girl named Lily. She had a red ball. She had a red ball and a dog.",
    "The little bird said to the cat: I want to fly high, high, high into the sky. The cat",
    "Tom and Sue went to the park. Tom and Sue saw a big tree. " * 4,
)
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Tom", "Sue"]}}, "required": ["name"]}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "top_p": 0.9},
    {"json_schema": SCHEMA},
    {"draft_width": 3},
    {"speculation": "off"},
)


@pytest.fixture(scope="module")
def tales() -> Iterator[edgeinfer.Model]:
    with load_eager(context=256, prefix_cache="32MB", draft_model=BUILTIN) as model:
        yield model


def interleaved(streams: list[TokenStream], order: list[int]) -> list[str]:
    """Reads chunks of one stream after the other, in this order and then to the end, pausing each in between."""
    for stream in streams:
        assert stream.pause()
    left = set(range(len(streams)))
    for turn in [*order, *range(len(streams))]:
        stream = streams[turn % len(streams)]
        if turn % len(streams) not in left:
            continue
        done = None
        for _ in range(3 if turn < len(order) else 10_000):
            if (done := next(stream, None)) is None:
                break
        if done is None:
            left.discard(turn % len(streams))
        else:
            stream.pause()
    return [stream.complete().text for stream in streams]


def started(model: edgeinfer.Model, prompt: str, **options: Any) -> TokenStream:
    stream = model.stream(prompt, **{"max_tokens": 40, "ignore_eos": True} | options)
    stream.pause()
    return stream


@needs_builtin
@settings(max_examples=4, deadline=None)
@given(ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=4), order=st.lists(st.integers(0, 3), max_size=40))
def test_text_does_not_depend_on_turns(tales: edgeinfer.Model, ways: list[dict[str, Any]], order: list[int]) -> None:
    alone = [
        tales.generate(PROMPTS[i % 3], **{"max_tokens": 40, "ignore_eos": "json_schema" not in way} | way)
        for i, way in enumerate(ways)
    ]
    streams = [
        started(tales, PROMPTS[i % 3], **way | {"ignore_eos": "json_schema" not in way}) for i, way in enumerate(ways)
    ]
    assert interleaved(streams, order) == [result.text for result in alone]
    for stream, result in zip(streams, alone, strict=True):
        assert stream.result.token_ids == result.token_ids
        assert stream.result.finish_reason == result.finish_reason
        assert stream.result.usage == result.usage


@needs_builtin
@pytest.mark.parametrize("drafters", ["copy,ngram,recycle", "model", "exit", "bits"])
def test_drafters_take_turns(tales: edgeinfer.Model, drafters: str) -> None:
    alone = [tales.generate(prompt, max_tokens=30, ignore_eos=True, speculation="off") for prompt in PROMPTS]
    streams = [started(tales, prompt, max_tokens=30, speculation=drafters) for prompt in PROMPTS]
    assert interleaved(streams, [0, 1, 2, 1, 0, 2, 2, 0]) == [result.text for result in alone]
    assert sum(stream.result.speculation.accepted for stream in streams)


@needs_builtin
def test_what_is_evaluated_once_is_not_evaluated_again(tales: edgeinfer.Model) -> None:
    streams = [started(tales, prompt, max_tokens=20) for prompt in PROMPTS]
    evaluated = 0
    for _ in range(8):
        for stream in streams:
            next(stream)
            parts = tales._parts
            evaluated += parts.sequence.prefill.evaluated
            stream.pause()
    # Of each turn but the first the one token that was not fed yet, and of each prompt what no other shares.
    prompts = sum(len(tales.tokenize(prompt)) for prompt in PROMPTS)
    assert evaluated <= prompts + 3 * 8
    for stream in streams:
        stream.close()


@needs_builtin
def test_a_prompt_taken_in_piece_by_piece(tales: edgeinfer.Model) -> None:
    alone = tales.generate(PROMPTS[2], max_tokens=20)
    tales._parts.sequence.evict_prefixes()
    tales._parts.sequence.forget()
    stream, other = started(tales, PROMPTS[2], max_tokens=20), started(tales, PROMPTS[0], max_tokens=20)
    pieces = 0
    while not stream.prepare(8):
        pieces += 1
        stream.pause()
        next(other)
        other.pause()
    assert pieces == (alone.usage.prompt_tokens - 2) // 17
    assert stream.complete().text == alone.text
    timings = stream.result.timings
    assert timings.prompt_ms > 0 and timings.ttft_ms >= timings.prompt_ms
    assert stream.prepare(8)
    other.close()


@needs_builtin
def test_one_runs_at_a_time(tales: edgeinfer.Model) -> None:
    first = started(tales, PROMPTS[0])
    second = tales.stream(PROMPTS[1], max_tokens=5)
    with pytest.raises(UsageError, match=r"Another reply of this model is running\. Pause"):
        first.prepare(3)
    with pytest.raises(UsageError, match="Another reply"):
        next(first)
    # An error ends a stream, as an iterator does.
    assert first.result.finish_reason == "cancelled"
    assert second.complete().usage.completion_tokens == 5


@needs_builtin
def test_cancelling_a_paused_reply_leaves_the_running_one_alone(tales: edgeinfer.Model) -> None:
    alone = tales.generate(PROMPTS[1], max_tokens=30, ignore_eos=True)
    paused = started(tales, PROMPTS[0])
    next(paused)
    paused.pause()
    running = tales.stream(PROMPTS[1], max_tokens=30, ignore_eos=True)
    next(running)
    canceller = threading.Thread(target=paused.cancel)
    canceller.start()
    canceller.join(timeout=TIME_LIMIT)
    assert running.complete().text == alone.text
    assert [chunk.finish_reason for chunk in paused][-1] == "cancelled"


@needs_builtin
def test_a_reply_can_be_paused_where_its_text_can_be_evaluated_again() -> None:
    with load_eager(context=128) as model:
        expected = [model.generate(prompt, max_tokens=12).token_ids for prompt in PROMPTS[:2]]
        stream = model.stream(PROMPTS[0], max_tokens=12)
        next(stream)
        assert stream.pause()
        assert model.generate(PROMPTS[1], max_tokens=12).token_ids == expected[1]
        next(stream)
        # Without a prefix cache its pages stay: others need not wait for a reply that continues in a batch.
        assert stream.pause()
        with contextlib.closing(model.reply_batch(2)) as batch:
            found: list[tuple[int, ...]] = []

            def going_on() -> Generator[TokenStream, None, None]:
                yield batch.join(stream)
                found.append(stream.complete().token_ids)

            def other() -> Generator[TokenStream, None, None]:
                began = model.stream(PROMPTS[1], max_tokens=12)
                yield began
                found.append(began.complete().token_ids)

            batch.add(going_on())
            batch.add(other())
            while batch.step():
                pass
        assert sorted(found) == sorted(expected)
    with load_eager(context=128, overflow="window") as model:
        stream = model.stream(PROMPTS[0], max_tokens=5)
        assert not stream.pause()
        assert len(stream.complete().token_ids) == 5


@needs_builtin
def test_a_paused_reply_keeps_the_model(tales: edgeinfer.Model) -> None:
    stream = started(tales, PROMPTS[0])
    next(stream)
    stream.pause()
    with pytest.raises(UsageError, match="paused"):
        tales.unload()
    assert next(stream) is not None
    stream.close()
    tales.unload()
    assert tales.generate(PROMPTS[0], max_tokens=3).token_ids


@needs_builtin
def test_closing_the_model_finishes_paused_replies() -> None:
    with load_eager(context=128, prefix_cache="8MB") as model:
        streams = [started(model, prompt) for prompt in PROMPTS[:2]]
    assert [stream.result.finish_reason for stream in streams] == ["cancelled"] * 2


@needs_builtin
def test_a_reply_goes_on_with_what_it_says(tales: edgeinfer.Model) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    whole = tales.stream_chat(messages, max_tokens=40, speculation="off").complete()
    half = tales.detokenize(whole.token_ids[:20])
    rest = tales.stream_chat(messages, prefill=half, max_tokens=20, speculation="off").complete()
    assert half + rest.text == whole.text


def make_noise(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama", seed=5)
    export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(4, calibration="none"))


@each_row("kv", ["float32", "int8", "int4"])
def test_other_caches(kv: str) -> None:
    with load_eager(made(make_noise) / "bundle", kv=kv, prefix_cache="16MB") as model:
        alone = [model.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS[:2]]
        streams = [started(model, prompt, max_tokens=20) for prompt in PROMPTS[:2]]
        assert interleaved(streams, [0, 1] * 9) == [result.text for result in alone]


@pytest.mark.gguf
@needs_builtin
def test_gguf_models_take_turns() -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    with load_eager(builtin_gguf(), backend="llamacpp", context=256, prefix_cache="32MB") as model:
        alone = [model.generate(prompt, max_tokens=30, ignore_eos=True) for prompt in PROMPTS]
        streams = [started(model, prompt, max_tokens=30) for prompt in PROMPTS]
        assert interleaved(streams, [0, 1, 2] * 9) == [result.text for result in alone]
