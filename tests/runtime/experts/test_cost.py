"""How many experts a pass needs: the formula against simulated routers."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.bundle.parts import MoESpec
from edgeinfer.runtime.planning.economics import Prospect, decoding_rate
from edgeinfer.runtime.planning.speed_model import guessed_passes
from edgeinfer.runtime.weights.experts import ExpertBytes, expected_experts


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (60, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_the_union_of_independent_choices(experts: int, top_k: int, tokens: int) -> None:
    chance = np.random.default_rng(0)
    unions = [
        len(set(np.concatenate([chance.permutation(experts)[:top_k] for _ in range(tokens)]).tolist()))
        for _ in range(800)
    ]
    assert expected_experts(experts, top_k, tokens) == pytest.approx(np.mean(unions), rel=0.03)


def test_one_token_needs_its_own_and_many_need_all() -> None:
    assert expected_experts(32, 4, 1) == pytest.approx(4)
    assert expected_experts(32, 4, 1000) == pytest.approx(32)
    assert expected_experts(8, 8, 1) == 8


def test_a_model_without_experts_needs_none() -> None:
    none = ExpertBytes.of(None, [])
    assert (none.total, none.least, none.needed(5)) == (0, 0, 0.0)


def test_passes_over_experts_are_guessed_by_what_they_read() -> None:
    dense = guessed_passes(240_000_000)
    moe = guessed_passes(120_000_000, lambda rows: 120_000_000 * min(rows, 4) / 4)
    assert moe.ms(1) < dense.ms(1)
    assert moe.ms(8) / moe.ms(1) > dense.ms(8) / dense.ms(1)


@pytest.mark.parametrize("accepted", [0.5, 0.8, 0.95])
def test_plans_foresee_the_speed_up_that_moesd_defines(accepted: float) -> None:
    """sigma (g + 1) T(1) / (g Td + T(g + 1)) at the best g, where T(1) / T(m) is the target efficiency."""
    most, draft_ms = 7, 0.4
    takes = ExpertBytes(MoESpec(experts=32, top_k=4, expert_size=64), 400_000_000, 0)
    dense, mixture = guessed_passes(80_000_000), guessed_passes(30_000_000, takes.needed)
    found = []
    for passes in (dense, mixture):
        costs = [passes.ms(rows) for rows in range(1, most + 2)]
        speed_ups = [
            (1 - accepted ** (g + 1)) / (1 - accepted) * costs[0] / (g * draft_ms + costs[g]) for g in range(most + 1)
        ]
        rate = decoding_rate([Prospect("any", 1.0, accepted, draft_ms)], costs, 0.0)
        assert rate * costs[0] == pytest.approx(max(speed_ups), rel=1e-4)
        found.append(max(speed_ups))
    # One row takes as long in both, but the experts that further rows meet are the mixture's alone.
    assert dense.ms(1) == pytest.approx(mixture.ms(1), rel=0.01)
    assert found[0] > found[1] >= 1
