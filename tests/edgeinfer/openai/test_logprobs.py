"""Log-probabilities: the model's own, whatever drafts or samples, of the tokens whose text is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from edgeinfer.results import Chunk, Result, TokenLogprob
from tests.speculation import PROMPT, load_eager, needs_builtin
from tests.tables import each_row

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
    for verification in ("rejection", "typical"):
        # What ends the reply shows no text, so no logarithm either; whether it comes depends on what is drafted.
        options = {"temperature": 1.0, "seed": 3, "verification": verification, "ignore_eos": True}
        found, result = told(eager, **DRAFTED, **options)
        expected = scored(eager, eager.tokenize(PROMPT), result.token_ids)
        assert [one.logprob for one in found] == pytest.approx(expected, abs=1e-3)


@needs_builtin
def test_none_unless_asked_for(tales: edgeinfer.Model) -> None:
    assert told(tales, logprobs=None)[0] == []
    found, _ = told(tales, logprobs=0)
    assert len(found) == 40 and all(one.alternatives == () for one in found)
    wrong: tuple[Any, ...] = (-1, 21, "many")
    for value in wrong:
        with pytest.raises(UsageError, match="logprobs"):
            tales.generate(PROMPT, logprobs=value)


@needs_builtin
def test_a_stop_string_is_not_told_of(tales: edgeinfer.Model) -> None:
    text = tales.generate(PROMPT, max_tokens=40).text
    for stop in (text[10:12], text[9:20], text[3:4], text[25:31]):
        found, result = told(tales, stop=stop)
        assert result.finish_reason == "stop" and result.text == text[: text.index(stop)]
        spelled = b"".join(one.bytes for one in found).decode()
        assert spelled.startswith(result.text)
        # The last token told may reach into what was cut off, but begins before it.
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
