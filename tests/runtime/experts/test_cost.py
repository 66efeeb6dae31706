"""How many experts a pass needs: the formula against simulated routers."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.runtime.planning.speed_model import guessed_passes
from edgeinfer.runtime.weights.expert_bytes import ExpertBytes, expected_experts


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
