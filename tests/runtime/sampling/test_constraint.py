"""Constraints: closed lists of replies, a caller's own check, and limits of thoughts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.constraint import (
    ChoiceConstraint,
    ChoiceTrie,
    Constraint,
    TextCheck,
    TextPlaces,
    first_accepted,
)
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.sampling.thinking import ThoughtConstraint, repetition, thought_limit
from edgeinfer.runtime.text.thoughts import FORMATS, ThoughtStart, ThoughtTags
from tests.runtime.search.fakes import END, LETTERS, PROMPT, Letters, LettersBackend, Trial, V, letters_logits
from tests.speculation import needs_builtin

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


def test_repetitions_and_arrays_change_nothing() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[4, 5], np.array([4, 5]), [4, 5]], frozenset({2})))  # type: ignore[list-item]
    assert list(constraint.forced()) == [4, 5]
    constraint.push(np.array([4, 5])[0])
    assert allowed(constraint) == [5]


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


def test_frequencies_of_replies_are_the_product_of_the_renormalised_ones() -> None:
    choices, ends = [[0, 1], [0, 2], [3]], [4]
    row = np.array([0.5, 1.0, 0.2, -0.3, 3.0, 5.0], np.float32)
    processor, constraint = (
        LogitsProcessor(ReplyOptions(temperature=1.0), 6, seed=9),
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


STOPS = frozenset({END})


def allowed_after(text: str, check: Any) -> list[int]:
    return [t for t in range(V) if check(text + ("" if t == END else LETTERS[t]), t == END)]


def no_double(text: str, ended: bool) -> bool:
    """No letter twice in a row, and at least two before the end."""
    return all(a != b for a, b in pairwise(text)) and (len(text) > 1 or not ended)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "frequency_penalty": 0.5}])
def test_tokens_are_those_that_drawing_among_all_accepted_ones_gives(options: dict[str, Any]) -> None:
    """Bit for bit, for the same seed; also behind drafts."""
    for seed in range(60):
        config = ReplyOptions(**options)
        checked = Sampler(LogitsProcessor(config, V, seed), PROMPT, check=TextCheck(no_double, Letters(), STOPS))
        masked = LogitsProcessor(config, V, seed)
        plain = Sampler(masked, PROMPT)
        text: list[int] = []
        while END not in text and len(text) < 8:
            logits = letters_logits([*PROMPT, seed % 5, *text])
            spelled = Letters().decode(text)
            ids = np.array(allowed_after(spelled, no_double))
            expected = masked.sample(logits, len(text), plain._counts, ids)
            assert checked.sample(logits, len(text)) == expected
            after = checked.sample(logits, 40, [expected]) if expected != END else END
            assert after in allowed_after(Letters().decode([*text, expected]), no_double)
            text.append(expected)
            for sampler in (checked, plain):
                sampler.accept(expected, logits)


def test_few_tokens_are_asked_about() -> None:
    asked: list[int] = []

    def accepts(index: int) -> bool:
        asked.append(index)
        return index % 2 == 0

    chance = np.random.default_rng(1)
    for _ in range(200):
        scores = chance.normal(size=5000)
        found = first_accepted(scores, accepts)
        assert found == 2 * int(scores[::2].argmax())
    assert len(asked) < 200 * 3


def test_a_check_that_refuses_all_or_fails_says_so() -> None:
    def fails(text: str, ended: bool) -> bool:
        raise ValueError("no such text")

    for check, message in (
        (lambda text, ended: False, "refuses each of the 10 tokens"),
        (fails, "ValueError: no such"),
    ):
        sampler = Sampler(LogitsProcessor(ReplyOptions(), V, 1), PROMPT, check=TextCheck(check, Letters(), STOPS))
        with pytest.raises(UsageError, match=message):
            sampler.sample(letters_logits([1]), 0)
    with pytest.raises(UsageError, match="checker"):
        ReplyOptions(checker="isdigit")  # type: ignore[arg-type]


class Spelled(Letters):
    """A tokenizer of one character a token, in which tags are spelled out."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_to_id(self, text: str) -> int | None:
        return ord(text) if len(text) == 1 else None


class Tagged(Spelled):
    """A tokenizer whose tags are tokens."""

    tags: Mapping[str, int] = {"[THINK]": 1, "[/THINK]": 2}

    def token_to_id(self, text: str) -> int | None:
        return self.tags.get(text)


def follow(budget: ThoughtConstraint, wanted: str) -> str:
    """A text that goes on as is wanted where it may."""
    found, left = "", iter(wanted)
    while True:
        allowed = budget.allowed()
        token = next(map(ord, left), None) if allowed is None else int(allowed[0])
        if token is None:
            return found
        assert allowed is None or next(iter(budget.forced())) == token
        budget.push(token)
        found += chr(token)


def test_thoughts_end_where_they_have_had_their_tokens() -> None:
    rows = [
        (3, "", "<think>abcdefg", "<think>abc</think>defg"),
        (3, "", "<think>ab</think>abcdefg", "<think>ab</think>abcdefg"),
        (0, "", "x<think>abc", "x<think></think>abc"),
        (2, "", "<think>a</think>b<think>cde", "<think>a</think>b<think>cd</think>e"),
        (3, "<think>\n", "abcdefg", "abc</think>defg"),
        (3, "<think>a</think>", "abcdefg", "abcdefg"),
        (3, "", "abcdefg<thin>abcd", "abcdefg<thin>abcd"),
    ]
    for most, prompt, wanted, expected in rows:
        assert follow(thought_limit(Spelled(), most, list(map(ord, prompt))), wanted) == expected


def test_tags_that_are_tokens_are_those_alone() -> None:
    tokenizer = Tagged()
    assert follow(thought_limit(tokenizer, 2, []), "\x01abcd") == "\x01ab\x02cd"
    assert follow(thought_limit(tokenizer, 2, [1, 97]), "abcd") == "ab\x02cd"
    # A user's text that reads like a tag opens no thought.
    assert follow(thought_limit(tokenizer, 2, list(map(ord, "[THINK]"))), "abcd") == "abcd"


def test_what_is_pushed_is_undone() -> None:
    budget = thought_limit(Spelled(), 2, [])
    for token in map(ord, "<think>ab"):
        budget.push(token)
    assert "".join(map(chr, budget.forced())) == "</think>"
    for token in map(ord, "xyz</think>and on"):
        budget.push(token)
    assert budget.allowed() is None
    budget.pop(17)
    assert "".join(map(chr, budget.forced())) == "</think>"
    budget.pop()
    assert budget.allowed() is None and not budget.forced()


def test_it_goes_with_some_searches() -> None:
    with pytest.raises(UsageError, match="out of range"):
        ReplyOptions(thinking_budget=-1)
    for search in ("vote", "samples"):
        assert Trial(LettersBackend(400), search=search, temperature=0.9, thinking_budget=3).tokens()
    with pytest.raises(UsageError, match="cannot limit thoughts"):
        Trial(LettersBackend(), search="beam", thinking_budget=3)


def thinking(inside: bool = True, **options: Any) -> ThoughtConstraint:
    tokenizer = Tagged()
    tags = ThoughtTags(FORMATS[1], tokenizer)
    return ThoughtConstraint(tokenizer, tags, ThoughtStart(inside, not inside), **options)


def test_a_text_closes_a_thought_that_is_cut_short() -> None:
    budget = thinking(budget=2, closing=" so")
    assert follow(budget, "abcd") == "ab so\x02cd" and budget.end == "budget"
    asked = thinking(closing="!")
    assert follow(asked, "ab") == "ab"
    asked.end_thought()
    assert follow(asked, "cd") == "!\x02cd" and asked.end == "request"
    ended = thinking()
    assert follow(ended, "a\x02b") == "a\x02b" and ended.end == "model"


@given(st.integers(1, 300), st.integers(0, 3000), st.integers(0, 99))
@settings(max_examples=20)
def test_circles_are_measured(period: int, before: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 50_000, before + period).tolist()
    assert repetition(words[:before] + words[before:] * (600 // period + 4)) > 0.95
    assert repetition(words) < 0.1


def test_a_thought_that_goes_in_circles_is_ended() -> None:
    circling = thinking(watched=True)
    found = follow(circling, "Wait, let me think again. " * 100 + "\x02ok")
    assert 512 <= found.index("\x02") < 700 and circling.end == "repetition"
    # A thought that repeats itself twice does not.
    twice = "".join(map(chr, np.random.default_rng(0).integers(200, 9000, 1500))) * 2
    assert follow(thinking(watched=True), twice) == twice


@given(st.lists(st.one_of(st.sampled_from([1, 2, *range(97, 102)]), st.none()), max_size=60), st.booleans())
def test_what_follows_a_thought_is_strict(moves: Sequence[int | None], inside: bool) -> None:
    """However tokens are pushed and popped, what may follow is what a new constraint says behind the same tokens."""

    def new() -> ThoughtConstraint:
        inner = ChoiceConstraint(ChoiceTrie([[97, 98], [99]], [END]))
        return thinking(inside, inner=inner, budget=5, closing="z", end_ids=[END], vocab_size=128)

    constraint, tokens = new(), list[int]()
    for move in moves:
        if move is None:
            count = min(len(tokens), 2)
            constraint.pop(count)
            del tokens[len(tokens) - count :]
        else:
            constraint.push(move)
            tokens.append(move)
        fresh = new()
        for token in tokens:
            fresh.push(token)
        allowed, expected = constraint.allowed(), fresh.allowed()
        assert allowed is not None and expected is not None and allowed.tolist() == expected.tolist()
        assert list(constraint.forced()) == list(fresh.forced())
    text = "".join(map(chr, tokens))
    if re.fullmatch("[a-e]{0,4}\x02" if inside else "\x01[a-e]{0,4}\x02", text):
        assert constraint.allowed().tolist() == [97, 99]  # type: ignore[union-attr]
    if not tokens:
        ids = constraint.allowed().tolist()  # type: ignore[union-attr]
        assert ids == ([id_ for id_ in range(128) if id_ != END] if inside else [1, 97, 99])


def test_only_the_end_can_be_drawn() -> None:
    config = ReplyOptions(temperature=1.0, thinking_budget=1)
    sampler = Sampler(LogitsProcessor(config, V, 1), [1], thought_limit(Tagged(), 1, [1]))
    logits = np.zeros(V, np.float32)
    sampler.accept(0, logits)
    assert {sampler.sample(logits, position) for position in range(20)} == {2}
    assert len({sampler.sample(logits, position, [2]) for position in range(20)}) > 3
    assert sampler.forced([]) == [2] and not sampler.forced([2])


@needs_builtin
@pytest.mark.slow
def test_a_model_ends_its_thought() -> None:
    with edgeinfer.load(threads=1, context=400, remember=False) as model:
        prompt = "<think>Once upon a time"
        texts = [
            model.generate(prompt, max_tokens=40, thinking_budget=8, speculation=drafters).text
            for drafters in ("off", "forced,ngram")
        ]
        assert texts[0] == texts[1]
        thought, end, rest = texts[0].partition("</think>")
        assert end and len(model.tokenize(thought)) <= 9 and "</think>" not in rest
        free = model.generate(prompt, max_tokens=40, speculation="off").text
        assert free.startswith(thought)
