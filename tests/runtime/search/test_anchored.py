"""Anchored Decoding against its definition: the best mean within a budget, the ledger, and the law of what is drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.core.errors import ContextLengthError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.search.anchored import Anchored, DivergenceBudget, fuse, prefix_debt
from tests.runtime.search.fakes import PROMPT, LettersAnchor, LettersBackend, Trial, V, alone, letters_logits

WARM: dict[str, Any] = {"search": "anchored", "temperature": 1.0, "stop_ids": frozenset(), "max_tokens": 30}
Law = NDArray[np.float64]


def softmax(logits: NDArray[Any]) -> Law:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    law: Law = weights / weights.sum()
    return law


def divergence(law: Law, other: Law) -> float:
    """KL(law || other) as it is defined."""
    return math.fsum(p * math.log(p / q) if p else 0.0 for p, q in zip(law.tolist(), other.tolist(), strict=True))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.floats(0.01, 60), st.floats(0, 8), st.integers(2, 40))
def test_a_mean_is_within_its_budget_and_spends_it(seed: int, spread: float, budget: float, size: int) -> None:
    chance = np.random.default_rng(seed)
    own, anchor = (softmax(chance.normal(0, spread, size)) for _ in range(2))
    fused = fuse(own, anchor, budget)
    assert fused.probabilities.sum() == pytest.approx(1)
    spent = divergence(fused.probabilities, anchor)
    assert spent <= budget + 1e-9
    assert fused.divergence == pytest.approx(spent, abs=1e-9)
    if fused.weight < 1 and budget > 1e-6:
        assert spent >= budget * (1 - 1e-4)
    # A geometric mean of these weights, and no other distribution.
    with np.errstate(divide="ignore"):
        steps = np.log(fused.probabilities) - (1 - fused.weight) * np.log(anchor) - fused.weight * np.log(own)
    assert np.ptp(steps[np.isfinite(steps)]) < 1e-6


def test_what_one_of_them_rules_out_is_never_drawn() -> None:
    own, anchor = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.0, 0.4, 0.6, 0.0])
    whole = fuse(own, anchor, 5.0)
    assert whole.probabilities.tolist() == [0, 1, 0, 0]
    assert whole.divergence == pytest.approx(-math.log(0.4))
    # Too costly, and nothing in common: the anchor alone.
    assert fuse(own, anchor, 0.5).probabilities.tolist() == anchor.tolist()
    assert fuse(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 99).probabilities.tolist() == [0, 1]
    assert fuse(own, anchor, 0.0).weight == 0


@given(st.floats(0, 2), st.floats(0, 5), st.lists(st.floats(0, 1), max_size=30))
def test_the_ledger_allows_no_more_than_every_token_added(each: float, debt: float, shares: list[float]) -> None:
    budget = DivergenceBudget(each, debt)
    for count, share in enumerate(shares, 1):
        budget.spend(share * budget.next())
        assert budget.allowed == pytest.approx(max(0.0, count * each - debt))
        assert budget.spent <= budget.allowed + 1e-9


def test_a_prompt_owes_the_mean_of_its_largest_ratios() -> None:
    assert prefix_debt([3.0, -9.0, 1.0, 2.0, 0.5], 2) == 2.5
    assert prefix_debt([1.0, -1.0], 5) == 1.0
    assert prefix_debt([-1.0, 0.0], 5) == prefix_debt([], 3) == 0.0


@pytest.mark.parametrize("each, debt", [(0.05, 0), (0.05, 2), (0.4, 0), (0.4, 2)])
def test_every_token_is_drawn_from_the_mean_that_its_ledger_allows(each: float, debt: int) -> None:
    """Written out over whole texts, without a cache; the divergences add up to no more than was allowed."""
    anchor = LettersAnchor()
    trial = Trial(LettersBackend(), anchor=anchor, anchor_budget=each, anchor_debt=debt, **WARM)
    found = trial.tokens()
    sampler = Sampler(LogitsProcessor(trial.config, V, 5), PROMPT)
    ratios = []
    for end in range(1, len(PROMPT)):
        laws = (softmax(letters_logits(PROMPT[:end])), softmax(anchor.logits(PROMPT[:end])))
        ratios.append(math.log(laws[0][PROMPT[end]] / laws[1][PROMPT[end]]))
    owed = prefix_debt(ratios, debt) if debt else 0.0
    text, spent = list(PROMPT), 0.0
    for count, token in enumerate(found, 1):
        own, said = softmax(letters_logits(text)), softmax(anchor.logits(text))
        allowed = max(0.0, count * each - owed)
        fused = fuse(own, said, max(0.0, allowed - spent))
        spent += divergence(fused.probabilities, said)
        assert spent <= allowed + 1e-9
        assert token == sampler.sample_keyed(fused.probabilities, len(text))
        text.append(token)
    use = trial.strategy.search
    assert use.divergence == pytest.approx(spent, abs=1e-6)
    assert use.divergence_allowed == pytest.approx(len(found) * each - owed, abs=1e-6)
    assert 0 < use.trials <= len(found)


def test_without_a_limit_it_is_the_model_and_without_a_budget_the_anchor() -> None:
    free = Trial(LettersBackend(), anchor_budget=1000.0, **WARM)
    options = {name: value for name, value in WARM.items() if name != "search"}
    assert free.tokens() == alone(5, **options)
    assert free.strategy.search.trials == 0
    anchor, bound = LettersAnchor(), Trial(LettersBackend(), anchor_budget=0.0, **WARM)
    sampler, text = Sampler(LogitsProcessor(ReplyOptions(temperature=1.0), V, 5), PROMPT), list(PROMPT)
    for token in bound.tokens():
        assert token == sampler.sample(anchor.logits(text), len(text))
        text.append(token)
    assert bound.strategy.search.divergence == 0


def test_an_anchor_without_room_ends_the_reply() -> None:
    class Short(LettersAnchor):
        def after(self, tokens: Any) -> Any:
            return None if len(tokens) > 8 else (yield from super().after(tokens))

    trial = Trial(LettersBackend(), anchor=Short(), **WARM)
    assert isinstance(trial.strategy, Anchored)
    with pytest.raises(ContextLengthError, match="anchor"):
        trial.tokens()
