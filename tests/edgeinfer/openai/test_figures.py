"""How replies end, and their token counts, times and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.core.results import Chunk, Result, SpeculationUse, Timings, TokenLogprob, Usage
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import OTHERS_FIELDS
from edgeinfer.openai.replies import responses_usage, timings, usage
from tests.edgeinfer.openai.functions import CLOCK, as_tools
from tests.speculation import PROMPT, load_eager, needs_builtin
from tests.tables import each_row

NAMES = [
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
    "draft_n",
    "draft_n_accepted",
]


@pytest.fixture
def result(model: edgeinfer.Model) -> Result:
    """A reply of known figures."""
    times = Timings(
        load_ms=1.0,
        prompt_ms=20.0,
        ttft_ms=500.0,
        per_token_ms=5.0,
        per_token_p50_ms=5.0,
        per_token_p95_ms=5.0,
        tokens_per_second=200.0,
        cached_prompt_tokens=6,
    )
    speculation = SpeculationUse("auto", drafted=9, accepted=4)
    return replace(model.generate([5], max_tokens=1), usage=Usage(10, 5), timings=times, speculation=speculation)


def test_timings(result: Result) -> None:
    one = timings([result])
    assert list(one) == NAMES
    assert (one["cache_n"], one["prompt_n"], one["predicted_n"]) == (6, 4, 5)
    assert (one["prompt_ms"], one["prompt_per_token_ms"], one["prompt_per_second"]) == (20.0, 5.0, 200.0)
    assert (one["predicted_ms"], one["predicted_per_token_ms"], one["predicted_per_second"]) == (20.0, 4.0, 250.0)
    assert (one["draft_n"], one["draft_n_accepted"]) == (9, 4)
    two = timings([result, result])
    for name in NAMES:
        assert two[name] == (one[name] if "_per_" in name else 2 * one[name])


def test_nothing_was_done(result: Result) -> None:
    idle = replace(result.timings, prompt_ms=0.0, per_token_ms=0.0, cached_prompt_tokens=10)
    found = timings([replace(result, timings=idle, usage=Usage(10, 0))])
    assert [found[name] for name in NAMES] == [10, 0, 0, 0, 0, 0, 0, 0, 0, 9, 4]


def test_a_prompt_counts_once(result: Result) -> None:
    counted = usage([result] * 6, per_prompt=3)
    assert counted == {
        "prompt_tokens": 20,
        "completion_tokens": 30,
        "total_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 12},
    }
    assert responses_usage([result])["total_tokens"] == 15


MESSAGES = [{"role": "user", "content": "Tell me about a dog."}]
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "cat"]}, "legs": {"type": "integer"}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def answered(model: edgeinfer.Model, **request: Any) -> dict[str, Any]:
    answer = model.create_chat_completion(MESSAGES, **request)
    assert isinstance(answer, dict)
    return answer


def cut(model: edgeinfer.Model, **request: Any) -> Iterator[dict[str, Any]]:
    """The choices of a request as they are with fewer and fewer tokens, from the whole reply on."""
    tokens = answered(model, **request)["usage"]["completion_tokens"]
    for missing in (0, 1, 2, 8, 16, 24):
        yield answered(model, **request, max_tokens=max(tokens - missing, 1))["choices"][0]


@needs_builtin
def test_what_is_complete_was_not_cut_off() -> None:
    """At each length a reply ends with "length" where something is missing, and with what completes it not."""
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    calling = {"tools": as_tools(CLOCK), "tool_choice": "required", "parallel_tool_calls": False}
    with edgeinfer.load(context=1024, threads=1) as model:
        document, *shorter = cut(model, response_format=form)
        text = document["message"]["content"]
        # One way to write it: a blank behind colons and commas, and no more digits than readers of JSON take.
        assert text == json.dumps(json.loads(text)) and len(text) < 50
        wholes = [choice["message"]["content"] == text for choice in shorter]
        assert [choice["finish_reason"] == "stop" for choice in shorter] == wholes
        assert set(wholes) == {True, False}
        called, *shorter = cut(model, **calling)
        (call,) = called["message"]["tool_calls"]
        arguments = [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in shorter]
        wholes = [argument == call["function"]["arguments"] for argument in arguments]
        assert [choice["finish_reason"] == "tool_calls" for choice in shorter] == wholes
        assert set(wholes) == {True, False}


def test_fields_of_other_servers_are_ignored_and_told_of(model: edgeinfer.Model) -> None:
    neutral = {name: values[0] for name, values in OTHERS_FIELDS.items() if values}
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, **neutral)
    assert isinstance(answer, dict) and "warnings" not in answer
    others: dict[str, Any] = {"mirostat": 2, "typical_p": 0.8, "cache_prompt": True}
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, **others)
    assert isinstance(answer, dict)
    ignored = ("mirostat", "typical_p")
    assert answer["warnings"] == [f"{name} is not supported and was ignored." for name in ignored]


def test_fields_that_nobody_has_are_refused_where_they_are_nearly_others(model: edgeinfer.Model) -> None:
    with pytest.raises(RequestError, match=r"Unknown field 'temprature'\. Did you mean 'temperature'\?"):
        model.create_chat_completion(MESSAGES, temprature=1)  # type: ignore[call-overload]
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, zzz=1)  # type: ignore[call-overload]
    assert answer["warnings"] == ["zzz is not supported and was ignored."]


SAMPLED = {"temperature": 1.2, "top_k": 30, "seed": 4, "frequency_penalty": 0.5, "logit_bias": {40: 3.0}}
DRAFTED = {"speculation": "ngram,copy,recycle", "draft_max": 6}


@pytest.fixture(scope="module")
def eager() -> Iterator[edgeinfer.Model]:
    """The built-in model, drafting what it can."""
    with load_eager(context=1024) as model:
        yield model


def told(model: edgeinfer.Model, prompt: Any = PROMPT, **options: Any) -> tuple[list[TokenLogprob], Result]:
    stream = model.stream(prompt, **{"max_tokens": 40, "logprobs": 3} | options)
    found = [logprob for chunk in stream for logprob in chunk.logprobs]
    return found, stream.result


def scored(model: edgeinfer.Model, prompt: list[int], reply: tuple[int, ...]) -> list[float]:
    """What evaluating the finished text gives."""
    scores = model.score([*prompt, *reply]).logprobs
    return [float(value) for value in scores[len(prompt) - 1 :]]


@needs_builtin
@each_row("options", [{}, SAMPLED])
def test_they_are_the_models_own(tales: edgeinfer.Model, options: dict[str, Any]) -> None:
    found, result = told(tales, speculation="off", **options)
    prompt = tales.tokenize(PROMPT)
    assert tuple(one.token_id for one in found) == result.token_ids
    assert [one.logprob for one in found] == pytest.approx(scored(tales, prompt, result.token_ids), abs=1e-3)
    logits = [row for rows in tales.logits([*prompt, *result.token_ids]) for row in rows.copy()]
    for one, row in zip(found, logits[len(prompt) - 1 :], strict=False):
        probabilities = np.exp(row.astype(np.float64) - row.max())
        probabilities /= probabilities.sum()
        best = np.argsort(-probabilities)[:3]
        assert [other.token_id for other in one.alternatives] == best.tolist()
        expected = np.log(probabilities[best]).tolist()
        assert [other.logprob for other in one.alternatives] == pytest.approx(expected, abs=1e-3)


@needs_builtin
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_nothing(eager: edgeinfer.Model, options: dict[str, Any], width: int) -> None:
    edgeinfer.tools.restore_drafting(eager, {})
    expected, _ = told(eager, speculation="off", max_tokens=80, **options)
    found, result = told(eager, **DRAFTED, draft_width=width, max_tokens=80, **options)
    assert result.speculation.drafted
    assert found == expected


def test_drafts_change_little_where_rows_differ_between_passes(small_bundle: Path) -> None:
    with load_eager(small_bundle, native=False, exact=False) as model:
        prompt = [5, 6, 7, 5, 6, 7, 5, 6]
        expected, plain = told(model, prompt, speculation="off", ignore_eos=True)
        found, result = told(model, prompt, **DRAFTED, ignore_eos=True)
        assert result.token_ids == plain.token_ids and result.speculation.drafted
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=0.05)


@needs_builtin
def test_other_verifications_tell_them_too(eager: edgeinfer.Model) -> None:
    # What ends the reply shows no text, so no logarithm either; whether it comes depends on what is drafted.
    options = {"temperature": 1.0, "seed": 3, "verification": "rejection", "ignore_eos": True}
    found, result = told(eager, **DRAFTED, **options)
    expected = scored(eager, eager.tokenize(PROMPT), result.token_ids)
    assert [one.logprob for one in found] == pytest.approx(expected, abs=1e-3)


@needs_builtin
def test_none_unless_asked_for(tales: edgeinfer.Model) -> None:
    assert told(tales, logprobs=None)[0] == []
    found, _ = told(tales, logprobs=0)
    assert len(found) == 40 and all(one.alternatives == () for one in found)


@needs_builtin
def test_a_stop_string_is_not_told_of(tales: edgeinfer.Model) -> None:
    text = tales.generate(PROMPT, max_tokens=40).text
    for stop in (text[10:12], text[9:20], text[3:4], text[25:31]):
        found, result = told(tales, stop=stop)
        assert result.finish_reason == "stop" and result.text == text[: text.index(stop)]
        spelled = b"".join(one.bytes for one in found).decode()
        assert spelled.startswith(result.text)
        # The last token may reach into the text that was cut off, but starts before it.
        assert len(spelled) - len(found[-1].bytes) < len(result.text) if found else not result.text


@needs_builtin
def test_they_come_with_the_text(tales: edgeinfer.Model) -> None:
    def shown(**options: Any) -> list[Chunk]:
        return [chunk for chunk in tales.stream(PROMPT, max_tokens=40, logprobs=1, **options) if chunk.logprobs]

    assert all(len(chunk.logprobs) == 1 for chunk in shown())
    # One that might begin a stop string waits, and then several come at once.
    held = shown(stop=[tales.generate(PROMPT, max_tokens=12).text[10:] + "\0"])
    assert max(len(chunk.logprobs) for chunk in held) > 1
    assert sum(len(chunk.logprobs) for chunk in held) == 40
    for chunk in held:
        assert chunk.text.encode().startswith(b"".join(one.bytes for one in chunk.logprobs[:-1]))


def test_parts_of_characters(model: edgeinfer.Model) -> None:
    """A random model writes broken characters; nothing is lost."""
    stream = model.stream([5, 6], max_tokens=60, logprobs=0, temperature=2.0, seed=1, ignore_eos=True)
    found = [one for chunk in stream for one in chunk.logprobs]
    assert tuple(one.token_id for one in found) == stream.result.token_ids


@needs_builtin
def test_the_token_that_ends_a_reply_is_not_told_of(tales: edgeinfer.Model) -> None:
    end = tales.end_ids[0]
    found, result = told(tales, logit_bias={end: 100})
    assert result.token_ids == (end,) and found == []
