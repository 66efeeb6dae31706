"""The rules by which a draft is accepted, found by name, and the view of the target that they judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities, TargetView, Verdict, Verifier
from edgeinfer.runtime.speculation.rejection import verify_kseq, verify_rejection
from edgeinfer.runtime.speculation.selfcheck import near_edge

__all__ = [
    "VERIFIERS",
    "RoundView",
    "VerificationRule",
    "find_verification",
    "threshold",
    "verify_keyed",
    "verify_typical",
]

# Medusa's constants: a probability that always suffices, and its square root for the share of exp(-entropy), which is
# what a token of a flat distribution with that entropy has.
_EPSILON = 0.09
_ALPHA = 0.3


def verify_keyed(draft: Draft, target: TargetView) -> Verdict:
    """Follows the target's own position-keyed choices down the draft for as long as it holds them.

    Whatever the draft, the text is that of plain decoding, token by token: greedy decoding is the case in which the
    choice is the most likely token.
    """
    accepted: list[int] = []
    at, token, childless = -1, target.token(-1), True
    # Parents come before children, so one look at each node finds the whole path.
    for node, parent in enumerate(draft.parents):
        if parent != at:
            continue
        if draft.guesses[node].token == token:
            accepted.append(node)
            at, token, childless = node, target.token(node), True
        else:
            childless = False
    return Verdict(tuple(accepted), token, bonus=childless)


def verify_typical(draft: Draft, target: TargetView) -> Verdict:
    """Takes the longest path of which the target finds every token typical, of equals the likeliest; then its choice.

    This is Medusa's typical acceptance (Cai et al. 2024), and it is lossy.

    Output is NOT distributed as the target's: unlikely tokens are never accepted, likely ones more often than they are
    likely. As temperature falls to 0 it becomes greedy decoding.
    """
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # nodes of accepted paths: length and log-probability
    known: dict[int, tuple[Probabilities, float]] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in reached:
            continue
        if parent not in known:
            probabilities = target.probabilities(parent)
            known[parent] = probabilities, threshold(probabilities)
        probabilities, least = known[parent]
        likely = float(probabilities[draft.guesses[node].token])
        if likely > least:
            length, score = reached[parent]
            reached[node] = length + 1, score + math.log(likely)
    best = end = max(reached, key=lambda node: reached[node])
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = draft.parents[end]
    return Verdict(tuple(path[::-1]), target.token(best), bonus=best not in draft.parents)


def threshold(probabilities: Probabilities) -> float:
    """The probability a token must exceed to be typical of a distribution (V,): less where the distribution is flat."""
    some = probabilities[probabilities > 0]
    entropy = -float(some @ np.log(some))
    return min(_EPSILON, _ALPHA * math.exp(-entropy))


@dataclass(frozen=True)
class VerificationRule:
    """A rule and what it wants of drafts.

    Attributes:
        name: as the command line knows it.
        verify: decides.
        lossless: whether text is distributed as the target's (greedy: is the target's); else it must be labelled.
        stochastic: whether guesses should be drawn from drafters' distributions, independently of how the target draws,
            and carry them; else they should be what the drafter, with the target's own draw, would choose.
        iid_chains: whether a draft that branches should be chains from the root on, each drawn by itself, with equal
            tokens kept apart; else a tree whose siblings differ.
    """

    name: str
    verify: Verifier
    lossless: bool
    stochastic: bool
    iid_chains: bool


VERIFIERS: dict[str, VerificationRule] = {
    rule.name: rule
    for rule in (
        VerificationRule("keyed", verify_keyed, lossless=True, stochastic=False, iid_chains=False),
        VerificationRule("rejection", verify_rejection, lossless=True, stochastic=True, iid_chains=False),
        VerificationRule("k-seq", verify_kseq, lossless=True, stochastic=True, iid_chains=True),
        VerificationRule("typical", verify_typical, lossless=False, stochastic=False, iid_chains=False),
    )
}


def find_verification(name: str) -> VerificationRule:
    """The rule of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in VERIFIERS:
        raise UsageError(f"There is no verification {name!r}.", f"Choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]


class RoundView:
    """A `TargetView` of one pass: the sampler's choices after each node, whose path it knows.

    Args:
        sampler: of the reply.
        draft: that the pass verified.
        logits: after the root and after each node of the draft. (S, V)
        position: absolute position of the token after the root.
    """

    def __init__(self, sampler: Sampler, draft: Draft, logits: Floats, position: int) -> None:
        self._sampler = sampler
        self._draft = draft
        self._logits = logits
        self._position = position
        self._chain = draft.is_chain

    def token(self, node: int) -> int:
        """The keyed choice after a node."""
        return self._sampler.sample(self._logits[node + 1], self.position(node), self.path(node))

    def probabilities(self, node: int) -> Probabilities:
        """The distribution after a node."""
        return self._sampler.probabilities(self._logits[node + 1], self.path(node))

    def uniform(self, depth: int, draw: int) -> float:
        """A uniform draw of the position `depth` tokens after the root's successor."""
        return self._sampler.uniform(self._position + depth, draw)

    def near_tie(self, node: int, noise: float) -> bool:
        """Whether the choice after a node would be another if each logit were off by at most `noise`."""
        if self._sampler.takes_likeliest:
            row = self._logits[node + 1]
            # What `near_edge` finds then, in a twentieth of its time over a large vocabulary.
            return bool(np.count_nonzero(row >= row.max() - np.float32(2 * noise)) > 1)
        position, path = self.position(node), self.path(node)
        return near_edge(lambda logits: self._sampler.sample(logits, position, path), self._logits[node + 1], noise)

    def position(self, node: int) -> int:
        """Absolute position of the token after a node."""
        if node < 0:
            return self._position
        return self._position + 1 + (node if self._chain else self._draft.depth(node))

    def path(self, node: int) -> Sequence[int]:
        """Drafted tokens up to a node, where choices depend on them."""
        return self._draft.path(node) if self._sampler.follows_paths else ()
