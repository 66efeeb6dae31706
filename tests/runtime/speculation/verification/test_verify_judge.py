"""Judge decoding: which tokens it lets stay, and that none stays that may not follow."""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.research.judge import TokenJudge
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.decoding import LogitRows, RoundView
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities, Verdict
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from tests.runtime.speculation.verification.enumeration import make_draft, settle


class JudgedTarget:
    """A target whose choices and judgments are given by node."""

    def __init__(self, choices: list[int], right: set[int]) -> None:
        self._choices, self._right = choices, right  # the first choice is the root's

    def token(self, node: int) -> int:
        return self._choices[node + 1]

    def state(self, node: int) -> Floats:
        return np.array([1.0 if node in self._right else -1.0], np.float32)

    def may_follow(self, node: int) -> bool:
        return True

    def probabilities(self, node: int) -> Probabilities:
        raise AssertionError("choices and judgments are all there is to it")

    def uniform(self, depth: int, draw: int) -> float:
        raise AssertionError("choices and judgments are all there is to it")


# Finds right what the target says is.
JUDGE = TokenJudge(np.ones(1, np.float32), 0.0)


def chain(*tokens: int) -> Draft:
    return make_draft(*((place - 1, token, None) for place, token in enumerate(tokens)))


def test_of_a_chain_it_keeps_what_matches_or_is_right() -> None:
    """The published rule: the running product of both, and the target's own token behind it."""
    chance = np.random.default_rng(7)
    for _ in range(200):
        size = int(chance.integers(1, 7))
        draft = chain(*chance.integers(0, 3, size).tolist())
        choices, right = chance.integers(0, 3, size + 1).tolist(), {*np.flatnonzero(chance.random(size) < 0.4).tolist()}
        stays = [choices[node] == draft.guesses[node].token or node in right for node in range(size)]
        kept = int(np.cumprod(stays).sum())
        target = JudgedTarget(choices, right)
        assert settle(JUDGE.verify(draft, target)) == Verdict(tuple(range(kept)), choices[kept], bonus=kept == size)
        assert settle(JUDGE.verify(draft, JudgedTarget(choices, set()))) == settle(
            verify_keyed(draft, JudgedTarget(choices, set()))
        )


def test_of_a_tree_the_targets_own_choice_goes_first() -> None:
    tree = make_draft((-1, 5, None), (-1, 7, None), (1, 1, None), (1, 2, None))
    assert settle(JUDGE.verify(tree, JudgedTarget([7, 0, 3, 9, 9], {0, 1, 2, 3}))) == Verdict((1, 2), 9, bonus=True)
    assert settle(JUDGE.verify(tree, JudgedTarget([4, 8, 3, 9, 9], {0, 1}))) == Verdict((0,), 8, bonus=True)
    assert settle(JUDGE.verify(tree, JudgedTarget([4, 8, 2, 9, 9], {1}))) == Verdict((1, 3), 9, bonus=True)
    assert settle(JUDGE.verify(tree, JudgedTarget([4, 8, 3, 9, 9], set()))) == Verdict((), 4, bonus=False)


def test_it_reads_the_row_of_the_token_and_no_banned_one_stays() -> None:
    draft = chain(3, 5)
    logits = np.zeros((3, 8), np.float32)
    logits[0, 1] = logits[1, 2] = logits[2, 4] = 9.0
    states = np.array([[9.0, 9.0], [1.0, 3.0], [-4.0, 2.0]], np.float32)
    judge = TokenJudge.of(
        Heads("judge", {"weight": np.array([0.5, 1.0], np.float32), "bias": np.array([-0.6], np.float32)})
    )
    for row in states:
        score = (row / np.sqrt((row**2).mean() + STATE_EPS)) @ [0.5, 1.0] - 0.6
        assert judge.finds_right(row) == (score > 0)

    def verdict(config: ReplyOptions) -> Verdict:
        sampler = Sampler(LogitsProcessor(config, 8, 0), [0])
        return settle(judge.verify(draft, RoundView(sampler, draft, LogitRows(logits, states), 1)))

    assert verdict(ReplyOptions()) == Verdict((0,), 2, bonus=False)
    assert verdict(ReplyOptions(logit_bias={3: -100.0})) == Verdict((), 1, bonus=False)
