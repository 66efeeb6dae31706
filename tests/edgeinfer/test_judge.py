"""A judge of drafted tokens: what it is taught by, what it learns, and what a reply is that it verified."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import Heads, add_heads, read_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.research import judge
from edgeinfer.runtime.research.judge import Mismatch, RightReply, find_mismatches, read_questions
from edgeinfer.tools import tune_method
from tests.speculation import BUILTIN, PROMPT, known_costs, needs_builtin
from tests.tables import each_row

END = 0
SPELT = {1: "red", 2: "ball", 3: "big", 4: "dog", END: ""}


class Writer:
    """A model that goes on by table: what it says behind the tokens of a reply, `otherwise` behind all others."""

    context, end_ids = 40, [END]

    def __init__(self, replies: dict[tuple[int, ...], int], otherwise: int = END) -> None:
        self._replies, self._otherwise = replies, otherwise

    def tokenize_chat(self, messages: Any) -> list[int]:
        return [9, 9]

    def detokenize(self, tokens: Sequence[int], *, special: bool) -> str:
        return " ".join(SPELT[token] for token in tokens)

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        for start in range(0, len(tokens), 3):
            after = [tuple(tokens[2 : place + 1]) for place in range(start, min(start + 3, len(tokens)))]
            yield np.eye(10, dtype=np.float32)[[self._replies.get(path, self._otherwise) for path in after]]

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Any:
        ids = list(prompt)
        while len(ids) < len(prompt) + max_tokens and (len(ids) == len(prompt) or ids[-1] != END):
            ids.append(self._replies.get(tuple(ids[2:]), self._otherwise))
        new = tuple(ids[len(prompt) :])
        return SimpleNamespace(token_ids=new)


def test_mismatches_are_tried_one_after_the_other_and_stay_where_nothing_is_lost() -> None:
    # The model says "red ball big", behind "ball" it says "red", and behind "red dog" nothing.
    model: Any = Writer({(): 1, (1,): 2, (1, 2): 3, (2,): 1, (2, 1): 3})
    drafter: Any = Writer({(): 2, (2,): 4, (2, 1): 3, (1,): 4, (1, 2): 4, (1, 2, 3): 4})
    # "ball" may begin, as the model then says "red" all the same; "dog" in the place of "red" may not.
    question = RightReply([], ("red", "ball"), whole=False)
    expected = [Mismatch((9, 9, 2), False), Mismatch((9, 9, 2, 4), True)]
    assert list(find_mismatches(model, drafter, question)) == expected
    # Of a whole answer the model's own words count, right or wrong, and every other token matters.
    whole = list(find_mismatches(model, drafter, RightReply([], ("dog",), whole=True)))
    assert [each.tokens[2:] for each in whole] == [(2,), (1, 4), (1, 2, 4), (1, 2, 3, 4)]
    assert all(each.matters for each in whole)
    # A reply that has none of the words tells nothing.
    assert list(find_mismatches(model, drafter, RightReply([], ("dog",), whole=False))) == []


def test_the_score_parts_what_matters_from_the_rest_on_other_questions() -> None:
    chance = np.random.default_rng(4)
    states = chance.normal(size=(600, 24)).astype(np.float32) * np.linspace(0.1, 3, 24, dtype=np.float32)
    wrong = states[:, 3] - states[:, 7] + 0.3 * chance.normal(size=600) > 0.4
    weight, bias, gain = judge._taught(states, wrong, np.arange(600) % 30)
    scores = states @ weight + bias
    kinds = scores[~wrong][:, None] > scores[wrong]
    assert gain.area == pytest.approx(kinds.mean(), abs=0.03) and gain.area > 0.9
    # Of thirty replies, three may lose what mattered; the judge of all questions is much like those of some.
    assert gain.lost == pytest.approx(0.1) and 0.2 < gain.kept < 0.95
    assert (scores[~wrong] > 0).mean() == pytest.approx(gain.kept, abs=0.1)
    assert len(np.unique((np.arange(600) % 30)[wrong & (scores > 0)])) <= 5
    assert (gain.questions, gain.tokens) == (30, 600) and gain.matter == wrong.mean()
    with pytest.raises(UsageError, match="of a few questions"):
        judge._taught(states, wrong, wrong.astype(np.int64))


@each_row(
    "line",
    [
        *("{", "[]", '{"answer": "red"}', '{"messages": [], "answer": "red"}', '{"messages": 3, "answer": "red"}'),
        *('{"messages": [{}], "answer": ""}', '{"messages": [{}], "words": "red"}'),
        '{"messages": [{}], "words": [""]}',
    ],
)
def test_lines_that_are_no_questions_are_refused(line: str) -> None:
    good = '{"messages": [{"role": "user", "content": "Which?"}], "answer": "Red."}'
    assert read_questions(good + "\n\n")[0].met(" red") == {"Red."}
    with pytest.raises(UsageError, match="Line 2"):
        read_questions(f"{good}\n{line}")


@needs_builtin
@pytest.mark.slow
def test_a_judge_that_finds_all_right_leaves_the_draft_and_one_that_finds_nothing_right_the_model(
    tmp_path: Path, small_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "tales"
    shutil.copytree(BUILTIN, bundle)
    size = open_bundle(bundle).manifest.geometry.hidden_size

    def said(verdict: float | None, **options: Any) -> edgeinfer.Result:
        if verdict is not None:
            arrays = {"weight": np.zeros(size, np.float32), "bias": np.array([verdict], np.float32)}
            add_heads(bundle, Heads("judge", arrays))
        with known_costs(), edgeinfer.load(bundle, threads=1, remember=False) as model:
            return model.generate(PROMPT, max_tokens=33, ignore_eos=True, **options)

    judged = {"speculation": "model", "verification": "judge", "draft_max": 8}
    with pytest.raises(UsageError, match="no judge") as caught:
        said(None, **judged)
    assert "--method judge" in caught.value.hint
    plain, never, always = said(None), said(-1.0, **judged), said(1.0, **judged)
    assert never.token_ids == plain.token_ids != always.token_ids
    found = always.speculation
    assert (found.verification, found.lossless, found.exact) == ("judge", False, False)
    assert found.accepted == found.drafted > 0
    # Too few questions teach nothing, and the command says so.
    text = tmp_path / "questions.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "Tell me a story."}], "words": ["the"]}\n')
    assert main(["tune", "-m", str(bundle), "--method", "judge", "--text", str(text)]) == 2
    assert "teaches nothing" in capsys.readouterr().err
    assert read_heads(open_bundle(bundle), "judge") is not None
    with pytest.raises(UsageError, match="draft model"):
        tune_method("judge", bundle / "drafter", text.read_text())
    with pytest.raises(UsageError, match="are not the model's"):
        tune_method("judge", bundle, text.read_text(), draft_model=str(small_bundle))
