"""Keyed verification: the text of plain decoding, whatever is drafted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities, Verdict
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from tests.runtime.speculation.verification.enumeration import (
    Laws,
    TableTarget,
    check_lossless,
    drafts,
    make_draft,
    random_laws,
)


class ChosenTarget:
    """A target that chooses by table and must be asked nothing else; counts how often it is asked."""

    def __init__(self, draft: Draft, choices: dict[tuple[int, ...], int]) -> None:
        self._nodes, self._choices, self.asked = draft, choices, 0

    def token(self, node: int) -> int:
        self.asked += 1
        return self._choices[tuple(self._nodes.path(node))]

    def probabilities(self, node: int) -> Probabilities:
        raise AssertionError("the choice is all there is to it")

    def uniform(self, depth: int, draw: int) -> float:
        raise AssertionError("the choice is all there is to it")

    def state(self, node: int) -> Floats:
        raise AssertionError("no rule here reads states")

    def may_follow(self, node: int) -> bool:
        return True


TREE = make_draft((-1, 5, None), (-1, 7, None), (0, 1, None), (1, 1, None), (1, 2, None), (4, 3, None))


def test_a_tree_is_followed_along_the_targets_choices() -> None:
    expected: list[tuple[dict[tuple[int, ...], int], Verdict]] = [
        ({(): 4}, Verdict((), 4, bonus=False)),
        ({(): 5, (5,): 1, (5, 1): 9}, Verdict((0, 2), 9, bonus=True)),
        ({(): 7, (7,): 3}, Verdict((1,), 3, bonus=False)),
        ({(): 7, (7,): 1, (7, 1): 0}, Verdict((1, 3), 0, bonus=True)),
        ({(): 7, (7,): 2, (7, 2): 1}, Verdict((1, 4), 1, bonus=False)),
        ({(): 7, (7,): 2, (7, 2): 3, (7, 2, 3): 3}, Verdict((1, 4, 5), 3, bonus=True)),
    ]
    for choices, verdict in expected:
        target = ChosenTarget(TREE, choices)
        assert verify_keyed(TREE, target) == verdict
        assert target.asked == len(verdict.accepted) + 1


def test_chains_and_empty_drafts() -> None:
    chain = make_draft((-1, 1, None), (0, 2, None), (1, 3, None))
    assert verify_keyed(chain, ChosenTarget(chain, {(): 1, (1,): 2, (1, 2): 0})) == Verdict((0, 1), 0, bonus=False)
    everything = {(): 1, (1,): 2, (1, 2): 3, (1, 2, 3): 4}
    assert verify_keyed(chain, ChosenTarget(chain, everything)) == Verdict((0, 1, 2), 4, bonus=True)
    assert verify_keyed(Draft(), ChosenTarget(Draft(), {(): 8})) == Verdict((), 8, bonus=True)


def test_the_first_of_equal_siblings_is_taken() -> None:
    draft = make_draft((-1, 1, None), (-1, 1, None), (1, 2, None))
    assert verify_keyed(draft, ChosenTarget(draft, {(): 1, (1,): 2})) == Verdict((0,), 2, bonus=True)


def test_output_is_lossless_however_guesses_come_about() -> None:
    target, drafter = random_laws(1, 3), random_laws(2, 3)
    check_lossless(verify_keyed, drafts(lambda path: [drafter(path), 1], 2, repeats=False), target, 2)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_text_is_that_of_plain_decoding(seed: int, data: st.DataObject) -> None:
    distributions: Laws = random_laws(seed, 4, sharpness=3.0)
    numbers = np.random.default_rng(seed).random(40).tolist()

    def choose(text: list[int]) -> int:
        return TableTarget(
            Draft(), lambda path: distributions(tuple(text)), lambda depth, draw: numbers[len(text)]
        ).token(-1)

    plain: list[int] = []
    while len(plain) < 16:
        plain.append(choose(plain))
    text: list[int] = []
    while len(text) < 16:
        size, likely = data.draw(st.integers(0, 6)), plain[len(text) : len(text) + 3]
        nodes = [
            # Half of the guesses are right where their parents are.
            (data.draw(st.integers(-1, n - 1)), data.draw(st.sampled_from([0, 1, 2, 3, *likely])), None)
            for n in range(size)
        ]
        draft, start = make_draft(*nodes), len(text)
        view = TableTarget(
            draft,
            lambda path, start=tuple(text): distributions((*start, *path)),  # type: ignore[misc]
            lambda depth, draw, start=start: numbers[start + depth],  # type: ignore[misc]
        )
        verdict = verify_keyed(draft, view)
        text += [*(draft.guesses[node].token for node in verdict.accepted), verdict.token]
    assert text[:16] == plain
