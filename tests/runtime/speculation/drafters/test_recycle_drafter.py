"""The candidate matrix against plain lists, and the fast choice of the best logits against a full sort."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.speculation.drafters.logit_drafter import best_tokens
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter
from tests.runtime.speculation.drafters.rounds import ask, settled

V = 40
TOKENS = st.lists(st.integers(0, V - 1), max_size=30)


def logits(seed: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).permuted(np.tile(np.arange(V, dtype=np.float32), (rows, 1)), axis=1)


def candidates(drafter: RecycleDrafter, token: int) -> list[int]:
    return [guess.token for guess in ask(drafter, [token], 8)]


@settings(deadline=None)
@given(st.sampled_from([5, 8, 500, 511, 512, 640, 700, 4096]), st.integers(0, 2**32 - 1), st.sampled_from([3, 1000]))
def test_best_tokens_are_those_of_a_stable_sort(size: int, seed: int, levels: int) -> None:
    # Few levels make ties, at which the lower id comes first.
    row = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    np.testing.assert_array_equal(best_tokens(row, 8), np.argsort(-row, kind="stable")[:8])


def test_best_tokens_pass_over_banned_ones() -> None:
    row = np.full(4096, -np.inf, np.float32)
    row[[5, 4000]] = 1, 2
    assert best_tokens(row, 8)[:2].tolist() == [4000, 5]


def test_where_drafts_do_not_branch_the_best_token_alone_is_put_in_front() -> None:
    drafter, rows = RecycleDrafter(V), logits(1, 2)
    drafter.observe(settled([9], [3], rows[:1]))
    before, best = candidates(drafter, 3), int(rows[1].argmax())
    drafter.observe(replace(settled([9], [3], rows[1:]), branches=False))
    assert candidates(drafter, 3) == [best, *(each for each in before if each != best)][:8]


@settings(deadline=None)
@given(
    st.lists(st.tuples(TOKENS, st.lists(st.integers(0, V - 1), min_size=1, max_size=5), st.integers(0, 99)), max_size=6)
)
def test_rows_are_those_of_the_papers_rule_on_plain_lists(rounds: list[tuple[list[int], list[int], int]]) -> None:
    # M[t] = top-8 of the logits behind t, the last occurrence's; prompts put what follows a token in front of its row.
    drafter, plain = RecycleDrafter(V), dict[int, list[int]]()
    for prompt, fed, seed in rounds:
        drafter.begin(prompt)
        for token, follower in dict(pairwise(prompt)).items():
            plain[token] = [follower, *(each for each in plain.get(token, []) if each != follower)][:8]
        rows = logits(seed, len(fed))
        drafter.observe(settled([1], fed, rows))
        for token, row in zip(fed, rows, strict=True):
            plain[token] = np.argsort(-row)[:8].tolist()
        for token in range(V):
            assert candidates(drafter, token) == plain.get(token, [])


def test_a_first_candidate_that_keeps_coming_is_trusted_more() -> None:
    drafter = RecycleDrafter(V)
    drafter.begin([3, 11, 3])
    signs = []
    for _ in range(20):
        signs.append(ask(drafter, [3])[0].sign)
        drafter.observe(settled([11, 3]))
    assert signs == sorted(signs)
    assert drafter.priors[signs[0]] < drafter.priors[signs[-1]]
    drafter.observe(settled([12]))
    assert ask(drafter, [3])[0].sign == signs[0]
    ranked = [drafter.priors[guess.sign] for guess in ask(drafter, [3], 8)]
    assert ranked == sorted(ranked, reverse=True)


def test_a_new_first_candidate_is_not_trusted_for_the_old_one() -> None:
    drafter = RecycleDrafter(V)
    drafter.begin([3, 11, 3])
    sign = ask(drafter, [3])[0].sign
    for _ in range(9):
        drafter.observe(settled([11, 3]))
    row = np.zeros((1, V), np.float32)
    row[0, 12] = 1
    drafter.observe(settled([11], [3], row))
    assert ask(drafter, [3])[0].token == 12
    assert ask(drafter, [3])[0].sign == sign


def test_begins_with_nothing_and_ends_with_nothing() -> None:
    drafter = RecycleDrafter(V)
    assert ask(drafter) == []
    drafter.begin([])
    assert ask(drafter) == []
    drafter.begin([3, 11, 3])
    drafter.close()
    assert ask(drafter) == []


def test_memory_is_constant_and_as_planned() -> None:
    drafter = RecycleDrafter(V)
    assert drafter.nbytes() == RecycleDrafter.planned_bytes(V)
    drafter.begin(list(range(V)))
    assert drafter.nbytes() == RecycleDrafter.planned_bytes(V)


def test_where_no_row_is_left_the_first_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.speculation.drafters.recycle._ROOM", 3)
    drafter = RecycleDrafter(V)
    drafter.begin([1, 2, 3, 4])
    drafter.begin([7, 8])
    assert [candidates(drafter, token) for token in (1, 2, 3, 7)] == [[], [3], [4], [8]]
    drafter.begin([1, 5])
    assert [candidates(drafter, token) for token in (1, 2, 3, 7)] == [[5], [], [4], [8]]
    assert drafter.nbytes() == RecycleDrafter.planned_bytes(V) < 4 * 8 * V
    other = RecycleDrafter(V)
    other.restore(drafter.state())
    other.begin([6, 9])
    assert [candidates(other, token) for token in (1, 3, 6, 7)] == [[], [4], [9], [8]]


def test_of_more_rows_than_there_is_room_for_the_surest_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RecycleDrafter(V)
    drafter.begin([1, 2, 3, 4, 1])
    drafter.observe(settled([2, 3]))
    monkeypatch.setattr("edgeinfer.runtime.speculation.drafters.recycle._ROOM", 2)
    other = RecycleDrafter(V)
    other.restore(drafter.state())
    assert [candidates(other, token) for token in (1, 2, 3, 4)] == [[2], [3], [], []]


def learnt() -> RecycleDrafter:
    drafter = RecycleDrafter(V)
    drafter.begin([3, 11, 3, 12, 3, 12, 3])
    drafter.observe(settled([12, 3], [3, 12], logits(4, 2)))
    return drafter


def test_only_rows_that_were_written_are_kept_and_taken_back() -> None:
    drafter, other = learnt(), RecycleDrafter(V)
    assert drafter.state()["rows"].tolist() == [3, 11, 12]
    other.begin([7, 8, 9])
    other.restore({name: array.copy() for name, array in drafter.state().items()})
    for token in range(V):
        assert ask(other, [token], 8) == ask(drafter, [token], 8)


def change_of(index: Any, value: int) -> Any:
    def change(array: Any) -> Any:
        array[index] = value
        return array

    return change


def test_damaged_candidates_are_refused_and_change_nothing() -> None:
    changes: list[tuple[str, Any]] = [
        ("rows", change_of(0, 11)),
        ("rows", change_of(0, -1)),
        ("rows", change_of(2, V)),
        ("rows", lambda a: a[::-1].copy()),
        ("rows", lambda a: a.astype(np.int64)),
        ("rows", lambda a: a[:, None]),
        ("best", change_of((0, 0), V)),
        ("best", change_of((0, 0), -2)),
        ("best", change_of((0, 1), -1)),
        ("best", change_of((0, slice(0, 2)), 5)),
        ("best", lambda a: a[:, :4]),
        ("best", lambda a: a[:2]),
        ("came", lambda a: a[:2]),
        ("came", lambda a: a.astype(np.int32)),
        ("vocabulary", lambda a: a + 1),
        *((name, None) for name in ("rows", "best", "came", "vocabulary")),
    ]
    drafter = learnt()
    for number, (name, change) in enumerate(changes):
        state = {key: array.copy() for key, array in drafter.state().items()}
        if change is None:
            del state[name]
        else:
            state[name] = change(state[name])
        with pytest.raises(StorageError) as caught:
            drafter.restore(state)
            pytest.fail(f"change {number}, of {name}, was taken")
        assert caught.value.hint
        assert candidates(drafter, 11) == [3]
