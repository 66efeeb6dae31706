"""Costs of passes with skipped blocks, and what drafting with them would gain."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.errors import UsageError
from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from tests.runtime.speculation.drafters.models import export, make_backend

# Two layers whose MLP blocks cost twice their attention; rows of a pass cost a little.
COSTS = BlockCosts(1.0, (1.0, 2.0, 1.0, 2.0), (7.0, 7.7, 8.4, 9.1))


def test_a_pass_costs_what_runs() -> None:
    assert COSTS.ms(np.ones(4, np.bool_)) == COSTS.whole[0]
    assert COSTS.ms(np.array([True, False, False, False])) == 2.0
    assert COSTS.ms(np.zeros(4, np.bool_)) == 1.0


def test_the_gain_is_that_of_the_best_length() -> None:
    mask = np.array([True, False, False, False])
    expected = {g: sum(0.8**i for i in range(g + 1)) * 7.0 / (g * 2.0 + COSTS.whole[g]) for g in (1, 2, 3)}
    gain = COSTS.gain(mask, 0.8)
    assert gain.speedup == pytest.approx(max(expected.values()))
    assert expected[gain.length] == max(expected.values())
    assert COSTS.gain(mask, 0.99).length == 3
    assert COSTS.gain(mask, 0.01).length == 1
    assert COSTS.gain(mask, 0.01).speedup < 1


def test_an_exit_saves_its_layers_in_verification() -> None:
    """Round: g drafts with the head, the first layers once more, the others over g + 1 rows."""
    g, first = 2, 3.0
    expected = (1 + 0.8 + 0.64) * 7.0 / (g * (1.0 + first) + first + (1 - first / 7.0) * COSTS.whole[g])
    gain = COSTS.exit_gain(1, 0.8)
    assert gain.speedup >= expected
    assert COSTS.exit_gain(1, 0.8).speedup > COSTS.gain(np.array([True, True, False, False]), 0.8).speedup
    only = BlockCosts(COSTS.fixed, COSTS.blocks, COSTS.whole[:2])
    assert only.exit_gain(1, 0.8).speedup == pytest.approx(1.8 * 7.0 / (4.0 + 3.0 + 4.0 / 7.0 * 7.7))


def test_costs_are_measured_by_leaving_blocks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only passes of the model move: by what runs in them, and by their rows."""
    backend = make_backend("portable", export("portable", num_hidden_layers=2), 32)
    with pytest.raises(UsageError, match="needs a context of 33 tokens, but there are 32"):
        measure_costs(backend, longest=8, past=24)
    forward, now, behind = backend.forward, [0.0], set[int]()

    def timed(batch: ForwardInput) -> ForwardOutput:
        behind.add(backend.cache.length)
        if batch.layer_mask is not None:
            now[0] += (COSTS.ms(batch.layer_mask) + 0.7 * (len(batch.tokens) - 1)) / 1e3
        return forward(batch)

    monkeypatch.setattr(backend, "forward", timed)
    monkeypatch.setattr("edgeinfer.runtime.layer_skip.block_costs.time.perf_counter", lambda: now[0])
    costs = measure_costs(backend, longest=3, repeats=2, past=8)
    assert costs.fixed == pytest.approx(COSTS.fixed)
    assert costs.blocks == pytest.approx(COSTS.blocks)
    assert costs.whole == pytest.approx(COSTS.whole)
    assert behind == {0, 8}
    assert backend.cache.length == 0
