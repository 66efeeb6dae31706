"""A drafter of nested depths: a guess is that of the depth it stopped at, whatever was fed shallowly before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.research.sorted import SortedDrafter
from tests.alone import Alone
from tests.runtime.speculation.drafters.models import context, export, make_backend, pair
from tests.runtime.speculation.drafters.rounds import guesses_of

LAYERS, DEPTHS, CHUNK = 3, (1, 2), 5
PROMPT = np.random.default_rng(3).integers(0, 320, 13).tolist()
EVERYTHING, NOTHING = 0.0, 1.1


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export("portable", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def backend(bundle: Bundle) -> Alone[Any]:
    return make_backend("portable", bundle)


@pytest.fixture(scope="module")
def oracle(bundle: Bundle) -> Callable[[Sequence[int], int], Floats]:
    """Logits after a path with so many layers, from the beginning each time. (V,)"""
    backend = make_backend("portable", bundle)

    def last(path: Sequence[int], depth: int) -> Floats:
        backend.cache.trim(0)
        mask = np.arange(2 * LAYERS) < 2 * depth
        tokens = np.array(path, np.int64)
        row: Floats = backend.forward(
            Pass(tokens, np.arange(len(path)), np.array([len(path) - 1]), layer_mask=mask)
        ).logits[0]
        return row.copy()

    return last


def uniform(logits: Floats) -> float:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return float(powers.max() / powers.sum())


@given(asked=st.lists(st.lists(st.integers(0, 319), max_size=6), min_size=1, max_size=6), share=st.floats(0, 1))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_guesses_are_those_of_the_depth_that_was_sure(
    backend: Alone[Any], oracle: Callable[[Sequence[int], int], Floats], asked: list[list[int]], share: float
) -> None:
    """Paths in any order: rows that were seen by few layers are caught up where more are wanted."""
    backend.cache.trim(0)
    # Random models are unsure everywhere, so the bar is put among their chances.
    bar = [uniform(oracle([*PROMPT, *path], 1)) for path in asked]
    confident = float(np.quantile(bar, share))
    drafter = SortedDrafter(*pair(backend), CHUNK, DEPTHS, confident=confident)
    drafter.begin(PROMPT)
    for path in asked:
        found = guesses_of(drafter, context(PROMPT), path, 1)[0].token
        distributions = [oracle([*PROMPT, *path], depth) for depth in (1, 2, 3)]
        sure = [abs(uniform(probabilities) - confident) > 1e-4 for probabilities in distributions[:2]]
        if all(sure):  # on the edge either depth is right
            probabilities = next(
                (probabilities for probabilities in distributions[:2] if uniform(probabilities) >= confident),
                distributions[2],
            )
            best = np.sort(probabilities)[-2:]
            assert found == probabilities.argmax() or best[1] - best[0] < 1e-3


def test_the_bar_decides_the_depth(backend: Alone[Any]) -> None:
    for confident, depth in ((EVERYTHING, 0), (NOTHING, 2)):
        backend.cache.trim(0)
        drafter = SortedDrafter(*pair(backend), CHUNK, DEPTHS, confident=confident)
        drafter.begin(PROMPT)
        for path in ([], [4], [4, 7]):
            guesses_of(drafter, context(PROMPT), path, 1)
        assert drafter.guessed == [3 if part == depth else 0 for part in range(3)]


def test_logits_that_were_overwritten_are_not_given_again(
    backend: Alone[Any], oracle: Callable[[Sequence[int], int], Floats]
) -> None:
    """A round ends just where the last guess was worked out, so the next one asks for the same row."""
    backend.cache.trim(0)
    drafter = SortedDrafter(*pair(backend), CHUNK, DEPTHS, confident=NOTHING)
    drafter.begin(PROMPT)
    first = guesses_of(drafter, context(PROMPT), [9], 1)[0].token
    drafter.begin([*PROMPT, 9])
    assert guesses_of(drafter, context([*PROMPT, 9]), [], 1)[0].token == first == oracle([*PROMPT, 9], 3).argmax()
    assert drafter.guessed == [0, 0, 2]


def test_a_path_that_does_not_fit_has_no_guess(backend: Alone[Any]) -> None:
    backend.cache.trim(0)
    drafter = SortedDrafter(*pair(backend), CHUNK, DEPTHS)
    drafter.begin(PROMPT)
    assert guesses_of(drafter, context([1] * (backend.cache.capacity + 1)), [], 1) == ()
