"""Conversations that outgrow the context, through the public face: they go on, and say that they are lossy."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import ContextLengthError, UsageError
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from tests.speculation import load_eager, needs_builtin, random_bundle

STORY = "Once upon a time there was a dog. The dog liked to play with a ball in the park. One day the ball was gone. "


@needs_builtin
@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_goes_on_and_says_what_was_lost(policy: str) -> None:
    with load_eager(context=64, overflow=policy, remember=False) as model:
        short = model.generate("Once", max_tokens=10, speculation="off")
        assert short.overflow == edgeinfer.results.Overflow(policy)
        assert short.overflow.lossless
        long = model.generate(STORY * 4, max_tokens=50, ignore_eos=True, seed=1, temperature=0.5)
        assert len(long.token_ids) == 50
        assert long.finish_reason == "length"
        shown = long.to_dict()["overflow"]
        assert shown["policy"] == policy
        assert shown["events"] > 2
        assert shown["lossless"] is False
        fed = long.usage.total_tokens - 1
        assert fed - 64 <= shown["dropped"] + shown["merged"] <= fed - 64 + 8
        again = model.generate(STORY * 4, max_tokens=50, ignore_eos=True, seed=1, temperature=0.5, speculation="off")
        assert again.token_ids == long.token_ids
        scores = model.score(model.tokenize(STORY * 4))
        assert len(scores.logprobs) == len(model.tokenize(STORY * 4)) - 1


@needs_builtin
def test_without_a_policy_a_long_text_is_refused() -> None:
    with load_eager(context=64, remember=False) as model:
        with pytest.raises(ContextLengthError, match="overflow='window'"):
            model.generate(STORY * 4)
        assert model.generate("Once", max_tokens=2).overflow.policy == "stop"


def test_a_policy_that_cannot_work_says_so(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path)
    with pytest.raises(UsageError, match="at least 32 tokens"):
        edgeinfer.load(bundle, context=16, overflow="merge", threads=1, remember=False)
