"""The self-check finds exact backends exact and noisy ones noisy, and near ties are where noise can change a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.layouts import PORTABLE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows, Edit
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.sampling.sampler import LogitsProcessor
from edgeinfer.runtime.speculation import selfcheck
from edgeinfer.runtime.speculation.selfcheck import ExactCheck, check_exact, near_edge
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend


class Clock:
    """Time that goes on by so many seconds whenever it is looked at."""

    def __init__(self, step: float = 0.0) -> None:
        self.step, self.now = step, 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands still, so that any budget is enough for all there is to measure."""
    clock = Clock()
    monkeypatch.setattr(selfcheck, "time", clock)
    return clock


def blocks(layout: Layout) -> Bundle:
    """A small model in blocks of 128, where MatMulNBits wants an even number of rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return bundle_of("qwen2", ExportConfig(4, 128, keep_small=False, layout=layout, calibration="none"), **sizes)


@pytest.fixture(params=["native", "portable"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    """The model in each layout that runs here."""
    if request.param == "native":
        require_kernel()
    return blocks(request.param)


@pytest.mark.parametrize("capacity", [2, 3, 9, 200])
def test_exact_passes_are_found_exact(bundle: Bundle, capacity: int) -> None:
    backend = make_graph_backend(bundle, capacity)
    backend.forward(Pass(np.arange(2), np.arange(2), np.zeros(0, np.int64)))
    check = check_exact(backend.model, backend.cache)
    assert (check.bit_identical, check.largest_difference, check.worst_gap, check.noise) == (True, 0, 0, 0)
    assert check.rows > 0 and backend.cache.length == 0
    backend.close()


def test_unpadded_passes_are_found_out() -> None:
    backend = make_graph_backend(blocks(PORTABLE), 200, exact=False)
    check = check_exact(backend.model, backend.cache, budget_s=0.5)
    assert not check.bit_identical and backend.cache.length == 0
    # 1e-7 in attention flips roundings to 8 bits, each worth up to some hundredths of a logit.
    assert 1e-7 < check.largest_difference < 1
    assert 0 < check.noise < check.largest_difference
    assert check.rows > 16
    backend.close()


class Disturbed(KVCache):
    """Logits that follow from the token alone but for noise in wide passes; a cache that may tell of those too."""

    def __init__(self, bundle: Bundle, logits: float, cache: float, capacity: int = 120) -> None:
        self._inner = Alone(ReferenceBackend(bundle, capacity), capacity)
        self._logits, self._cache, self._wide = logits, cache, False
        self._rng = np.random.default_rng(0)
        vocabulary = self._inner.geometry.vocab_size
        self._table = self._rng.normal(size=(vocabulary, vocabulary)).astype(np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        ((_, batch),) = passes
        output = self._inner.forward(batch)
        wide = len(batch.tokens) > 2
        self._wide = self._wide or wide
        noise = self._rng.normal(size=output.logits.shape).astype(np.float32) * np.float32(self._logits if wide else 0)
        return [PassResult(self._table[batch.tokens[batch.rows]] + noise, output.hidden)]

    @property
    def length(self) -> int:  # type: ignore[override]
        return int(self._inner.cache.length)

    @property
    def capacity(self) -> int:  # type: ignore[override]
        return int(self._inner.cache.capacity)

    def trim(self, length: int) -> None:
        self._inner.cache.trim(length)
        self._wide = False

    def clear(self) -> None:
        self.trim(0)

    def fork(self) -> Disturbed:
        raise NotImplementedError

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def append(self, snapshot: CacheSnapshot) -> None:
        raise NotImplementedError

    def rewrite(self, edit: Edit) -> None:
        raise NotImplementedError

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        found = self._inner.cache.snapshot()
        keys = tuple(key + np.float32(self._cache if self._wide else 0) for key in found.keys)
        return CopiedRows(found.length, keys, found.values)


def checked(both: Disturbed, budget_s: float = 0.3) -> ExactCheck:
    """The check of something that is a backend and a cache."""
    return check_exact(cast(Any, both), both, budget_s)


@pytest.fixture(scope="module")
def small() -> Bundle:
    """A float32 model for the reference backend."""
    return bundle_of("llama", ExportConfig(32), num_hidden_layers=1)


def test_noise_is_measured(small: Bundle) -> None:
    for size in (1e-3, 0.1):
        check = checked(Disturbed(small, size, 0))
        assert not check.bit_identical
        # Of 64 rows of 320 logits the largest disturbance is some four standard deviations.
        assert 3 * size < check.largest_difference < 6 * size
        # Half of five standard deviations of a difference of two logits, of which one or both of the passes are
        # disturbed.
        assert 2.5 * 2**0.5 * size * 0.8 < check.noise < 2.5 * 2 * size * 1.2
    changed, cache = (checked(Disturbed(small, *sizes)) for sizes in ((5.0, 0), (0, 1e-3)))
    assert 0 < changed.worst_gap < 2 * changed.largest_difference  # the gap of a changed choice
    assert (cache.bit_identical, cache.largest_difference, cache.worst_gap) == (False, 0, 0)


def test_noise_is_measured_in_small_contexts_and_little_time(small: Bundle) -> None:
    for capacity in (2, 8, 20):
        backend = Disturbed(small, 0.1, 1e-6, capacity)
        check = checked(backend, budget_s=0)
        assert not check.bit_identical and backend.length == 0 and np.isfinite(check.noise)


def test_rows_are_measured_until_the_budget_is_spent(small: Bundle, clock: Clock) -> None:
    """Next to the 16 rows that tell that there is noise, for four fifths of its seconds."""
    rows = []
    for budget_s in (0.0, 1.25, 1e3):
        clock.step = 0.125
        rows.append(checked(Disturbed(small, 0.1, 0), budget_s).rows)
    assert rows == [16 + 1, 16 + 8, 16 + 64]


ROWS = st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12).map(lambda row: np.array(row, np.float32))
NOISE = st.floats(0, 1, width=16)


@settings(deadline=None)
@given(ROWS, NOISE)
def test_a_greedy_choice_is_near_an_edge_where_it_is_near_a_tie(row: Floats, noise: float) -> None:
    second, best = np.sort(row)[-2:]
    assume(abs(best - second - 2 * noise) > 1e-5 and best != second)
    assert near_edge(lambda logits: int(logits.argmax()), row, noise) == (best - second <= 2 * noise)


def sampled(row: Floats, position: int, **options: Any) -> Callable[[Floats], int]:
    processor = LogitsProcessor(ReplyOptions(**options), len(row), seed=3)
    return lambda logits: processor.sample(logits, position)


@given(ROWS, NOISE, st.integers(0, 2**20), st.integers(0, 2**32), st.floats(0.3, 3))
@settings(deadline=None)
def test_a_draw_away_from_the_edges_stays(row: Floats, noise: float, position: int, seed: int, heat: float) -> None:
    choose = sampled(row, position, temperature=heat, top_k=0, top_p=1.0, min_p=0.0)
    assume(not near_edge(choose, row, noise))
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 0, 1], (20, len(row))).astype(np.float32)
    assert all(choose(row + np.float32(noise * 0.999) * sign) == choose(row) for sign in signs)


def test_draws_are_near_an_edge_as_often_as_the_noise_is_wide() -> None:
    row = np.zeros(4, np.float32)
    near = [near_edge(sampled(row, p, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), row, 0.01) for p in range(2000)]
    # The odds of each token fall by e^0.02 where it was chosen.
    width = sum(0.02 * share * (1 - share) for share in [0.25] * 4)
    assert np.mean(near) == pytest.approx(width, rel=0.35)


def test_the_edge_of_a_truncation_counts() -> None:
    row = np.array([5.0, 1.0, 1.001], np.float32)

    def choose(position: int) -> Callable[[Floats], int]:
        return sampled(row, position, temperature=50.0, top_k=2, top_p=1.0, min_p=0.0)

    # Only where the second of the two that are left is drawn does it matter which one that is.
    second = [position for position in range(40) if choose(position)(row) == 2]
    assert 5 < len(second) < 35
    assert all(near_edge(choose(position), row, 0.01) for position in second)
    assert not any(near_edge(choose(position), row, 0.0001) for position in range(40))


def test_what_promises_nothing_is_not_exact_by_chance(small: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_same", lambda a, b: True)
    for promised in (True, False):
        backend = Disturbed(small, 0.0, 0.0)
        backend._inner.model.capabilities = replace(backend._inner.capabilities, exact=promised)
        assert checked(backend).bit_identical == promised
