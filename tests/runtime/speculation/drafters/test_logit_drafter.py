"""What drafters make of logits, and how a follower keeps to the logits of any path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, run_alone
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower, LogitDrafter
from tests.alone import Alone
from tests.runtime.models import feed
from tests.runtime.speculation.drafters.models import committed, context, export, make_backend
from tests.runtime.speculation.drafters.rounds import guesses_of


class Given(LogitDrafter):
    """Has the same logits after every path."""

    name = "given"

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__(len(logits))
        self.logits = np.array(logits, np.float32)
        self.asked = 0

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        yield from ()
        self.asked += 1
        return self.logits


def drafter(*chances: float) -> Given:
    """With these probabilities of its tokens."""
    return Given([np.log(uniform) + 3 if uniform else -np.inf for uniform in chances])


def test_the_sign_of_a_drawn_token_is_its_probability() -> None:
    """The confidence of the token drawn, which need not be the most likely one."""
    signs = {0.05: 0, 0.2: 1, 0.3: 2, 0.5: 3, 0.6: 4, 0.8: 5, 0.9: 6, 0.96: 7, 1.0: 7}
    for uniform, sign in signs.items():
        rest = (1 - uniform) / 2
        one = drafter(uniform, rest, rest)
        assert guesses_of(one, context([1], lambda logits, drafted: (0, None)), [], 1)[0].sign == sign


def test_signs_are_priors_that_rise_with_it() -> None:
    drawn, others = np.split(np.array(Given([0.0]).priors), 2)
    assert (np.diff(drawn) > 0).all()
    assert (np.diff(others) >= 0).all()
    assert (others <= drawn).all()
    assert others.min() > 0
    assert drawn.max() < 1


def test_others_follow_by_probability_and_keep_what_was_drawn() -> None:
    one = drafter(0.11, 0.13, 0.5, 0.0, 0.26)
    now = context([1], lambda logits, drafted: (1, None))
    for width, tokens, asked in ((1, [1], 1), (3, [1, 2, 4], 2), (2, [1, 2], 2), (9, [1, 2, 4, 0], 3)):
        guesses = guesses_of(one, now, [], width)
        assert [guess.token for guess in guesses] == tokens
        assert one.asked == asked
    assert [guess.sign for guess in guesses_of(one, now, [], 4)] == [1, 8 + 3, 8 + 2, 8 + 1]
    assert guesses_of(one, now, [], 0) == ()


def test_a_round_or_a_generation_forgets_the_last() -> None:
    one = drafter(0.7, 0.3)
    ends: list[Callable[[], None]] = [lambda: one.observe(committed([], 0, 1)), lambda: one.begin([1])]
    for forget in ends:
        assert guesses_of(one, context([1]), [], 1)[0].token == 0
        one.logits = one.logits[::-1].copy()
        assert guesses_of(one, context([1]), [], 1)[0].token == 0
        forget()
        assert guesses_of(one, context([1]), [], 1)[0].token == 1
        one.logits = one.logits[::-1].copy()
        one.observe(committed([], 0, 1))


CHUNK = 4


@pytest.fixture(scope="module")
def backends() -> tuple[Alone[Any], Alone[Any]]:
    """One that follows, and one that is asked from the beginning each time."""
    bundle = export("portable", num_hidden_layers=1)
    return make_backend("portable", bundle), make_backend("portable", bundle)


class Followed:
    """A follower that notes the sizes of its passes."""

    def __init__(self, backend: Alone[Any]) -> None:
        self.sizes: list[int] = []
        self._backend = backend
        backend.cache.trim(0)
        self.follower = Follower(backend.cache, self._run, CHUNK)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Passes[Floats]:
        self.sizes.append(len(tokens))
        (output,) = yield Evaluate(self._backend.model, ((self._backend.cache, Pass(tokens, positions, rows)),))
        return output.logits

    def follow(self, head: Sequence[int], drafted: Sequence[int], wanted: int = 1) -> Floats:
        """The logits, with the sizes of the passes that this took."""
        self.sizes.clear()
        return run_alone(self.follower.follow(head, drafted, wanted)).copy()


def fresh(backend: Alone[Any], path: Sequence[int], wanted: int) -> Floats:  # (wanted, V)
    backend.cache.trim(0)
    return feed(backend, path)[len(path) - wanted :]


paths = st.lists(st.integers(0, 3), max_size=5)


@given(rounds=st.lists(st.tuples(paths, st.lists(st.tuples(paths, st.integers(0, 6)), max_size=5)), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_gives_its_own_logits(
    backends: tuple[Alone[Any], Alone[Any]], rounds: list[tuple[list[int], list[tuple[list[int], int]]]]
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


def test_it_may_start_behind_rows_of_others(backends: tuple[Alone[Any], Alone[Any]]) -> None:
    followed = Followed(backends[0])
    feed(backends[0], [1, 2, 3])
    followed.follower.restart(2)
    assert (followed.follower.start, followed.follower.end, backends[0].cache.length) == (2, 2, 2)
    np.testing.assert_array_equal(followed.follow([9], [8]), fresh(backends[1], [1, 2, 9, 8], 1))
    with pytest.raises(BackendError):
        followed.follower.restart(20)
