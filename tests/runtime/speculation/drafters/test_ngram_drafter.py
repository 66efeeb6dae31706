"""What the n-gram tables learn, forget, keep and refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.speculation.drafters.contract import State
from edgeinfer.runtime.speculation.drafters.ngram import NgramDrafter
from tests.runtime.speculation.drafters.rounds import ask, chain, settled

V = 50


def taught(*texts: list[int], bits: int = 12) -> NgramDrafter:
    """A drafter that has seen these texts, each as a prompt of its own, and begin again."""
    drafter = NgramDrafter(V, bits)
    for text in texts:
        drafter.begin(text)
        drafter.close()
    return drafter


def test_the_longest_known_context_decides() -> None:
    drafter = taught([1, 2, 3, 9], [1, 2, 3, 9], [2, 3, 8], [2, 3, 8], [2, 3, 8], [3, 7], [3, 7], [3, 7], [3, 7])
    for prompt, token in ([1, 2, 3], 9), ([5, 2, 3], 8), ([4, 3], 7):
        asked = taught()
        asked.restore(drafter.state())
        asked.begin(prompt)
        assert chain(asked, 1) == [token]


def test_guesses_are_ordered_by_frequency_then_shorter_contexts_follow() -> None:
    texts = [[1, 2, token] for token in (10, 11, 12, 11, 12, 12)] + [[3, 2, 13]] * 9
    tokens = [guess.token for guess in ask(taught(*texts), [1, 2], 4)]
    assert tokens == [12, 11, 10, 13]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80))
def test_the_latest_of_the_most_frequent_successors_comes_first(successors: list[int]) -> None:
    drafter = taught(*([7, token] for token in successors))
    counts = Counter(successors)
    best = max(reversed(successors), key=lambda token: counts[token])
    assert ask(drafter, [7])[0].token == best


def test_replies_teach_as_prompts_do_and_a_conversation_is_learnt_once() -> None:
    drafter = taught()
    drafter.begin([1, 2, 3])
    drafter.observe(settled([4, 5]))
    drafter.begin([1, 2, 3, 4, 5, 6])
    drafter.observe(settled([7]))
    whole = taught()
    whole.begin([1, 2, 3, 4, 5, 6, 7])
    same_tables(drafter.state(), whole.state())


def test_what_differs_from_the_last_conversation_is_learnt() -> None:
    drafter = taught()
    drafter.begin([1, 2, 3, 4])
    drafter.begin([1, 2, 3, 5, 6])
    assert [guess.token for guess in ask(drafter, [1, 2, 3], 2)] == [5, 4]


def test_a_new_habit_replaces_an_old_one() -> None:
    drafter = taught(*[[7, 1]] * 400)
    assert ask(drafter, [7])[0].token == 1
    for _ in range(260):
        drafter.begin([7, 2])
        drafter.close()
    assert ask(drafter, [7])[0].token == 2


def test_a_full_table_takes_in_new_contexts_and_keeps_frequent_ones() -> None:
    drafter = taught(*[[7, 1, 8, 2]] * 50, bits=6)
    rng = np.random.default_rng(0)
    for _ in range(40):
        drafter.begin([7, 1])
        drafter.close()
        drafter.begin(rng.integers(10, V, 8).tolist())
        drafter.close()
    assert ask(drafter, [7])[0].token == 1
    for _ in range(100):
        drafter.begin([3, 4])
        drafter.close()
    assert ask(drafter, [3])[0].token == 4


def test_priors_rise_with_the_evidence() -> None:
    drafter = taught(*[list(range(10))] * 9, [20, 21], [22, 23], [22, 24])
    often, once, divided = (ask(drafter, path)[0].sign for path in ([2, 3, 4, 5, 6, 7], [20], [22]))
    assert all(0 < prior < 1 for prior in drafter.priors)
    assert drafter.priors[often] > 0.9
    assert drafter.priors[often] > drafter.priors[once] > drafter.priors[divided]


def test_memory_is_constant_and_as_planned() -> None:
    drafter = NgramDrafter(V)
    size = drafter.nbytes()
    assert size == NgramDrafter.planned_bytes()
    for seed in range(20):
        drafter.begin(np.random.default_rng(seed).integers(0, V, 300).tolist())
        drafter.observe(settled([1, 2, 3]))
    assert drafter.nbytes() == size
    assert sum(array.nbytes for array in drafter.state().values()) < size


def test_a_conversation_longer_than_what_is_remembered_goes_on() -> None:
    drafter = NgramDrafter(V, 8)
    text = [token % V for token in range(40000)]
    drafter.begin(text)
    drafter.observe(settled([text[0]]))
    drafter.begin([*text, text[0]])
    assert chain(drafter, 3) == [1, 2, 3]


def test_what_was_kept_is_taken_back() -> None:
    drafter = taught([1, 2, 3, 4, 5, 6, 7] * 3, [3, 9, 3, 9])
    other = NgramDrafter(V, 12)
    other.restore({name: array.copy() for name, array in drafter.state().items()})
    same_tables(drafter.state(), other.state())
    for path in ([1, 2], [3], [3, 9, 3]):
        assert ask(other, path, 4) == ask(drafter, path, 4) != []
    kept = {name: array.copy() for name, array in drafter.state().items()}
    other.restore(drafter.state())
    other.begin([8, 8, 8, 8])  # its tables are its own
    same_tables(drafter.state(), kept)


def put(value: int, where: Any = 0) -> Any:
    """Write a value at one used slot: counts of used slots are those above zero."""

    def change(array: Any) -> Any:
        used = np.argwhere(array > 0)[where]
        array[tuple(used)] = value
        return array

    return change


def test_damaged_tables_are_refused_and_change_nothing() -> None:
    changes: list[tuple[str, Any]] = [
        ("tokens", put(V)),
        ("tokens", put(-2)),
        ("tokens", put(-1)),
        ("counts", put(0)),
        ("counts", lambda a: np.ascontiguousarray(a[:, ::-1])),
        ("tags", put(0)),
        ("tags", lambda a: a[:-1]),
        ("tags", lambda a: a.astype(np.int64)),
        ("counts", lambda a: a.astype(np.float32)),
        ("tokens", lambda a: a.reshape(-1)),
        ("vocabulary", lambda a: a + 1),
        ("vocabulary", lambda a: np.array(float("nan"))),
        *((name, None) for name in ("tags", "tokens", "counts", "vocabulary")),
    ]
    drafter = taught([1, 2, 3])
    for number, (name, change) in enumerate(changes):
        state = {key: array.copy() for key, array in taught([1, 2, 3, 4, 5, 6, 7] * 3).state().items()}
        if change is None:
            del state[name]
        else:
            state[name] = change(state[name])
        with pytest.raises(StorageError) as caught:
            drafter.restore(state)
            pytest.fail(f"change {number}, of {name}, was taken")
        assert caught.value.hint
        assert ask(drafter, [1, 2])[0].token == 3
    with pytest.raises(StorageError):  # tables of another size
        NgramDrafter(V, 11).restore(taught().state())


def same_tables(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name])
