"""Verification by common noise: the target's own choices decide, so that text is plain decoding's bit for bit."""

from __future__ import annotations

from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, TargetView, Verdict
from edgeinfer.runtime.speculation.verification.rule import VerificationRule


def verify_keyed(draft: Draft, target: TargetView) -> Deciding:
    """Follow the target's own position-keyed choices down the draft for as long as it holds them. Whatever the draft,
    the text is that of plain decoding, token by token: greedy decoding is the case in which the choice is the most
    likely token."""
    accepted: list[int] = []
    yield -1
    at, token, childless = -1, target.token(-1), True
    # Parents come before children, so one look at each node finds the whole path.
    for node, parent in enumerate(draft.parents):
        if parent != at:
            continue
        if draft.guesses[node].token == token:
            accepted.append(node)
            yield node
            at, token, childless = node, target.token(node), True
        else:
            childless = False
    return Verdict(tuple(accepted), token, bonus=childless)


METHODS = (
    VerificationRule(name="keyed", help="gives the text of plain decoding", verify=verify_keyed, exact=True, order=0),
)
