"""Cost curves are sane whatever was measured, measuring keeps to its budget, and sessions learn from their replies."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer import load
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult, check_pass
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.profile.costs import Costs, DraftCosts, PassCosts, following
from edgeinfer.runtime.profile.costs import pace as pace_of
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.speculation import costs as module
from edgeinfer.runtime.speculation.costs import DeviceCosts, RoundTimings, measure_guesses, measure_passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.runtime.speculation.prices import FLAT, Prices
from tests.runtime.speculation.prophets import Prophet, decode, text_of
from tests.runtime.test_sequence import TableBackend, TableCache
from tests.tables import each_row

CURVES = st.builds(
    lambda sizes, ms, step: PassCosts(tuple(zip(sorted(sizes), ms, strict=False)), step),
    st.sets(st.integers(1, 64), min_size=1, max_size=13),
    st.lists(st.floats(0.01, 1000), min_size=13, max_size=13),
    st.sampled_from([1, 2, 4]),
)
COSTS = Costs(PassCosts(((1, 2.0), (2, 2.5)), 2), DraftCosts({"copy": 0.01}, 0.05, 0.2), "a processor", "today")


@settings(deadline=None)
@given(CURVES)
def test_a_larger_pass_never_costs_less(curve: PassCosts) -> None:
    ms = [curve.ms(rows) for rows in range(1, 200)]
    assert all(a <= b for a, b in pairwise(ms))
    assert ms[0] > 0


POINTS = ((1, 1.0), (8, 2.0), (12, 4.0), (16, 4.4))


@each_row(
    ("points", "step", "expected"),
    [
        # On a line between two sizes, and of the padded size.
        (POINTS, 1, {9: 2.5, 10: 3.0, 11: 3.5}),
        (POINTS, 2, {9: 3.0, 10: 3.0, 11: 4.0}),
        (POINTS, 4, {9: 4.0}),
        # 24 and 32 rows on one step of a staircase do not make 40 rows free, nor a few rows many.
        (((8, 8.0), (16, 16.0), (24, 32.0), (32, 32.0)), 1, {33: 33.0, 64: 64.0}),
        (((8, 8.0), (16, 16.0), (24, 32.0), (32, 32.0)), 2, {33: 34.0}),
        (((1, 10.0),), 1, {5: 50.0}),
        (((1, 10.0), (2, 10.0)), 1, {6: 30.0}),
        (((2, 20.0),), 1, {6: 60.0}),
        # A disturbed measurement spoils no other.
        (((1, 50.0), (2, 10.0), (4, 12.0), (8, 90.0), (16, 40.0)), 1, {1: 10.0, 2: 10.0, 4: 12.0, 8: 40.0, 16: 40.0}),
    ],
)
def test_costs_of_sizes_that_were_not_measured(
    points: tuple[tuple[int, float], ...], step: int, expected: dict[int, float]
) -> None:
    curve = PassCosts(points, step)
    assert {rows: curve.ms(rows) for rows in expected} == expected


@pytest.mark.slow
def test_costs_follow_the_shape_of_passes_on_a_machine_that_changes_its_pace() -> None:
    """It is one and a half or two times as slow for a dozen passes at a time, and one pass in fifteen takes thrice."""
    true = {1: 10.0, 2: 10.3, 4: 11.5, 8: 16.0, 16: 29.0}
    believed = PassCosts(((1, 30.0), (2, 45.0), (4, 60.0), (8, 200.0), (16, 220.0)))
    for seed in range(20):
        chance, pace = random.Random(seed), 1.0
        observed = []
        for count in range(300):
            pace = chance.choice((1.0, 1.5, 2.0)) if count % 12 == 0 else pace
            rows = chance.choices(list(true), (8, 4, 3, 3, 2))[0]
            observed.append((rows, true[rows] * pace * (3.0 if chance.random() < 1 / 15 else chance.uniform(1, 1.1))))
        found = following(following(believed, observed), observed)
        for rows, ms in true.items():
            assert found.ms(rows) / found.ms(1) == pytest.approx(ms / 10.0, rel=0.15), (seed, rows)
        assert pace_of(found, observed) == pytest.approx(found.ms(1), rel=0.1)


@settings(deadline=None)
@given(CURVES, st.dictionaries(st.text(max_size=8), st.floats(0, 100), max_size=4), st.floats(0, 10))
def test_costs_survive_json(curve: PassCosts, guesses: dict[str, float], round_ms: float) -> None:
    costs = Costs(curve, DraftCosts(guesses, round_ms), "a processor", "2026-01-01T00:00:00+00:00")
    again = Costs.from_dict(json.loads(json.dumps(asdict(costs))))
    assert again == costs


def test_impossible_costs_are_refused() -> None:
    whole: dict[str, Any] = json.loads(json.dumps(asdict(COSTS)))
    points: list[Any] = [[], "x", [[1]], [[1, 1.0], [1, 2.0]], [[2, 1.0], [1, 2.0]]]
    points += [[[rows, 1.0]] for rows in (0, True, 1.5, 10**9)]
    points += [[[1, ms]] for ms in (0, -1.0, math.nan, math.inf, 10**400, "1")]
    wrong: list[tuple[str, dict[str, Any]]] = [("", {"processor": None})]
    wrong += [("passes", {"points": each}) for each in points] + [
        ("passes", {"step": step}) for step in (0, None, True)
    ]
    wrong += [("drafts", {"round_ms": -1}), ("drafts", {"round_ms": None}), ("drafts", {"read_ms": {"a": -1}})]
    wrong += [("drafts", {"guess_ms": each}) for each in ({"a": "b"}, [1])]
    wrong += [("drafts", {"token_ms": each}) for each in (-1, True, math.inf)]
    for part, change in wrong:
        with pytest.raises(StorageError, match=r"Measure|processor"):
            Costs.from_dict(whole | ({part: whole[part] | change} if part else change))
            pytest.fail(f"{change} was taken")
    for part in ("", "passes", "drafts"):
        inner = whole[part] if part else whole
        damaged: list[Any] = [inner | {"more": 1}, dict(list(inner.items())[1:]), []]
        for changed in damaged:
            with pytest.raises(StorageError, match="fields"):
                Costs.from_dict(whole | {part: changed} if part else changed)
                pytest.fail(f"{part!r} of {changed} was taken")


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    yield clock


class TimedBackend(TableBackend):
    """A backend whose passes take a given time, and more the first time."""

    geometry = Geometry(1000, 4, 2, 1, 2, 4096)

    def __init__(self, clock: Clock, seconds: dict[int, float], capacity: int = 4096, noise: Sequence[float] = (1,)):
        super().__init__()
        self.cache = TableCache(capacity)
        self.cache.held += [1] * min(30, capacity)
        self._clock, self._seconds, self._noise = clock, seconds, noise

    def _forward(self, cache: KVCache, batch: Pass) -> PassResult:
        check_pass(self, cache, batch)
        size = len(batch.tokens)
        assert len(batch.rows) == size
        self.cache.held += batch.tokens.tolist()
        larger = min(m for m in self._seconds if m >= size)
        self._clock.now += self._seconds[larger] * self._noise[len(self.passes) % len(self._noise)]
        self.passes.append(size)
        return PassResult(np.zeros((size, 1000), np.float32), None)

    def measure(self, **options: Any) -> PassCosts:
        return measure_passes(self, self.cache, **options)


# Of a 0.5B on one core of a laptop, in seconds.
SMALL = {2: 0.0130, 4: 0.015, 6: 0.022, 8: 0.029, 10: 0.035, 12: 0.040, 16: 0.050, 24: 0.075, 32: 0.100}


def test_measured_passes_are_the_undisturbed_ones(clock: Clock) -> None:
    for step in (1, 2):
        tenth = {rows: seconds / 10 for rows, seconds in SMALL.items()}
        noise = np.random.default_rng(0).choice([1.0, 1.0, 1.1, 3.0], 101).tolist()
        backend = TimedBackend(clock, tenth, noise=noise)
        curve = backend.measure(step=step)
        assert backend.cache.length == 0
        for rows, seconds in tenth.items():
            assert curve.ms(rows - 1) <= curve.ms(rows) == pytest.approx(seconds * 1e3)
        assert curve.largest == 32


@pytest.mark.parametrize("step", [1, 2])
def test_measuring_keeps_to_its_budget_and_repeats_the_small_sizes(clock: Clock, step: int) -> None:
    backend = TimedBackend(clock, SMALL)
    curve = backend.measure(step=step)
    assert clock.now <= 0.6 + 0.1
    assert curve.largest == 32
    assert backend.passes.count(32) == 1
    # The first pass of all warms up.
    assert backend.passes[0] == 1 and backend.passes[1:].count(1) >= 2


def test_a_slow_model_is_measured_at_two_sizes_at_least(clock: Clock) -> None:
    backend = TimedBackend(clock, {2: 2.0, 32: 9.0})
    assert backend.measure().points == ((1, 2000.0), (2, 2000.0))
    assert backend.passes == [1, 1, 2]


def test_small_contexts_are_measured_as_far_as_they_go(clock: Clock) -> None:
    tenth = {rows: seconds / 10 for rows, seconds in SMALL.items()}
    largest = {capacity: TimedBackend(clock, tenth, capacity).measure().largest for capacity in (2, 7, 20, 40)}
    assert largest == {2: 2, 7: 7, 20: 16, 40: 32}


class TimedDrafter(Drafter):
    """Guesses the numbers that follow; taking in the context costs a second, a guess a millisecond."""

    def __init__(self, clock: Clock, most: int) -> None:
        self.chains: list[tuple[int, ...]] = []
        self._clock, self._most, self._begun = clock, most, False

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> list[Guess]:
        self._clock.now += 0.001 if self._begun else 1.0
        self._begun = True
        self.chains.append(tuple(drafted))
        return [Guess(drafted[-1] + 1, 0)] if len(drafted) < self._most else []


def make_context(tokens: list[int]) -> DraftContext:
    def draw(logits: Any, drafted: Sequence[int]) -> Any:
        raise AssertionError("nothing draws here")

    return DraftContext(tokens, draw, lambda drafted: ())


def test_a_guess_costs_what_chains_of_them_take(clock: Clock) -> None:
    for most, tokens in product([0, 2, 9], [[5], [5, 9], [5, 9, 9, 13, 40, 5]]):
        drafter = TimedDrafter(clock, most)
        ms = measure_guesses(drafter, make_context(tokens), budget_s=2.0)
        assert ms == pytest.approx(1.0)
        # What a drafter keeps from one chain must not make the next one cheaper.
        assert len(set(drafter.chains)) == len(drafter.chains)


FEW = PassCosts(((1, 10.0), (2, 11.0)))
FREE = DraftCosts({"copy": 0.0}, 0.0)


class Kept:
    """Costs that an earlier session measured, of a model with room for any pass."""

    def __init__(self, passes: PassCosts = FEW, drafts: DraftCosts = FREE) -> None:
        self.kept = Costs(passes, drafts, "", "")
        self.cache, self.capacity = self, 4096
        self.saved: list[Costs] = []
        self.save_costs = self.saved.append

    def open(self, most: int = 1) -> DeviceCosts:
        """What a session knows of them."""
        costs = DeviceCosts(self, self, self, False, most, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
        costs.prepare()
        return costs

    def costs(self) -> Costs:
        return self.kept

    def arrays(self, name: str) -> None:
        return None


def test_what_guesses_cost_follows_the_rounds_of_replies() -> None:
    costs = Kept(drafts=DraftCosts({"model": 4.0}, 0.0)).open()
    text = text_of(60)
    run = decode([Prophet("model", text, 1.0)], text, Prices(FLAT, {"model": 0.5}))
    assert {name for name, _ in run.controller.timed_guesses} == {"model"}
    costs.learn(RoundTimings(guesses={"model": [0.4, 0.5, 30.0, 0.6, 0.5] * 8, "gone": [1.0]}))
    assert costs.of([]).guess_ms("model") == pytest.approx(0.5, abs=0.2)
    costs.learn(RoundTimings(guesses={"model": [9.0, 9.0]}))
    assert costs.of([]).guess_ms("model") < 1.0


def test_what_tokens_take_besides_their_passes_follows_replies() -> None:
    kept = Kept()
    costs, saved = kept.open(), kept.saved
    costs.learn_overhead([0.1] * 4)
    costs.save()
    assert not saved, "so few tokens tell nothing"
    costs.learn_overhead([0.1, 0.1, 30.0, 0.1, 0.1])
    costs.save()
    assert saved[-1].drafts.token_ms == 0.1
    costs.learn_overhead([0.2] * 9)
    costs.save()
    assert 0.1 < (saved[-1].drafts.token_ms or 0.0) < 0.2
    kept.kept = saved[-1]
    kept.open().save()
    assert len(saved) == 2, "what was kept is known again"


@pytest.mark.slow
def test_costs_measured_in_a_busy_moment_follow_what_the_session_measures() -> None:
    """By what was kept every row costs a pass, and no draft pays; in truth few rows cost hardly more than one."""
    quiet = Prices({rows: 10.0 + 0.3 * (rows - 1) + 1.2 * max(0, rows - 4) for rows in range(1, 65)})
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    for share, right in product((1.0, 3.0), (0.6, 0.95)):
        busy = Kept(PassCosts(tuple((rows, 5.0 + 10.0 * share * rows) for rows in sizes)))
        costs = busy.open(16)
        taken, best = 0.0, 0.0
        for reply in range(12):
            text = text_of(150, reply)
            prophets = [Prophet("copy", text, right, seed=reply) for _ in range(2)]
            run = decode(prophets[:1], text, quiet, rests=True, believed=costs.of([]))
            costs.learn(RoundTimings(passes=run.passes))
            # What is not known yet may cost little.
            assert run.ms <= 1.03 * run.plain_ms
            if reply >= 6:
                taken += run.ms
                best += decode(prophets[1:], text, quiet, rests=True).ms
        assert taken <= 1.06 * best, (share, right)
        known = costs.of([])
        for rows in range(1, 1 + known.confirmed):
            assert known.pass_ms(rows) == pytest.approx(quiet.pass_ms(rows), rel=0.15), (share, right, rows)


def test_what_reading_costs_follows_the_replies_and_one_busy_moment_moves_it_little() -> None:
    kept = Kept(drafts=DraftCosts({"model": 0.4, "copy": 0.0}, 0.0, read_ms={"model": 0.004}))
    costs = kept.open()
    assert (costs.of([]).read_ms("model"), costs.of([]).read_ms("copy")) == (0.004, 0.0)
    for ms in (0.01, 0.9, 0.01, 0.011, 0.01):
        costs.learn(RoundTimings(reading={"model": [ms], "gone": [1.0]}))
        assert costs.of([]).read_ms("model") <= 0.011
    assert costs.of([]).read_ms("model") == pytest.approx(0.01)
    costs.save()
    assert kept.saved[-1].drafts.read_ms == {"model": pytest.approx(0.01)}


def test_reading_is_measured_with_the_guesses_of_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a guess moves by 1 ms, each token that it reads by 0.25, and one busy moment by 40."""
    now, guesses, busy = [0.0], ModelDrafter.guesses, iter([40.0])

    def timed(self: ModelDrafter, context: DraftContext, drafted: Sequence[int], width: int) -> Passes[Sequence[Guess]]:
        unread = 0 if drafted else self.unread(context)
        now[0] += (1.0 + 0.25 * unread + (next(busy, 0.0) if len(context.tokens) > 40 else 0.0)) / 1e3
        return guesses(self, context, drafted, width)

    with load(None, remember=False, speculation="auto") as model, model._replies.idle() as parts:
        assert parts.speculator is not None
        costs = parts.speculator._costs
        monkeypatch.setattr(ModelDrafter, "guesses", timed)
        monkeypatch.setattr(device_costs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        costs.forget("model")
        known = costs.of([parts.speculator._drafter("model")])
        assert known.guess_ms("model") == pytest.approx(1.0)
        assert known.read_ms("model") == pytest.approx(0.25)
        assert known.read_ms("copy") == 0
