"""Arguments of the wrong kind, as programs pass them by mistake: each is refused by an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.errors import EdgeInferError, ModelError, PromptError, UsageError
from tests.tables import each_row

Call = Callable[[Any], object]

# What is done with a model, the error and words of its message.
CALLS: tuple[tuple[Call, type[EdgeInferError], str], ...] = (
    (lambda model: model.generate(b"Once"), PromptError, "The prompt is b'Once'"),
    (lambda model: model.generate_batch("Once"), PromptError, "The prompts are one text, 'Once'."),
    (lambda model: model.tokenize(None), PromptError, "The text is None"),
    (lambda model: model.detokenize([-1]), PromptError, "The token id -1 is outside"),
    (lambda model: model.detokenize([0, 2**31]), PromptError, f"The token id {2**31} is outside"),
    (lambda model: model.spell([2**31]), PromptError, f"The token id {2**31} is outside"),
    (lambda model: model.detokenize("Once"), PromptError, "neither a string nor token ids"),
    (lambda model: model.chat(system=5), UsageError, "The system message is 5"),
    (lambda model: model.generate("Once", choices=[]), UsageError, "choices must be at least one text"),
    (lambda _: edgeinfer.load(""), ModelError, "'' is no name of a model."),
    (lambda _: edgeinfer.load(5), ModelError, "5 is no name of a model."),  # type: ignore[arg-type]
)


@each_row("call, kind, words", CALLS)
def test_wrong_arguments_are_refused_by_name(
    model: edgeinfer.Model, call: Call, kind: type[EdgeInferError], words: str
) -> None:
    with pytest.raises(kind) as refusal:
        call(model)
    assert words in str(refusal.value)


def test_every_token_has_a_text(model: edgeinfer.Model) -> None:
    text = "the dog and the cat"
    ids = model.tokenize(text)
    assert model.detokenize(ids).strip() == text
    assert model.detokenize([]) == ""


def test_a_result_has_the_logprobs_of_its_text(model: edgeinfer.Model) -> None:
    streamed = model.stream("the dog", max_tokens=6, logprobs=2, ignore_eos=True)
    told = [each for chunk in streamed for each in chunk.logprobs]
    result = streamed.result
    assert result.logprobs == tuple(told)
    assert len(told) == 6
    assert json.loads(json.dumps(result.to_dict()))["logprobs"][0]["bytes"] == list(told[0].bytes)
    assert "logprobs" not in model.generate("the dog", max_tokens=2).to_dict()


def test_the_builtin_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.find(hub.BUILTIN) == hub.builtin()
    (tmp_path / hub.BUILTIN).mkdir()
    assert hub.find(hub.BUILTIN) == Path(hub.BUILTIN)
