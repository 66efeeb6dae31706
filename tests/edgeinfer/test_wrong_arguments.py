"""Arguments of the wrong kind, as programs pass them by mistake: each is refused by an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
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
    (lambda model: model.pieces([2**31]), PromptError, f"The token id {2**31} is outside"),
    (lambda model: model.detokenize("Once"), PromptError, "The ids are 'Once', which are no integers"),
    (lambda model: model.chat(system=5), UsageError, "The system message is 5"),
    (lambda model: model.generate("Once", choices=[]), UsageError, "choices=[] is out of range"),
    (lambda _: edgeinfer.load(""), ModelError, "'' is not a model's name."),
    (lambda _: edgeinfer.load(5), ModelError, "5 is not a model's name."),  # type: ignore[arg-type]
)


class FilePath:
    """What other libraries have for paths."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@each_row("call, kind, words", CALLS)
def test_wrong_arguments_are_refused_by_name(
    model: edgeinfer.Model, call: Call, kind: type[EdgeInferError], words: str
) -> None:
    with pytest.raises(kind) as refusal:
        call(model)
    assert words in str(refusal.value)


def test_ids_of_numpy_have_a_text(model: edgeinfer.Model) -> None:
    ids = model.tokenize("the dog and the cat")
    numbers: Any = np.array(ids)
    for given in (numbers, list(numbers)):
        assert model.detokenize(given) == model.detokenize(ids)
        assert model.pieces(given) == model.pieces(ids)
    wrongs: Any = ([True], np.array([True]), np.array(3), np.array([ids]), [1.0])
    for wrong in wrongs:
        with pytest.raises(PromptError, match="The ids are"):
            model.detokenize(wrong)


@each_row("kind", (PurePath, FilePath))
def test_paths_of_any_kind_are_models(kind: Callable[[str], Any], tmp_path: Path) -> None:
    assert hub.find(kind(str(tmp_path))) == tmp_path
    with pytest.raises(ModelError, match=r"No model at '.*none'"):
        hub.local(kind(str(tmp_path / "none")))
    assert edgeinfer.LoadConfig.of(draft_model=kind(str(tmp_path))).draft_model == str(tmp_path)


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
