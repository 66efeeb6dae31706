"""When one way to run a model is faster than another, and searches of settings and of layers to skip."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BudgetError, CapabilityError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.tuning.drafting_search import Sample, best_exit
from edgeinfer.runtime.tuning.search import (
    FULL,
    QUICK,
    Effort,
    SettingChoices,
    SettingsFound,
    compare,
    judge,
    median_below,
    search_settings,
)
from edgeinfer.runtime.tuning.stopwatch import DECODE, LOAD, LOADED, PREFILL, PROMPTS, TURN, VERIFY, Times
from tests.alone import Alone
from tests.cache import made
from tests.factories import make_checkpoint
from tests.runtime.speculation.drafters.models import EXPORTS, make_backend
from tests.tables import each_row

SEEDS = range(60)


class Machine:
    """A made-up machine: how long each part takes by the settings, with noise, and a clock that goes on by it.

    Args:
        factors: of the usual settings' times, by the settings.
        noise: standard deviation of a timing, as a share of it.
        spikes: chance of a timing that takes three times as long.
        drift: how much all slows down for a while, as on a machine that does something else.
    """

    def __init__(
        self,
        factors: Callable[[TunedSettings], Mapping[str, float]],
        *,
        seed: int = 0,
        noise: float = 0.0,
        spikes: float = 0.0,
        drift: float = 0.0,
    ) -> None:
        self._factors = factors
        self._random = random.Random(seed)
        self._noise, self._spikes, self._drift = noise, spikes, drift
        self.now = 0.0
        self.visits = 0

    def timer(self, way: TunedSettings, task: str) -> Times:
        self.visits += 1
        factors = self._factors(way)
        prompt = self._ms(1.0 * factors.get(PREFILL, 1.0))
        self.now += 0.1
        if task == PROMPTS:
            return {PREFILL: prompt}
        decode, verify = self._ms(10.0 * factors.get(DECODE, 1.0)), self._ms(14.0 * factors.get(VERIFY, 1.0))
        times = {PREFILL: prompt, DECODE: decode, VERIFY: verify, TURN: 64 * prompt + 128 * decode}
        return times | ({LOAD: self._ms(300.0 * factors.get(LOAD, 1.0))} if task == LOADED else {})

    def _ms(self, ms: float) -> float:
        slow = 1 + self._drift * (math.sin(self.now) > 0.3)
        spike = 3.0 if self._random.random() < self._spikes else 1.0
        return ms * slow * spike * max(0.2, self._random.gauss(1.0, self._noise))

    def clock(self) -> float:
        return self.now

    def search_settings(self, ways: SettingChoices, effort: Effort = FULL) -> SettingsFound:
        return search_settings(ways, self.timer, effort, self.clock)


def same(way: TunedSettings) -> Mapping[str, float]:
    return {}


def factors_of(**parts: float) -> Callable[[TunedSettings], Mapping[str, float]]:
    """Another number of threads changes these parts."""
    return lambda way: parts if way.threads is not None else {}


QUIET = {"noise": 0.01}
NOISY = {"noise": 0.08, "spikes": 0.1, "drift": 0.5}
THREADS = SettingChoices(threads=(1,), usual_threads=2)


def test_a_bound_needs_enough_numbers() -> None:
    assert median_below([0.5] * 6, 0.01) == math.inf
    assert median_below([0.5] * 7, 0.01) == 0.5
    assert median_below([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 0.05) == 10


@each_row("count", [7, 13, 25])
def test_the_true_median_is_seldom_above_its_bound(count: int) -> None:
    chance, rng = 0.05, random.Random(count)
    above = sum(median_below([rng.lognormvariate(0, 0.5) for _ in range(count)], chance) < 1 for _ in range(2000))
    assert above / 2000 <= chance + 0.02


def test_a_verdict() -> None:
    faster, equal, slower = [0.8] * 13, [0.99, 1.01] * 7, [1.2] * 13
    assert judge({TURN: faster, DECODE: equal}, (TURN,)).better
    refused = judge({TURN: faster, DECODE: slower}, (TURN,))
    assert not refused.better and refused.decided and refused.slower == (DECODE,)
    assert not judge({TURN: equal}, (TURN,)).better
    assert judge({TURN: slower}, (TURN,)).decided
    # A gain of one per cent, however sure, is not worth a setting.
    assert not judge({TURN: [0.99] * 25}, (TURN,)).better
    scattered = judge({TURN: [0.5, 1.4] * 6}, (TURN,))
    assert not scattered.better and not scattered.decided


@pytest.mark.parametrize("noise", [QUIET, NOISY], ids=["quiet", "noisy"])
@pytest.mark.parametrize(
    "parts",
    [
        {DECODE: 1.05, PREFILL: 1.05, VERIFY: 1.05},
        {DECODE: 1.2},
        {DECODE: 0.8, PREFILL: 1.3},
        {DECODE: 0.8, VERIFY: 1.3},
        {DECODE: 1.1, PREFILL: 0.5},
        {},
    ],
    ids=str,
)
def test_what_is_slower_in_anything_is_never_kept(parts: dict[str, float], noise: dict[str, float]) -> None:
    for seed in SEEDS:
        found = Machine(factors_of(**parts), seed=seed, **noise).search_settings(THREADS)
        assert found.settings == UNTUNED, seed


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("gain", [0.5, 0.8])
def test_a_clear_gain_is_kept(gain: float, effort: Effort) -> None:
    machines = [Machine(factors_of(decode=gain, prompt=gain, verify=gain), seed=seed, **QUIET) for seed in SEEDS]
    assert all(machine.search_settings(THREADS, effort).settings == TunedSettings(threads=1) for machine in machines)


def test_a_clear_gain_is_mostly_kept_on_a_noisy_machine() -> None:
    parts = {DECODE: 0.6, PREFILL: 0.6, VERIFY: 0.6}
    kept = sum(
        Machine(factors_of(**parts), seed=seed, **NOISY).search_settings(THREADS).settings != UNTUNED for seed in SEEDS
    )
    assert kept >= 0.9 * len(SEEDS)


def test_settings_are_found_one_beside_the_other() -> None:
    def factors(way: TunedSettings) -> Mapping[str, float]:
        threads = {None: 1.0, 1: 1.3, 3: 0.8, 4: 0.9}[way.threads]
        pinned = 0.9 if way.affinity and way.threads == 3 else 1.0
        chunk = {None: 1.0, 32: 1.2, 128: 0.8, 256: 0.7}[way.prefill_chunk]
        load = 0.2 if way.weights == "mapped" else 1.0
        decode = threads * pinned
        return {DECODE: decode, PREFILL: decode * chunk, VERIFY: decode, LOAD: load}

    def pins(threads: int) -> str:
        return ";".join(str(number) for number in range(2, threads + 1))

    ways = SettingChoices((1, 3, 4), pins, 2, ("mapped",), (32, 128, 256))
    found = Machine(factors, noise=0.01).search_settings(ways)
    assert found.settings == TunedSettings(threads=3, affinity="2;3", prefill_chunk=256, weights="mapped")
    assert found.proof is not None and found.proof.verdict.ratios[PREFILL] == pytest.approx(0.8 * 0.9 * 0.7, rel=0.03)
    outcomes = {(attempt.name, attempt.value): attempt.outcome for attempt in found.attempts}
    assert outcomes["threads", 1] == "slower" and outcomes["threads", 3] == "better"
    assert outcomes["prefill_chunk", 32] == "slower" and outcomes["weights", "mapped"] == "better"


def test_of_many_numbers_of_threads_the_likeliest_are_compared() -> None:
    def factors(way: TunedSettings) -> Mapping[str, float]:
        factor = 1.0 if way.threads is None else 0.7 + abs(way.threads - 12) * 0.1
        return dict.fromkeys((DECODE, PREFILL, VERIFY), factor)

    ways = SettingChoices(threads=tuple(n for n in range(1, 33) if n != 16), usual_threads=16)
    found = Machine(factors, noise=0.01).search_settings(ways)
    assert found.settings.threads == 12
    assert len(found.attempts) == 31
    assert sum(attempt.ratio is not None for attempt in found.attempts) == 3


def test_what_looked_better_and_cannot_be_proved_is_not_kept() -> None:
    class Lucky(Machine):
        """The new setting is faster until it is to be proved."""

        def timer(self, way: TunedSettings, task: str) -> Times:
            times = super().timer(way, task)
            factor = 0.7 if way.threads and self.visits < 20 else 1.0
            return {part: ms * factor for part, ms in times.items()}

    found = Lucky(same, noise=0.01).search_settings(THREADS)
    assert found.settings == UNTUNED and found.rejected == TunedSettings(threads=1)
    assert found.proof is not None and not found.proof.verdict.better


def test_what_there_is_no_memory_for_is_left_out() -> None:
    def factors(way: TunedSettings) -> Mapping[str, float]:
        if way.prefill_chunk == 256:
            raise BudgetError("It does not fit.")
        return {PREFILL: 0.7} if way.prefill_chunk else {}

    found = Machine(factors, noise=0.01).search_settings(SettingChoices(chunks=(256, 128)))
    assert found.settings == TunedSettings(prefill_chunk=128)
    assert found.attempts[0].outcome == "no memory" and found.attempts[0].ratio is None
    many = Machine(factors, noise=0.01).search_settings(SettingChoices(chunks=(8, 16, 256, 128)))
    assert {attempt.outcome for attempt in many.attempts if attempt.value == 256} == {"no memory"}


def test_chunks_that_there_is_no_time_for_are_named() -> None:
    found = Machine(same, noise=0.01).search_settings(SettingChoices(chunks=(32,), long_chunks=(128, 256)))
    assert [(attempt.value, attempt.outcome) for attempt in found.attempts[:2]] == [
        (128, "too slow to try"),
        (256, "too slow to try"),
    ]


def test_time_ends_a_comparison_that_tells_nothing() -> None:
    machine = Machine(same, noise=0.3)
    short = Effort((7, 13, 1000), 3.0)
    trial = compare(
        lambda way: machine.timer(way, PROMPTS), UNTUNED, TunedSettings(threads=1), (PREFILL,), short, machine.clock
    )
    assert trial.pairs < 40 and not trial.verdict.better
    # Too few pairs tell nothing, however fast they were.
    hurried = Machine(factors_of(prompt=0.1))
    trial = compare(
        lambda way: hurried.timer(way, PROMPTS),
        UNTUNED,
        TunedSettings(threads=1),
        (PREFILL,),
        Effort((7, 13), 0.3),
        hurried.clock,
    )
    assert trial.pairs < 7 and not trial.verdict.better


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    machine = Machine(factors_of(decode=0.5, prompt=0.5, verify=0.5), noise=0.01)
    search_settings(THREADS, machine.timer, QUICK, machine.clock, lambda *step: told.append(step))
    assert told[0] == ("threads 1", 1, 13) and told[-1] == ("against the usual settings", 7, 13)


LAYERS = 5
EVEN = BlockCosts(1.0, (1.0,) * 10, tuple(11.0 + 0.1 * row for row in range(9)))


def plant(*blocks: int) -> Bundle:
    """A model in which these blocks add nothing."""
    return open_bundle(made(_plant, blocks) / "bundle")


def _plant(folder: Path, blocks: tuple[int, ...]) -> None:
    model = make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=LAYERS, hidden_size=128)
    with torch.no_grad():
        for block in blocks:
            layer = model.model.layers[block // 2]
            (layer.mlp.down_proj if block % 2 else layer.self_attn.o_proj).weight.zero_()
    model.save_pretrained(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "bundle", EXPORTS["portable"])


Room = tuple[Backend, KVCache]


def room(backend: Alone[Any]) -> Room:
    return backend.model, backend.cache


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(4)
    texts = [(tuple(rng.integers(0, 320, 30).tolist()), tuple(rng.integers(0, 320, 40).tolist())) for _ in range(2)]
    return [Sample(*text) for text in texts]


def test_the_exit_before_idle_layers_is_found(samples: list[Sample]) -> None:
    target = room(make_backend("portable", plant(6, 7, 8, 9), 128))
    found = best_exit(*target, samples, EVEN)
    assert found.layers == 3
    assert found.match_rate == 1.0
    assert found.evaluations == LAYERS - 1
    assert found.speedup == EVEN.exit_gain(3, 1.0).speedup
    assert target[1].length == 0
    pairs = best_exit(*target, samples, EVEN, granularity=2)
    assert (pairs.layers, pairs.evaluations) == (4, 2)
    for granularity in (0, LAYERS):
        with pytest.raises(UsageError, match=rf"no exit after every {granularity} .* from 1 to 4"):
            best_exit(*target, samples, EVEN, granularity=granularity)


def test_a_search_that_cannot_be_made_is_refused(samples: list[Sample]) -> None:
    backend = Alone(ReferenceBackend(plant(), 128), 128)
    for nothing in ([], [Sample((), (1,))], [Sample((1,), ())]):
        with pytest.raises(UsageError, match="no text"):
            best_exit(*room(backend), nothing, EVEN)
    backend.model.capabilities = Capabilities(layer_skip=False, hidden=True, tree=True)
    with pytest.raises(CapabilityError, match="cannot skip layers"):
        best_exit(*room(backend), samples, EVEN)
