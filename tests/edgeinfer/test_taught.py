"""What is learnt of questions and texts: a judge of drafted tokens, and steering vectors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import (
    Heads,
    SteeringVector,
    add_heads,
    add_steering,
    read_heads,
    read_steering,
    steering_names,
)
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.research import judge
from edgeinfer.runtime.research.judge import Mismatch, RightReply, find_mismatches, read_questions
from edgeinfer.tools import steering as learning
from edgeinfer.tools import tune_method, tune_steering
from tests.speculation import BUILTIN, PROMPT, known_costs, load_eager, needs_builtin
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
        with load_eager(bundle, remember=False) as model:
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


V, S = 12, 400


class Table:
    """A model whose logits are given."""

    def __init__(self, logits: Any) -> None:
        self._logits = logits.astype(np.float32)

    def logits(self, tokens: Any) -> Any:
        """A few rows at a time, one for each token."""
        for start in range(0, len(tokens), 7):
            yield self._logits[start : start + 7].copy()


def drawn() -> tuple[Any, list[int]]:
    """Logits of a model, and a text drawn from them with five tokens moved."""
    chance = np.random.default_rng(2)
    logits, moved = chance.normal(0, 1, (S, V)), np.zeros(V)
    moved[:5] = (1.5, -1.0, 0.5, 0.0, 2.0)
    weights = np.exp(logits + moved)
    return logits, [0, *(int(chance.choice(V, p=row / row.sum())) for row in weights[:-1])]


def nats(logits: Any, ids: list[int], bias: Any) -> float:
    """Nats of all tokens but the first, by their definition."""
    rows = logits[:-1] + bias
    totals = np.log(np.exp(rows).sum(axis=1))
    return float((totals - rows[np.arange(len(rows)), ids[1:]]).mean())


def test_a_vector_is_learnt_down_the_gradient() -> None:
    logits, ids = drawn()
    steered = np.array([0, 1, 2, 3, 4], np.int32)
    read = learning._read(Table(logits), ids, steered)
    bias = np.zeros(V)
    assert read.nats(np.zeros(5)) == pytest.approx(nats(logits, ids, bias), abs=1e-6)
    bias[:5] = (0.3, -0.2, 0.1, 0.7, -0.4)
    assert read.nats(bias[:5]) == pytest.approx(nats(logits, ids, bias), abs=1e-6)
    # Where the slope is flat: as often predicted as there, but for what rare tokens are held back by.
    vector = learning.learn_steering([read])
    predicted = read.predicted(vector)[0].sum(axis=0)
    counts = np.bincount(ids[1:], minlength=V)[:5]
    np.testing.assert_allclose(counts - predicted, learning._PRIOR * vector, atol=1.0)
    assert vector == pytest.approx([1.5, -1.0, 0.5, 0.0, 2.0], abs=0.5)
    bias[:5] = vector
    assert nats(logits, ids, bias) < nats(logits, ids, np.zeros(V)) - 0.1


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    """A bundle of one's own, with a vector that raises two tokens and lowers one."""
    path = tmp_path / "own"
    shutil.copytree(small_bundle, path)
    vector = SteeringVector(np.array([9, 40, 77], np.int32), np.array([3.0, 2.0, -4.0], np.float32))
    assert steering_names(add_steering(path, "story", vector)) == ("story",)
    return path


def test_a_reply_is_steered_as_by_biases_and_the_same_with_drafts(bundle: Path) -> None:
    with known_costs(), edgeinfer.load(bundle, threads=1, context=200, remember=False) as model:

        def tokens(**options: Any) -> tuple[int, ...]:
            return model.generate(PROMPT, max_tokens=40, ignore_eos=True, **options).token_ids

        for drawn in ({}, {"temperature": 0.9, "seed": 4}):
            plain, biased = tokens(**drawn), tokens(logit_bias={9: 4.5, 40: 3.0, 77: -6.0}, **drawn)
            assert plain != biased
            for drafters in ("off", "copy,ngram", "auto"):
                assert tokens(steering="story:1.5", speculation=drafters, **drawn) == biased
        added = tokens(steering="story", logit_bias={9: 1.0, 50: 2.0})
        assert added == tokens(logit_bias={9: 4.0, 40: 2.0, 77: -4.0, 50: 2.0})
        assert tokens(steering="story:0") == tokens()
        assert tokens(steering="story", search="samples", samples=2, temperature=0.9, seed=4) == tokens(
            steering="story", temperature=0.9, seed=4
        )
        with pytest.raises(UsageError, match="no steering vector 'terse'") as caught:
            tokens(steering="terse")
        assert caught.value.hint == "It has story."


@each_row("wrong", ("", ":2", "a:b", "a,a", "a:101", "a:nan", ",".join("abcdefghi"), 3))
def test_wrong_scales_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="steering"):
        ReplyOptions(steering=wrong)


@each_row(
    "tokens, values",
    [
        (np.array([1], np.int64), np.array([1.0], np.float32)),
        (np.array([1], np.int32), np.array([1.0, 2.0], np.float32)),
        (np.array([], np.int32), np.array([], np.float32)),
        (np.array([1, 1], np.int32), np.array([1.0, 2.0], np.float32)),
        (np.array([-1], np.int32), np.array([1.0], np.float32)),
        (np.array([10**6], np.int32), np.array([1.0], np.float32)),
        (np.array([1], np.int32), np.array([np.nan], np.float32)),
        (np.array([1], np.int32), np.array([99.0], np.float32)),
    ],
)
def test_other_vectors_are_refused(tokens: Any, values: Any, small_bundle: Path) -> None:
    with pytest.raises(BundleError):
        SteeringVector(tokens, values).check(open_bundle(small_bundle).manifest.geometry)


def test_names_and_damage(bundle: Path) -> None:
    vector = read_steering(open_bundle(bundle), "story")
    for name in ("", "../out", "a/b", ".hidden", "x" * 65):
        with pytest.raises(UsageError, match="cannot be the name"):
            add_steering(bundle, name, vector)
    path = bundle / "steering" / "story.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BundleError):
        read_steering(open_bundle(bundle), "story")


@pytest.mark.slow
def test_the_command_learns_one(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The red dog ran to the red ball and the red house. " * 60)
    arguments = ["tune", "-m", str(bundle), "--context", "200", "--steering", "red"]
    assert main([*arguments, "--text", str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steered"] < found["plain"]
    assert steering_names(open_bundle(bundle)) == ("red", "story")
    assert main([*arguments]) == 2
    assert "--text" in capsys.readouterr().err
    with pytest.raises(UsageError, match="too few"):
        tune_steering(bundle, "short", "Too short.", context=200)
