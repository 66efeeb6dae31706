"""Accepts what the target's own position-keyed choice confirms; knows nothing of laws or of who drafted.

Whatever the draft, and however it came about, the text is that of plain decoding, token by token: greedy decoding is
the case in which the choice is the most likely token. On chains and trees.
"""

from __future__ import annotations

from edgeinfer.runtime.speculation.contracts import Draft, TargetView, Verdict

__all__ = ["verify_keyed"]


def verify_keyed(draft: Draft, target: TargetView) -> Verdict:
    """Follows the target's choices down the draft for as long as it holds them."""
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
