"""The constraint of a closed list against a plain set of its replies, and whole replies drawn under it."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie, Constraint, TextPlaces
from edgeinfer.runtime.sampling.processor import LogitsProcessor, TokenCounts

# Few different tokens, so that choices share beginnings and begin each other.
CHOICES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12)
ENDS = st.lists(st.integers(4, 6), min_size=1, max_size=3)
# Tokens to push, stop tokens and unknown ones among them; None pops one.
MOVES = st.lists(st.one_of(st.integers(0, 7), st.none()), max_size=60)


def oracle_allowed(choices: Sequence[Sequence[int]], ends: Sequence[int], reply: Sequence[int]) -> list[int]:
    size = len(reply)
    starting = [choice for choice in choices if list(choice[:size]) == list(reply)]
    found = {choice[size] for choice in starting if len(choice) > size}
    if not starting or any(len(choice) == size for choice in starting):
        found |= set(ends)
    return sorted(found)


def oracle_forced(choices: Sequence[Sequence[int]], ends: Sequence[int], reply: Sequence[int]) -> list[int]:
    forced: list[int] = []
    while True:
        found = oracle_allowed(choices, ends, [*reply, *forced])
        if len(found) > 1 or found[0] in ends:
            return forced
        forced.append(found[0])


def allowed(constraint: Constraint) -> list[int]:
    ids = constraint.allowed()
    assert ids is not None and ids.dtype == np.int64
    return [int(i) for i in ids]


@settings(max_examples=150, deadline=None)
@given(CHOICES, ENDS, MOVES)
def test_follows_pushes_and_pops_as_a_set_of_replies_does(
    choices: list[list[int]], ends: list[int], moves: list[int | None]
) -> None:
    constraint, reply = ChoiceConstraint(ChoiceTrie(choices, ends)), list[int]()
    for token in moves:
        if token is not None:
            constraint.push(token)
            reply.append(token)
        elif reply:
            constraint.pop()
            reply.pop()
        assert allowed(constraint) == oracle_allowed(choices, ends, reply)
        assert list(constraint.forced()) == oracle_forced(choices, ends, reply)


@settings(max_examples=60, deadline=None)
@given(CHOICES, ENDS, st.lists(st.lists(st.integers(-1, 7), max_size=6), min_size=1, max_size=6))
def test_places_of_several_texts_are_those_of_each_alone(
    choices: list[list[int]], ends: list[int], texts: list[list[int]]
) -> None:
    """The trie's by one look at all, and those that any constraint has by its stack."""
    constraint = ChoiceConstraint(ChoiceTrie(choices, ends))
    for places in (constraint.places(), TextPlaces(constraint)):
        found = [places.start() for _ in texts]
        for depth in range(max(map(len, texts))):
            going = [index for index, text in enumerate(texts) if depth < len(text)]
            moved = places.after([found[i] for i in going], [texts[i][depth] for i in going])
            for index, place in zip(going, moved, strict=True):
                found[index] = place
        rows, tokens = places.followers(found)
        for index, text in enumerate(texts):
            assert sorted(tokens[rows == index].tolist()) == oracle_allowed(choices, ends, text)


@settings(deadline=None)
@given(CHOICES, ENDS, st.randoms(use_true_random=False))
def test_walks_of_allowed_tokens_are_the_choices(
    choices: list[list[int]], ends: list[int], chance: random.Random
) -> None:
    constraint = ChoiceConstraint(ChoiceTrie(choices, ends))
    for _ in range(5):
        reply: list[int] = []
        while not reply or reply[-1] not in ends:
            reply.append(chance.choice(allowed(constraint)))
            constraint.push(reply[-1])
        assert reply[:-1] in choices
        assert allowed(constraint) == sorted(set(ends)) and constraint.forced() == []
        constraint.pop(len(reply))


def test_a_choice_that_begins_another_may_end_or_go_on() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9]], [7000, 2]))
    assert allowed(constraint) == [5] and list(constraint.forced()) == [5, 6]
    for token in constraint.forced():
        constraint.push(token)
    assert allowed(constraint) == [2, 7, 7000] and list(constraint.forced()) == []
    constraint.push(7)
    assert list(constraint.forced()) == [8]


def test_nothing_but_the_end_follows_a_token_that_may_not() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[5, 6]], [2]))
    for token in (9, 5, 6):
        constraint.push(token)
        assert allowed(constraint) == [2] and list(constraint.forced()) == []
    constraint.pop(3)
    assert allowed(constraint) == [5] and list(constraint.forced()) == [5, 6]


def test_popping_stops_at_the_start() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[5, 6]], [2]))
    constraint.push(5)
    constraint.pop(0)
    assert allowed(constraint) == [6]
    with pytest.raises(AssertionError):
        constraint.pop(2)


def test_repetitions_and_arrays_change_nothing() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[4, 5], np.array([4, 5]), [4, 5]], frozenset({2})))  # type: ignore[list-item]
    assert list(constraint.forced()) == [4, 5]
    constraint.push(np.array([4, 5])[0])
    assert allowed(constraint) == [5]


def test_what_is_allowed_cannot_be_written_to() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[4], [5]], [2]))
    for token in (4, 2):
        with pytest.raises(ValueError, match="read-only"):
            constraint.allowed()[0] = 9
        constraint.push(token)


def test_impossible_lists_are_refused() -> None:
    impossible: list[tuple[list[list[int]], list[int], str]] = [
        ([], [2], "list of choices is empty"),
        ([[3], []], [2], "no tokens"),
        ([[3]], [], "stop token"),
        ([[3, -1]], [2], "-1 is not a token id"),
        ([[3]], [2, -7], "-7 is not a token id"),
        ([[3, 2, 4]], [2], r"\[3, 2, 4\] has a stop token"),
    ]
    for choices, ends, message in impossible:
        with pytest.raises(UsageError, match=message) as error:
            ChoiceConstraint(ChoiceTrie(choices, ends))
            pytest.fail(f"{choices} with ends {ends}")
        assert error.value.hint


def test_thousands_of_choices_take_little_memory() -> None:
    """A few numbers a token: nothing is as large as the number of choices by the length of the longest."""
    draw = random.Random(0)
    choices = [[draw.randrange(3, 50_000) for _ in range(draw.randint(1, 8))] for _ in range(20_000)]
    choices.append([7] * 20_000)  # one long choice must not make the others cost its length
    tracemalloc.start()
    try:
        constraint = ChoiceConstraint(ChoiceTrie(choices, [2]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * sum(map(len, choices))
    assert allowed(constraint) == sorted({choice[0] for choice in choices})
    for choice in draw.sample(choices, 200):
        for token in choice:
            assert token in constraint.allowed()
            constraint.push(token)
        assert 2 in constraint.allowed()
        constraint.pop(len(choice))
    assert allowed(constraint) == sorted({choice[0] for choice in choices})


def test_drawn_replies_are_always_on_the_list() -> None:
    for options in ({}, {"temperature": 1.5, "top_p": 0.9, "frequency_penalty": 0.5}):
        choices = [[3, 4], [3, 4, 5, 6], [7], [8, 8, 8]]
        processor = LogitsProcessor(GenerationConfig(**options), 300, seed=3)  # type: ignore[arg-type]
        constraint = ChoiceConstraint(ChoiceTrie(choices, [1, 2]))
        rows = np.random.default_rng(0).normal(0, 2, (200, 300)).astype(np.float32)
        seen = set[tuple[int, ...]]()
        for begin in range(0, 195, 5):
            counts, reply = TokenCounts(), list[int]()
            while not reply or reply[-1] > 2:
                position = begin + len(reply)
                reply.append(processor.sample(rows[position], position, counts, constraint.allowed()))
                constraint.push(reply[-1])
                counts.push(reply[-1])
            constraint.pop(len(reply))
            seen.add(tuple(reply[:-1]))
        assert seen == set(map(tuple, choices))


def test_frequencies_of_replies_are_the_product_of_the_renormalised_ones() -> None:
    choices, ends = [[0, 1], [0, 2], [3]], [4]
    row = np.array([0.5, 1.0, 0.2, -0.3, 3.0, 5.0], np.float32)
    processor, constraint = (
        LogitsProcessor(GenerationConfig(temperature=1.0), 6, seed=9),
        ChoiceConstraint(ChoiceTrie(choices, ends)),
    )
    n, seen = 4000, dict.fromkeys(map(tuple, choices), 0)
    for sample in range(n):
        reply: list[int] = []
        while 4 not in reply:
            reply.append(processor.sample(row, 3 * sample + len(reply), None, constraint.allowed()))
            constraint.push(reply[-1])
        constraint.pop(len(reply))
        seen[tuple(reply[:-1])] += 1
    start, second = 1 / (1 + math.exp(-0.3 - 0.5)), 1 / (1 + math.exp(0.2 - 1.0))
    expected = {(0, 1): start * second, (0, 2): start * (1 - second), (3,): 1 - start}
    chi = sum((seen[reply] - n * p) ** 2 / (n * p) for reply, p in expected.items())
    assert chi < 13.8  # chi-square, 2 degrees of freedom, p = 0.001
