"""One reply as a stream: its chunks, its end, cancelling it, leaving it, and what the result says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import BackendError, EdgeInferError, UsageError
from tests.cli import TIME_LIMIT
from tests.speculation import load_eager

PROMPT = "Once upon a time"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}


def in_thread(work: Any) -> list[Any]:
    """Runs work in another thread; returns what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except EdgeInferError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=TIME_LIMIT)
    return outcome


def broken(*_: Any, **__: Any) -> None:
    raise BackendError("The engine broke.")


@pytest.mark.parametrize("seed", range(5))
def test_stream_and_generate_agree(model: edgeinfer.Model, seed: int) -> None:
    options = SAMPLED | {"seed": seed}
    stream = model.stream(PROMPT, **options)
    chunks = list(stream)
    result = model.generate(PROMPT, **options)
    assert "".join(chunk.text for chunk in chunks) == result.text == stream.result.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == result.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert model.detokenize(result.token_ids) in (result.text, result.text.strip())


def test_seeds_reproduce_and_differ(model: edgeinfer.Model) -> None:
    first, again, other = (model.generate(PROMPT, **SAMPLED | {"seed": s}).token_ids for s in (1, 1, 2))
    assert first == again != other
    options = SAMPLED | {"seed": None}
    assert model.generate(PROMPT, **options).token_ids != model.generate(PROMPT, **options).token_ids
    assert model.generate(PROMPT, max_tokens=20).token_ids == model.generate(PROMPT, max_tokens=20, seed=3).token_ids


def test_a_stop_string_ends_the_reply_before_itself(model: edgeinfer.Model) -> None:
    whole = model.generate(PROMPT, **SAMPLED).text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    stream = model.stream(PROMPT, stop=[stop], **SAMPLED)
    streamed = "".join(chunk.text for chunk in stream)
    assert stream.result.text == streamed == whole[: whole.index(stop)]
    assert stream.result.finish_reason == "stop"


def test_a_stop_string_that_never_comes_loses_no_text(model: edgeinfer.Model) -> None:
    whole = model.generate(PROMPT, **SAMPLED)
    # The last characters begin the stop string, so they are held back until the end.
    result = model.generate(PROMPT, stop=[whole.text[-2:] + "never"], **SAMPLED)
    assert (result.text, result.finish_reason) == (whole.text, "length")


def test_stop_token_ids(model: edgeinfer.Model) -> None:
    whole = model.generate(PROMPT, **SAMPLED).token_ids
    stop = next(token for token in whole[9:] if token != whole[0])
    result = model.generate(PROMPT, stop_token_ids=[stop], **SAMPLED)
    assert result.token_ids == whole[: whole.index(stop) + 1]
    assert result.finish_reason == "stop"
    assert result.text == model.generate(PROMPT, **SAMPLED | {"max_tokens": whole.index(stop)}).text


def test_end_of_text(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "logit_bias": {1: 1000.0}}
    result = model.generate(PROMPT, **options)
    assert (result.token_ids, result.text, result.finish_reason) == ((1,), "", "stop")
    ignored = model.generate(PROMPT, ignore_eos=True, **options)
    assert (ignored.token_ids, ignored.finish_reason) == ((1,) * 6, "length")


def test_the_result_comes_at_the_end(model: edgeinfer.Model) -> None:
    stream = model.stream(PROMPT, max_tokens=4, ignore_eos=True)
    next(stream)
    with pytest.raises(UsageError, match="not finished"):
        _ = stream.result
    list(stream)
    assert len(stream.result.token_ids) == 4


def test_timings(model: edgeinfer.Model) -> None:
    # Plainly: tokens of one pass come together, so that most of them may have taken no time of their own.
    timings = model.generate(PROMPT, max_tokens=12, ignore_eos=True, speculation="off").timings
    assert timings.load_ms > 0
    assert 0 < timings.prompt_ms <= timings.ttft_ms
    assert 0 < timings.per_token_p50_ms <= timings.per_token_p95_ms
    assert timings.tokens_per_second == pytest.approx(1e3 / timings.per_token_ms)
    single = model.generate(PROMPT, max_tokens=1).timings
    assert single.ttft_ms > 0
    assert (single.per_token_ms, single.per_token_p95_ms, single.tokens_per_second) == (0, 0, 0)


def test_cancelling_before_the_first_chunk(model: edgeinfer.Model) -> None:
    stream = model.stream(PROMPT, **SAMPLED)
    stream.cancel()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    assert stream.result.token_ids == ()


def test_cancelling_a_finished_reply_leaves_the_next_alone(model: edgeinfer.Model) -> None:
    stream = model.stream(PROMPT, max_tokens=3, ignore_eos=True)
    list(stream)
    stream.cancel()
    assert stream.result.finish_reason == "length"
    assert len(model.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_stream_left_early_makes_room_for_the_next(model: edgeinfer.Model) -> None:
    expected = model.generate("Another prompt", **SAMPLED).text
    left = model.stream(PROMPT, **SAMPLED)
    pieces = [next(left).text for _ in range(3)]
    assert model.generate("Another prompt", **SAMPLED).text == expected
    assert left.result.finish_reason == "cancelled"
    assert left.result.text == "".join(pieces)
    assert list(left) == []


def test_a_with_block_finishes_the_reply(model: edgeinfer.Model) -> None:
    with model.stream(PROMPT, **SAMPLED) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    stream.close()
    assert len(stream.result.token_ids) == 1


def test_a_reply_closed_before_its_first_chunk(model: edgeinfer.Model) -> None:
    model.generate(PROMPT, max_tokens=1)
    model.generate(PROMPT, max_tokens=1)  # reuses the prompt
    stream = model.stream(PROMPT, **SAMPLED)
    stream.close()
    assert (stream.result.text, stream.result.token_ids, stream.result.finish_reason) == ("", (), "cancelled")
    # Nothing was evaluated or reused for it.
    assert (stream.result.timings.prompt_ms, stream.result.timings.cached_prompt_tokens) == (0, 0)


def test_another_thread_cannot_end_a_running_reply(model: edgeinfer.Model) -> None:
    expected = model.generate(PROMPT, **SAMPLED).text
    stream = model.stream(PROMPT, **SAMPLED)
    pieces = [next(stream).text]
    (refused,) = in_thread(lambda: model.generate("Hello", max_tokens=2))
    assert isinstance(refused, UsageError)
    assert "Another thread" in refused.message
    pieces += [chunk.text for chunk in stream]
    assert "".join(pieces) == expected
    (allowed,) = in_thread(lambda: model.generate("Hello", max_tokens=2))
    assert isinstance(allowed, edgeinfer.Result)


def test_a_reply_that_failed_does_not_block_other_threads(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_eager(small_bundle) as model:
        with monkeypatch.context() as patch:
            patch.setattr(model._parts.engine.backend, "forward", broken)
            (failed,) = in_thread(lambda: model.generate(PROMPT, max_tokens=2))
        assert isinstance(failed, BackendError) and "broke" in failed.message
        assert len(model.generate(PROMPT, max_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("token", [-1, 320, 10**6])
def test_a_prompt_with_an_unknown_token_is_the_callers_fault(model: edgeinfer.Model, token: int) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        model.generate([5, token], max_tokens=2)
