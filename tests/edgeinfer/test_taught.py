"""Steering vectors, learnt of texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import (
    SteeringVector,
    add_steering,
    read_steering,
    steering_names,
)
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.tools import steering as learning
from edgeinfer.tools import tune_steering
from tests.speculation import PROMPT, known_costs
from tests.tables import each_row

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
