"""The spectral form of experts: what it costs, and that it is as exact as its budget allows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.errors import BudgetError, UsageError
from tests.tools.research.spectral import heterogeneity, quantize_spectral, share_space

Floats = NDArray[np.float32]


def make_experts(count: int = 4, shared: float = 1.0) -> list[Floats]:
    """Experts of one row space of a few directions, and noise."""
    chance = np.random.default_rng(0)
    basis = chance.normal(size=(8, 64))
    noise = chance.normal(size=(count, 32, 64)) * (1 - shared)
    return [(chance.normal(size=(32, 8)) @ basis + n).astype(np.float32) for n in noise]


def error(experts: list[Floats], found: tuple[Floats, ...]) -> float:
    pairs = zip(experts, found, strict=True)
    return float(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((a**2).sum() for a in experts))


def test_more_bytes_are_more_exact_and_never_more_than_allowed() -> None:
    experts, errors = make_experts(shared=0.5), []
    for budget in (4000, 7000, 12000):
        found = quantize_spectral(experts, budget)
        assert found.basis_bytes < found.nbytes <= budget
        errors.append(error(experts, found.weights))
    assert errors == sorted(errors, reverse=True)


def test_directions_that_no_expert_has_get_no_bits() -> None:
    experts = make_experts()
    found = quantize_spectral(experts, 7000)
    assert error(experts, found.weights) < 1e-3
    assert (found.bits[:, :8] == 8).all()
    assert found.bits.shape == (4, 64)


def test_the_shared_side_decides_how_many_directions_there_are() -> None:
    chance = np.random.default_rng(1)
    space = chance.normal(size=(64, 8))
    experts = [(space @ chance.normal(size=(8, 32))).astype(np.float32) for _ in range(8)]  # (64, 32) each
    squares = np.exp(chance.normal(size=(8, 32))).astype(np.float32)
    for given in (None, squares):
        written = quantize_spectral(experts, 4000, None, given, writes=True)
        assert written.basis_bytes == 8 * 64 * 2 and error(experts, written.weights) < 1e-3
    read = quantize_spectral(experts, 4000)
    assert error(experts, read.weights) > 10 * error(experts, written.weights)


@pytest.mark.parametrize("writes", [False, True])
def test_experts_are_left_the_space_that_holds_most_of_them(writes: bool) -> None:
    experts = [e.T for e in make_experts(shared=0.9)] if writes else make_experts(shared=0.9)
    shared = share_space(experts, 8, writes=writes)
    ranks = [np.linalg.matrix_rank(np.concatenate(x, axis=1 if writes else 0), tol=1e-2) for x in (experts, shared)]
    assert ranks[0] > 8 == ranks[1]
    # Noise of a tenth beside eight directions: what is left out is some of the noise.
    assert 0 < error(experts, tuple(shared)) < 0.01
    again = share_space(shared, 8, writes=writes)
    np.testing.assert_allclose(again, shared, atol=1e-4)


def test_important_experts_get_more_bits() -> None:
    importance = np.array([100, 1, 1, 1], np.float32)
    found = quantize_spectral(make_experts(shared=0.5), 6000, importance, np.linspace(0.5, 2, 64).astype(np.float32))
    assert found.bits[0].sum() > found.bits[1].sum()


def test_impossible_requests() -> None:
    experts = make_experts()
    with pytest.raises(BudgetError):
        quantize_spectral(experts, 100)
    with pytest.raises(UsageError):
        quantize_spectral([experts[0], experts[1][:3]], 9000)
    experts[0][0, 0] = np.nan
    with pytest.raises(UsageError):
        quantize_spectral(experts, 9000)


def test_heterogeneity() -> None:
    experts = make_experts()
    same = heterogeneity([experts[0]] * 4, np.ones(4, np.float32))
    assert (same.energy, same.spectrum, same.usage) == pytest.approx((0, 0, 0), abs=1e-6)
    scaled = heterogeneity([e * np.float32(2**i) for i, e in enumerate(experts)], np.array([1, 0, 0, 0], np.float32))
    assert scaled.energy > 1
    assert scaled.usage == pytest.approx(3**0.5)
