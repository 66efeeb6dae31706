"""The rules by which a draft is accepted, found by name, and the view of the target that they judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import require
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities, TargetView, Verdict, Verifier
from edgeinfer.runtime.speculation.evaluated import LogitRows
from edgeinfer.runtime.speculation.registry import DrafterParts
from edgeinfer.runtime.speculation.rejection import verify_kseq, verify_rejection
from edgeinfer.runtime.speculation.selfcheck import near_edge

# Medusa's constants: a probability that always suffices, and its square root for the share of exp(-entropy), which is
# what a token of a flat distribution with that entropy has.
_EPSILON = 0.09
_ALPHA = 0.3
_JUDGE = "judge"
# Nats below the likeliest token at which one may not follow, whatever a judge says: forms and biases forbid it.
_BANNED = 40.0


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


def verify_judge(draft: Draft, target: TargetView) -> Verdict:
    """Follows the target's choices as `verify_keyed`, and where they leave the draft, the first guess that is judged
    right all the same.

    This is judge decoding (Bachmann et al. 2025), and it is lossy: whatever the temperature, the text may be another
    than the target's, as far as the judge was taught that it may.
    """
    accepted: list[int] = []
    at = -1
    while children := draft.children(at):
        token = target.token(at)
        same = [child for child in children if draft.guesses[child].token == token]
        right = same or [child for child in children if target.judged(child)]
        if not right:
            return Verdict(tuple(accepted), token, bonus=False)
        at = right[0]
        accepted.append(at)
    return Verdict(tuple(accepted), target.token(at), bonus=True)


@dataclass(frozen=True)
class TokenJudge:
    """A linear head over the target's state in the row of a drafted token: whether the token is right.

    Attributes:
        weight, bias: of a score that is positive for what may stay. (D,)
    """

    weight: Floats
    bias: float

    @classmethod
    def of(cls, heads: Heads) -> TokenJudge:
        """The judge of a bundle's heads."""
        return cls(heads.arrays["weight"].astype(np.float32), float(heads.arrays["bias"][0]))

    def finds_right(self, state: Floats) -> bool:  # (D,)
        """Whether the token of a row may stay, by its state after the last layer."""
        return float(normed_states(state[None])[0] @ self.weight) + self.bias > 0


def normed_states(states: Floats) -> Floats:  # (S, D) -> (S, D)
    """States as a judge sees them: of unit mean square, as behind the final norm, whose own scale its weight holds."""
    normed: Floats = states / np.sqrt((states * states).mean(axis=1, keepdims=True) + np.float32(STATE_EPS))
    return normed


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
        judge: that the rule asks; None in rules that ask none, and before a bundle's was read (`verification_of`).
    """

    name: str
    verify: Verifier
    lossless: bool
    stochastic: bool
    iid_chains: bool
    judge: TokenJudge | None = None


VERIFIERS: dict[str, VerificationRule] = {
    rule.name: rule
    for rule in (
        VerificationRule("keyed", verify_keyed, lossless=True, stochastic=False, iid_chains=False),
        VerificationRule("rejection", verify_rejection, lossless=True, stochastic=True, iid_chains=False),
        VerificationRule("k-seq", verify_kseq, lossless=True, stochastic=True, iid_chains=True),
        VerificationRule("typical", verify_typical, lossless=False, stochastic=False, iid_chains=False),
        VerificationRule(_JUDGE, verify_judge, lossless=False, stochastic=False, iid_chains=False),
    )
}


def find_verification(name: str) -> VerificationRule:
    """The rule of this name."""
    if name not in VERIFIERS:
        raise UsageError(f"There is no verification {name!r}.", f"Choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]


def verification_of(name: str, parts: DrafterParts) -> VerificationRule:
    """The rule of this name, with the judge of the model's bundle where it asks one."""
    rule = find_verification(name)
    if rule.name != _JUDGE:
        return rule
    hint = "Use a natively exported bundle, or another verification."
    require(parts.target.capabilities.hidden, parts.target, "tell the states that a judge reads", hint)
    if parts.judge is None:
        message = "The model's bundle has no judge of drafted tokens."
        raise UsageError(message, "Teach one with edgeinfer tune --judge --text FILE, or use another verification.")
    return replace(rule, judge=TokenJudge.of(parts.judge))


class RoundView:
    """A `TargetView` of one pass: the sampler's choices after each node, whose path it knows.

    Args:
        sampler: of the reply.
        draft: that the pass verified.
        logits: after the root and after each node of the draft, by row. (S, V)
        position: absolute position of the token after the root.
        judge: of drafted tokens, where the rule asks one.
        hidden: states of the same rows, which it reads. (S, D)
    """

    def __init__(
        self,
        sampler: Sampler,
        draft: Draft,
        logits: Floats | LogitRows,
        position: int,
        judge: TokenJudge | None = None,
        hidden: Floats | None = None,
    ) -> None:
        self._sampler = sampler
        self._draft = draft
        self._logits = logits
        self._position = position
        self._judge, self._hidden = judge, hidden
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

    def judged(self, node: int) -> bool:
        """Whether the judge finds a node's token right behind its path, where it may follow at all."""
        assert self._judge is not None and self._hidden is not None, "rules that judge are bound to a judge"
        if not self._judge.finds_right(self._hidden[node + 1]):
            return False
        above = self._draft.parents[node]
        logits = self._sampler.adjusted(self._logits[above + 1], self.path(above))
        return float(logits[self._draft.guesses[node].token]) > float(logits.max()) - _BANNED

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
