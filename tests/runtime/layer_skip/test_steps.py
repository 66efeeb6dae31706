"""Routing by steps against the same thing done in the obvious way: who writes what, and what the cache holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.layer_skip.strategy import StrategyArguments
from edgeinfer.runtime.research.steps import StepEnds, StepRoutingDecoding, advantage
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.alone import Alone
from tests.runtime.layer_skip.conftest import read
from tests.runtime.speculation.drafters.models import pair
from tests.speculation import random_bundle

PROMPT = [5, 17, 80, 3, 44, 210, 9, 9, 101, 33]
MOST, V = 30, 320
# Ends of steps: one token in six.
ENDS = frozenset(range(0, V, 6))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
SHARP: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "seed": 5, "logit_bias": {7: 3.0, 9: -100.0}}


def test_an_advantage_is_what_the_model_expects_of_its_own_token() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 50).astype(np.float32)
    logs = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    entropy = -float(np.exp(logs) @ logs)
    best, drawn = np.eye(50)[logits.argmax()], np.exp(logs)
    for token in (0, 7, int(logits.argmax())):
        assert advantage(logits, token, best) == pytest.approx(logs.max() - logs[token])
        assert advantage(logits, token, drawn) == pytest.approx(-entropy - logs[token])
    # Of tokens drawn as the model draws its own it is nothing on average, whatever it draws them from.
    for law in (drawn, drawn**2 / (drawn**2).sum(), best):
        assert float(law @ [advantage(logits, token, law) for token in range(50)]) == pytest.approx(0)
    banned = np.array([0.0, -np.inf, 1.0], np.float32)
    assert advantage(banned, 1, np.array([0.25, 0.0, 0.75])) == math.inf


def said(model: Alone[Any], text: Sequence[int]) -> Floats:  # (V,)
    """What a model says behind a text, read from its beginning."""
    return read(model, text, [len(text) - 1])[len(text) - 1]


def routed(
    large: Alone[Any], small: Alone[Any], config: ReplyOptions, threshold: float, most: int
) -> tuple[list[int], int]:
    """The reply, and how many of its tokens the small model wrote."""
    sampler = Sampler(LogitsProcessor(config, V, config.seed or 0), PROMPT)
    text = [*PROMPT, sampler.sample(said(large, PROMPT), len(PROMPT))]
    written = 0
    while len(text) < len(PROMPT) + most:
        room, step = len(PROMPT) + most - len(text), list[int]()
        while len(step) < room and not (step and step[-1] in ENDS):
            step.append(sampler.sample(said(small, [*text, *step]), len(text) + len(step)))
        gained = 0.0
        for place, token in enumerate(step):
            row = said(large, [*text, *step[:place]])
            gained += advantage(sampler.adjusted(row), token, sampler.probabilities(row))
        if gained <= threshold * len(step):
            text += step
            written += len(step)
            continue
        while len(text) < len(PROMPT) + most:
            text.append(sampler.sample(said(large, text), len(text)))
            if text[-1] in ENDS:
                break
    return text[len(PROMPT) :], written


@pytest.mark.parametrize("options, threshold", [({}, 0.4), (SAMPLED, 0.05), (SAMPLED, -9.0), ({}, 99.0), (SHARP, 0.3)])
def test_steps_go_to_whoever_writes_them_better(
    engine: Text, backend: Alone[Any], other: Alone[Any], options: dict[str, Any], threshold: float
) -> None:
    config = ReplyOptions(compute="steps", method_options={"step_advantage": threshold}, **options)
    sampler = Sampler(LogitsProcessor(config, V, config.seed or 0), PROMPT)
    other.cache.trim(0)
    given = StrategyArguments(engine, sampler, config, 3, None)
    steps = StepRoutingDecoding(given, ModelDrafter(*pair(other), 4), ENDS.__contains__, 0.25)
    made = [
        step.token for step in engine.generate(PROMPT, sampler, max_tokens=MOST, stop_ids=frozenset(), strategy=steps)
    ]
    held = engine.cache.snapshot()
    assert list(engine.cached_tokens) == [*PROMPT, *made][: held.length]
    expected, written = routed(backend, other, config, threshold, MOST)
    assert made == expected
    steps.finish()
    use = steps.compute
    assert (use.tokens, use.reduced, use.lossless) == (MOST - 1, written, written == 0)
    assert use.large_share == pytest.approx(1 - written / (MOST - 1))
    # The rows of the text are the large model's own.
    read(backend, [*PROMPT, *made][: held.length])
    whole = backend.cache.snapshot()
    for ours, theirs in zip((*held.keys, *held.values), (*whole.keys, *whole.values), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_step_ends_with_a_sentence_a_line_or_the_reply() -> None:
    class Words:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return [" the", ".", "!\n", "\n\n", " 3", "?”", ""][ids[0]]

    ends = StepEnds(Words(), frozenset({6}))
    assert [ends(token) for token in range(7)] == [False, True, True, True, False, True, True]


@pytest.mark.slow
def test_a_reply_is_asked_for_by_name(tmp_path: Path) -> None:
    large = random_bundle(tmp_path / "large", num_hidden_layers=3)
    small = random_bundle(tmp_path / "small", seed=3, num_hidden_layers=1)
    with edgeinfer.load(large, draft_model=small, context=120, threads=1, remember=False) as model:
        plain = model.generate(PROMPT, max_tokens=40, ignore_eos=True, speculation="off")
        asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "compute": "steps"}
        taken: dict[str, Any] = asked | {"method_options": {"step_advantage": 50.0}}
        alone = model.generate(PROMPT, method_options={"step_advantage": -1.0}, **asked)
        assert alone.token_ids == plain.token_ids and alone.compute is not None and alone.compute.lossless
        free = model.generate(PROMPT, logprobs=1, **taken)
        assert free.compute is not None and free.compute.reduced == 39 and free.token_ids != plain.token_ids
        told = [chunk.logprobs for chunk in model.stream(PROMPT, logprobs=1, **taken)]
        assert sum(map(len, told)) == 40
        with pytest.raises(UsageError, match="a given reply"):
            edgeinfer.tools.read_reply(model, PROMPT, plain.token_ids, compute="steps")
    with (
        edgeinfer.load(large, context=64, threads=1, remember=False) as model,
        pytest.raises(UsageError, match="draft"),
    ):
        model.generate(PROMPT, compute="steps")
    with pytest.raises(UsageError, match="quality_floor"):
        ReplyOptions(compute="steps", quality_floor=0.1)
