"""Following paths: the logits of any path whatever was followed before, and no row fed twice without need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower
from tests.runtime.speculation.drafters.models import export, make_backend, take_in

CHUNK = 4


@pytest.fixture(scope="module")
def backends() -> tuple[Backend, Backend]:
    """One that follows, and one that is asked from the beginning each time."""
    bundle = export("portable", num_hidden_layers=1)
    return make_backend("portable", bundle), make_backend("portable", bundle)


class Followed:
    """A follower that notes the sizes of its passes."""

    def __init__(self, backend: Backend) -> None:
        self.sizes: list[int] = []
        self._backend = backend
        backend.cache.trim(0)
        self.follower = Follower(backend, self._run, CHUNK)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        self.sizes.append(len(tokens))
        return self._backend.forward(ForwardInput(tokens, positions, rows)).logits

    def follow(self, head: Sequence[int], drafted: Sequence[int], wanted: int = 1) -> Floats:
        """The logits, with the sizes of the passes that this took."""
        self.sizes.clear()
        return self.follower.follow(head, drafted, wanted).copy()


def fresh(backend: Backend, path: Sequence[int], wanted: int) -> Floats:  # (wanted, V)
    backend.cache.trim(0)
    return take_in(backend, path)[len(path) - wanted :]


tokens = st.lists(st.integers(0, 3), max_size=5)


@given(rounds=st.lists(st.tuples(tokens, st.lists(st.tuples(tokens, st.integers(0, 6)), max_size=5)), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_gives_its_own_logits(
    backends: tuple[Backend, Backend], rounds: list[tuple[list[int], list[tuple[list[int], int]]]]
) -> None:
    """Few different tokens, so that paths share much."""
    followed, head = Followed(backends[0]), [7]
    for grown, paths in rounds:
        head.extend(grown)
        for drafted, wanted in paths:
            path = [*head, *drafted]
            wanted = min(wanted, len(path))
            before = followed.follower.shared(head, drafted)
            logits = followed.follow(head, drafted, wanted)
            assert len(logits) == wanted
            if wanted:
                np.testing.assert_array_equal(logits, fresh(backends[1], path, wanted))
            assert followed.follower.end == backends[0].cache.length == max(len(path), before)
            assert sum(followed.sizes) in (0, max(0, len(path) - min(before, len(path) - wanted)))
            assert all(size <= max(CHUNK, wanted) for size in followed.sizes)


def test_only_what_is_not_shared_is_fed(backends: tuple[Backend, Backend]) -> None:
    followed, head = Followed(backends[0]), [1, 2, 3, 4, 5, 6]
    followed.follow(head, [])
    assert followed.sizes == [4, 2]
    followed.follow(head, [7, 8])
    assert followed.sizes == [2]
    followed.follow(head, [7, 9])
    assert followed.sizes == [1]
    followed.follow(head, [7, 9])
    assert followed.sizes == []
    followed.follow(head, [7])  # its logits were overwritten since
    assert followed.sizes == [1]
    head.extend([7, 9, 9])
    followed.follow(head, [])
    assert followed.sizes == [2]
    followed.follow(head, [1, 2, 3, 4, 5, 6], 6)
    assert followed.sizes == [6]
    followed.follower.doubt()
    followed.follow([1, 2, 0], [])
    assert followed.sizes == [1]


def test_it_may_start_behind_rows_of_others(backends: tuple[Backend, Backend]) -> None:
    followed = Followed(backends[0])
    take_in(backends[0], [1, 2, 3])
    followed.follower.restart(2)
    assert (followed.follower.start, followed.follower.end, backends[0].cache.length) == (2, 2, 2)
    np.testing.assert_array_equal(followed.follow([9], [8]), fresh(backends[1], [1, 2, 9, 8], 1))
    with pytest.raises(BackendError):
        followed.follower.restart(20)
