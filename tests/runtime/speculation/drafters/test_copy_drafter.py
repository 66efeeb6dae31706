"""What the copy drafter proposes: the longest match, through changes of the text, and never another conversation's."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Guess
from edgeinfer.runtime.speculation.drafters.copy import CopyDrafter, ForcedDrafter
from edgeinfer.runtime.speculation.drafters.text_index import SuffixIndex
from tests.runtime.speculation.drafters.rounds import ask, chain, guesses_of, searched, settled
from tests.tables import each_row

TOKENS = st.lists(st.integers(0, 2), max_size=30)
SOURCE = list(range(10, 60))


def told(prompt: list[int], *committed: int) -> CopyDrafter:
    """A drafter after a prompt and committed tokens, one per round."""
    drafter = CopyDrafter()
    drafter.begin(prompt)
    for token in committed:
        drafter.observe(settled([token]))
    return drafter


@settings(deadline=None)
@given(TOKENS)
def test_after_a_prompt_it_goes_on_with_the_longest_match_or_the_last_token(prompt: list[int]) -> None:
    position, length = searched(prompt, [])
    if not length:
        # Of the reply only its first token is known, which may begin an edit of what the prompt has.
        position = max((place for place in range(1, len(prompt)) if prompt[place - 1] == prompt[-1]), default=0)
    assert [guess.token for guess in ask(told(prompt))] == ([prompt[position]] if position > 0 else [])


def test_an_edit_is_drafted_from_the_replys_first_token() -> None:
    # "... <source> <reply>: 10", and then word after word with one of them changed.
    drafter = told([1, 2, *SOURCE, 3, 10])
    assert chain(drafter, 40) == SOURCE[1:41]
    assert 0.5 < drafter.priors[ask(drafter)[0].sign] < 0.7
    drafter.observe(settled([99]))
    assert chain(drafter, 5) == SOURCE[2:7]
    # Later in a reply one token alone is no match.
    assert ask(told([1, 2, *SOURCE, 3, 98], 10)) == []


@each_row(
    ("committed", "drafted"),
    [
        ((12, 13, 99), [15, 16, 17, 18, 19]),  # a token replaced
        ((12, 13, 17), [18, 19, 20]),  # tokens left out
        ((12, 13, 97, 98, 99, 14), [15, 16, 17]),  # tokens inserted
    ],
)
def test_a_change_does_not_end_the_copy(committed: tuple[int, ...], drafted: list[int]) -> None:
    assert chain(told([*SOURCE, 1, 10, 11], *committed), len(drafted)) == drafted


REPLACED = [9, 10, 20, 11, 12, 13, 14, 15, 20, 16, 17, 18, 19, 20, 30]
NAMED = [9, 10, 20, 21, 11, 12, 13, 14, 15, 20, 21, 16, 17, 18, 19, 20, 21, 30]
FAILING = [9, 10, 20, 11, 12, 20, 13, 14, 20, 15, 16, 17, 20, 18, 19]


@each_row(
    ("prompt", "committed", "drafted"),
    [
        # What was replaced once is proposed replaced, a name of several tokens as a whole.
        ([*REPLACED, 1, 9, 10], (99, 11), [12, 13, 14, 15, 99, 16, 17, 18, 19, 99, 30]),
        ([*NAMED, 1, 9, 10], (99, 98, 11, 12), [13, 14, 15, 99, 98, 16, 17, 18, 19, 99, 98, 30]),
        # In the very draft that explains the gap, before anything of that is committed.
        ([*REPLACED, 1, 9, 10, 20, 11], (12, 13, 14, 15, 99), [16, 17, 18, 19, 99, 30]),
        # A substitution that fails twice is forgotten.
        ([*FAILING, 1, 9, 10], (99, 11, 12, 20, 13, 14, 20, 15, 16), [17, 20, 18, 19]),
        ([5, 6, 7, 5, 6, 7, 5, 6], (), [7, 5, 6, 7, 5, 6, 7]),  # a match that overlaps its copy
        ([*SOURCE, 1, 10, 11], tuple(range(100, 130)), []),  # a text that goes its own way
    ],
)
def test_substitutions(prompt: list[int], committed: tuple[int, ...], drafted: list[int]) -> None:
    assert chain(told(prompt, *committed), len(drafted) or 1) == drafted


def test_substitutions_end_with_the_generation() -> None:
    tale = [9, 10, 20, 11, 12, 13, 20, 14, 15]
    prompt = [*tale, 1, 9, 10]
    drafter = told(prompt, 99, 11, 12, 13)
    assert chain(drafter, 1) == [99]
    drafter.begin([*tale, 1, 9, 10, 20, 11, 12, 13])
    assert chain(drafter, 1) == [20]


def test_a_longer_match_elsewhere_takes_over() -> None:
    far = list(range(200, 280))
    elsewhere = [70, 71, 72, 73, 74, 75, 76]
    drafter = told([*SOURCE, *far, *elsewhere, 2, 10, 11], 12, 70, 71)
    assert chain(drafter, 3) == [72, 73, 74]
    # One that is no longer than what speaks for the source does not.
    drafter = told([*SOURCE, *far, 20, 21, 7, 2, 10, 11], *range(12, 20), 99, 20, 21)
    assert chain(drafter, 3) == [22, 23, 24]


@settings(deadline=None)
@given(TOKENS, TOKENS, st.lists(TOKENS.filter(bool), max_size=4), TOKENS)
def test_what_it_knew_before_changes_nothing(
    before: list[int], prompt: list[int], rounds: list[list[int]], path: list[int]
) -> None:
    used, fresh = told(before), CopyDrafter()
    for drafter in (used, fresh):
        drafter.begin(prompt)
        for committed in rounds:
            drafter.observe(settled(committed))
    assert ask(used, path, 3) == ask(fresh, path, 3)


@settings(deadline=None)
@given(TOKENS, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_size_of_rounds_does_not_matter(prompt: list[int], committed: list[int]) -> None:
    at_once = told(prompt)
    at_once.observe(settled(committed))
    assert ask(at_once, (), 3) == ask(told(prompt, *committed), (), 3)


def test_priors_rise_with_the_evidence() -> None:
    drafter = told([*SOURCE, 1, 10, 11], *SOURCE[2:42])
    after_a_miss = told([*SOURCE, 1, 10, 11], 12, 13, 99)
    at_first = told([*SOURCE, 1, 10, 11])
    sure, unsure, new = (drafter.priors[ask(each)[0].sign] for each in (drafter, after_a_miss, at_first))
    assert all(0 < prior < 1 for prior in drafter.priors)
    assert sure > 0.9 > new
    assert sure > unsure


def test_a_substitution_that_came_true_is_trusted_more() -> None:
    tale = [9, 10, 20, 11, 12, 13, 14, 20, 15, 16, 17, 18, 20, 30]
    untried = told([*tale, 1, 9, 10], 99, 11, 12, 13, 14)
    tried = told([*tale, 1, 9, 10], 99, 11, 12, 13, 14, 99, 15, 16, 17, 18)
    once, twice = ask(untried)[0], ask(tried)[0]
    assert once.token == twice.token == 99
    assert untried.priors[once.sign] < tried.priors[twice.sign] - 0.1


def test_offers_the_exact_match_and_the_source_beside_a_substitution() -> None:
    tale = [9, 10, 20, 11, 12, 13, 14, 15, 20, 16]
    drafter = told([*tale, 14, 15, 50, 1, 9, 10], 99, 11, 12, 13, 14, 15)
    assert [guess.token for guess in ask(drafter, width=3)] == [99, 20]
    assert len({guess.sign for guess in ask(drafter, width=3)}) == 2


def test_memory_is_told_and_planned_for() -> None:
    sizes = []
    for count in (0, 500, 2000):
        drafter = told([token % 700 for token in range(count)])
        sizes.append(drafter.nbytes())
        assert drafter.nbytes() <= SuffixIndex.planned_bytes(count)
    assert all(small < large for small, large in pairwise(sizes))


def test_forced_tokens_are_proposed_as_the_context_tells_them() -> None:
    drafter, forced = ForcedDrafter(), {(): [4, 9], (4,): [5], (4, 5): []}
    context = DraftContext([1], lambda logits, path: (0, None), lambda path: forced[tuple(path)])
    drafter.begin([1])
    assert [guesses_of(drafter, context, path, 3) for path in ([], [4], [4, 5])] == [(Guess(4, 0),), (Guess(5, 0),), ()]
    assert drafter.priors[0] > 0.9 and (drafter.nbytes(), drafter.state()) == (0, {})
