"""Policies against their definitions: layers skipped and their costs, turns of models, floors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.core.errors import BundleError, StorageError, UsageError
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.decoding.sequence import Passes, run_alone
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from edgeinfer.runtime.layer_skip.calibrated import SkipLevels, kept_layers
from edgeinfer.runtime.layer_skip.entropy import Entropies, EntropyPolicy, Stay
from edgeinfer.runtime.layer_skip.strategy import DivergenceLimit, SpeedTarget, divergence, entropy_bits, likeliest
from edgeinfer.runtime.research.layers import ImportancePolicy, RoutersPolicy, UnifiedPolicy, importance
from tests.runtime.speculation.drafters.models import export, make_backend

Floats = NDArray[np.float32]


class GivenPrompt:
    """A prompt whose states are given. (L + 1, S, D)"""

    def __init__(self, states: Floats) -> None:
        self._states = states

    @property
    def layers(self) -> int:
        return len(self._states) - 1

    def states(self) -> Passes[Floats]:
        yield from ()
        return self._states


def wanted(speedup: float, layers: int, fixed: float = 0.0) -> SpeedTarget:
    return SpeedTarget(speedup, BlockCosts(fixed, (1.0,) * (2 * layers), (fixed + 2 * layers,)))


def kept(mask: NDArray[np.bool_]) -> list[int]:
    """Layers of which both blocks run; there is none of which one does."""
    pairs = mask.reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    return np.flatnonzero(pairs[:, 0]).tolist()


def _laws(nats: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of a whole model that is sure of one of two tokens, and of one that gives it exp(-nats)."""
    share = np.exp(-nats)
    whole = np.array([0.0, -1e4], np.float32)
    return whole, np.log(np.array([share, max(1 - share, 1e-30)])).astype(np.float32)


def test_a_run_of_lesser_tokens_must_be_earned_at_its_worst() -> None:
    floor, prompt = DivergenceLimit(0.1), DivergenceLimit(0.1)
    assert DivergenceLimit(None).allows(10**6, 0, 0)
    # Nothing is known: no run is small enough.
    assert not floor.allows(1, 0, 10**6)
    for _ in range(4):
        prompt.add(*_laws(0.2))
    floor.expect(prompt)
    # A token is taken for the mean and twice a spread that is no less than it: 0.6 nats.
    assert floor.worst == pytest.approx(0.6, abs=1e-5)
    assert floor.allows(4, 0, 25) and not floor.allows(4, 0, 23)
    # Eight samples of the reply's own count for more than the prompt's.
    for _ in range(8):
        floor.add(*_laws(0.5))
    assert floor.worst == pytest.approx(1.5, abs=1e-5)
    assert not floor.allows(1, 8, 60) and floor.allows(1, 8, 80)


def test_unified_keeps_the_authors_layers() -> None:
    examples = [
        (30, 5.0, [0, 6, 12, 18, 24, 29]),  # the authors' own example
        (24, 2.0, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 23]),
        (6, 1.5, [0, 2, 4, 5]),
        (6, 1.0, [0, 1, 2, 3, 4, 5]),
        (6, 3.0, [0, 5]),  # two to keep leave nothing to space
        (6, 100.0, [0, 5]),
        (1, 2.0, [0]),
        (2, 1.5, [0, 1]),
    ]
    for layers, speedup, expected in examples:
        assert kept_layers(layers, speedup) == expected
        mask = run_alone(
            UnifiedPolicy().mask(GivenPrompt(np.zeros((layers + 1, 1, 2), np.float32)), wanted(speedup, layers))
        )
        assert kept(mask) == expected


def test_importance_is_one_less_the_cosine() -> None:
    states = np.array([[[1, 0], [1, 0]], [[0, 1], [1, 0]], [[0, 2], [1, 1]]], np.float32)  # (3, 2, 2)
    assert importance(states) == pytest.approx([0.5, 0.5 * (1 - np.sqrt(0.5))])


def test_least_important_layers_are_skipped_until_fast_enough() -> None:
    turns = [0.1, 0.5, 0.0, 0.3, 0.2, 0.0]  # angle that each layer turns the state by
    angles = np.cumsum([0.0, *turns])
    states = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[:, None].astype(np.float32)
    policy = ImportancePolicy()
    # First and last stay although they do little.
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.2, 6)))) == [0, 1, 3, 4, 5]
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.5, 6)))) == [0, 1, 3, 5]
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.0, 6)))) == [0, 1, 2, 3, 4, 5]
    # What every pass costs anyhow makes more layers give way, as many as may.
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.5, 6, fixed=12.0)))) == [0, 5]


def test_routers_skip_what_is_not_needed_within_the_speed_up() -> None:
    states = np.ones((7, 3, 2), np.float32)
    scores = [-9.0, -1.0, 2.0, -3.0, 0.1, -9.0]  # of layers 0 to 5
    policy = RoutersPolicy(np.zeros((6, 2), np.float32), np.array(scores, np.float32))
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(6.0, 6)))) == [0, 2, 4, 5]
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.2, 6)))) == [0, 1, 2, 4, 5]
    assert kept(run_alone(policy.mask(GivenPrompt(states), wanted(1.0, 6)))) == [0, 1, 2, 3, 4, 5]


def test_routers_read_the_mean_of_states_entering_each_layer() -> None:
    states = np.zeros((4, 2, 2), np.float32)
    states[1] = [[1, 5], [3, 7]]
    policy = RoutersPolicy(np.array([[0, 0], [0.5, -0.25], [0, 0]], np.float32), np.zeros(3, np.float32))
    assert run_alone(policy.needed(GivenPrompt(states))) == pytest.approx([0.5, 1 / (1 + np.exp(0.5)), 0.5])
    with pytest.raises(BundleError, match="do not fit"):
        run_alone(policy.needed(GivenPrompt(states[1:])))
    with pytest.raises(BundleError, match="damaged"):
        RoutersPolicy(np.full((3, 2), np.nan, np.float32), np.zeros(3, np.float32))


def test_ladder_takes_the_least_harmful_set_that_is_fast_enough() -> None:
    masks = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]], np.bool_)
    ladder = SkipLevels(masks, np.array([0.0, 0.1, 0.4]))
    assert ladder.choose(wanted(1.0, 2)).tolist() == masks[0].tolist()
    assert ladder.choose(wanted(1.3, 2)).tolist() == masks[1].tolist()
    assert ladder.choose(wanted(1.4, 2)).tolist() == masks[2].tolist()
    assert ladder.choose(wanted(9.0, 2)).tolist() == masks[2].tolist()
    kept_ladder = SkipLevels.from_state(ladder.state(), 2)
    assert kept_ladder is not None and (kept_ladder.masks == masks).all()
    assert SkipLevels.from_state({}, 2) is None
    with pytest.raises(StorageError):
        SkipLevels.from_state(ladder.state(), 3)


def test_predictions() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.25, 1e-30], np.float32)) + np.float32(3)
    assert entropy_bits(logits) == pytest.approx(1.5)
    best, chance = likeliest(logits)
    assert best == 0 and chance == pytest.approx(0.5)
    impossible = np.append(logits, np.float32(-np.inf))
    assert entropy_bits(impossible) == pytest.approx(1.5)
    other = np.log(np.array([0.25, 0.5, 0.25, 1e-30], np.float32))
    assert divergence(logits, other) == pytest.approx(0.25 * np.log(2), rel=1e-5)
    assert divergence(logits, logits) == 0.0


def test_threshold_is_the_quantile_of_the_share() -> None:
    entropies = Entropies(np.arange(100.0))
    assert entropies.threshold(0.25) == 75
    assert entropies.threshold(0.0) == np.inf
    assert entropies.threshold(1.0) < 0
    again = Entropies.from_state(entropies.state())
    assert again.threshold(0.25) == 75
    with pytest.raises(StorageError):
        Entropies.from_state({"means": np.array([np.nan])})


def test_a_model_stays_for_a_while() -> None:
    stay = Stay(3)
    assert [stay.choose(c) for c in (True, False, True, True, True, False, False, True)] == [
        True, False, False, False, True, True, True, True
    ]  # fmt: skip


def test_entropy_decides_by_the_mean_of_five() -> None:
    policy = EntropyPolicy(Entropies(), 0.5, 2.0, 1)
    made = []
    for entropy in (5, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3):
        policy.seen(entropy)
        made.append(policy.large())
    # Means: 5, 2.5, 5/3, 5/4, 1, 0, 0.6, 1.2, 1.8, 2.4, 3
    assert made == [True, True, *[False] * 7, True, True]


def test_the_share_is_met_from_nothing() -> None:
    """Without calibration, and however the two models' entropies differ."""
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        random = np.random.default_rng(0)
        policy = EntropyPolicy(Entropies(), share, None, 4)
        large, count = True, 0
        for token in range(4000):
            policy.seen(float(random.gamma(2.0, 0.5 if large else 1.0)))
            large = policy.large()
            count += large and token >= 1000
        assert count / 3000 == pytest.approx(share, abs=0.05)


def logits_apart(nats: float) -> tuple[Floats, Floats]:
    """Two predictions of two tokens with this divergence."""
    # KL of (1/2, 1/2) from (q, 1 - q) is -ln(2 sqrt(q (1 - q))).
    q = (1 - np.sqrt(1 - np.exp(-2 * nats))) / 2
    return np.zeros(2, np.float32), np.log(np.array([q, 1 - q], np.float32))


def test_floor_ends_what_diverges_too_far() -> None:
    floor = DivergenceLimit(0.45)
    for _ in range(16):
        floor.add(*logits_apart(0.2))
    assert floor.mean == pytest.approx(0.2, rel=1e-3)
    # One standard error of a spread that is taken to be at least the mean.
    assert floor.bound == pytest.approx(0.25, rel=1e-3)
    assert floor.check(10, 10) and not floor.easy
    for _ in range(16):
        floor.add(*logits_apart(2.0))
    # Half of the tokens were made in full, which halves the reply's mean.
    assert 0.5 < floor.bound < 1.5
    assert floor.check(1, 4) and not floor.stopped
    assert not floor.check(10, 10) and floor.stopped_at == 10
    assert not floor.watching


def test_a_few_samples_do_not_convince() -> None:
    floor = DivergenceLimit(0.3)
    floor.add(*logits_apart(0.2))
    assert floor.bound == pytest.approx(0.4, rel=1e-3)
    assert not floor.check(1, 1)


def test_without_a_floor_nothing_ends() -> None:
    floor = DivergenceLimit(None)
    floor.add(*logits_apart(3.0))
    assert floor.check(1, 1) and not floor.watching and floor.mean == pytest.approx(3.0, rel=1e-3)


# Two layers whose MLP blocks cost twice their attention; rows of a pass cost a little.
COSTS = BlockCosts(1.0, (1.0, 2.0, 1.0, 2.0), (7.0, 7.7, 8.4, 9.1))


def test_a_pass_costs_what_runs() -> None:
    assert COSTS.ms(np.ones(4, np.bool_)) == COSTS.whole[0]
    assert COSTS.ms(np.array([True, False, False, False])) == 2.0
    assert COSTS.ms(np.zeros(4, np.bool_)) == 1.0


def test_the_gain_is_that_of_the_best_length() -> None:
    rounds = {g: g * (1.0 + 3.0) + 3.0 + (1 - 3.0 / 7.0) * COSTS.whole[g] for g in (1, 2, 3)}
    expected = {g: sum(0.8**i for i in range(g + 1)) * 7.0 / ms for g, ms in rounds.items()}
    gain = COSTS.exit_gain(1, 0.8)
    assert gain.speedup == pytest.approx(max(expected.values()))
    assert expected[gain.length] == max(expected.values())
    assert COSTS.exit_gain(1, 0.99).length == 3
    assert COSTS.exit_gain(1, 0.01).length == 1
    assert COSTS.exit_gain(1, 0.01).speedup < 1


def test_an_exit_saves_its_layers_in_verification() -> None:
    """Round: g drafts with the head, the first layers once more, the others over g + 1 rows."""
    g, first = 2, 3.0
    expected = (1 + 0.8 + 0.64) * 7.0 / (g * (1.0 + first) + first + (1 - first / 7.0) * COSTS.whole[g])
    gain = COSTS.exit_gain(1, 0.8)
    assert gain.speedup >= expected
    only = BlockCosts(COSTS.fixed, COSTS.blocks, COSTS.whole[:2])
    assert only.exit_gain(1, 0.8).speedup == pytest.approx(1.8 * 7.0 / (4.0 + 3.0 + 4.0 / 7.0 * 7.7))


def test_costs_are_measured_by_leaving_blocks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only passes of the model move: by what runs in them, and by their rows."""
    backend = make_backend("portable", export("portable", num_hidden_layers=2), 32)
    with pytest.raises(UsageError, match="needs a context of 33 tokens, but there are 32"):
        measure_costs(backend.model, backend.cache, longest=8, past=24)
    forward, now, behind = backend.model.forward, [0.0], set[int]()

    def timed(passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        batch = passes[0][1]
        behind.add(backend.cache.length)
        if batch.layer_mask is not None:
            now[0] += (COSTS.ms(batch.layer_mask) + 0.7 * (len(batch.tokens) - 1)) / 1e3
        found: list[PassResult] = forward(passes)
        return found

    monkeypatch.setattr(backend.model, "forward", timed)
    monkeypatch.setattr("edgeinfer.runtime.layer_skip.block_costs.time.perf_counter", lambda: now[0])
    costs = measure_costs(backend.model, backend.cache, longest=3, repeats=2, past=8)
    assert costs.fixed == pytest.approx(COSTS.fixed)
    assert costs.blocks == pytest.approx(COSTS.blocks)
    assert costs.whole == pytest.approx(COSTS.whole)
    assert behind == {0, 8}
    assert backend.cache.length == 0
