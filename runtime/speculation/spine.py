"""Which rows of a tree are bit-exact, and what of a verdict they can carry; knows nothing of who drafted or verifies.

A row sums over the keys it sees in the order of their places in the cache. The spine, the chain of first children, fed
right behind the root has the places that a chain has, so its rows are bit-identical to plain decoding's, whatever rows
follow. Rows of side branches are not, nor are their keys and values from the second layer on: what they say is nearly
always right, but it is not to be built on.
"""

from __future__ import annotations

from edgeinfer.runtime.speculation.contracts import Draft, Verdict

__all__ = ["settle", "spine_first", "spine_tip"]


def spine_first(draft: Draft) -> Draft:
    """The same tree with the chain of first children in front; the other nodes keep their order."""
    if draft.is_chain:
        return draft
    spine: list[int] = []
    children = draft.children(-1)
    while children:
        spine.append(children[0])
        children = draft.children(children[0])
    order = [*spine, *sorted(set(range(len(draft))) - set(spine))]
    place = {-1: -1} | {node: new for new, node in enumerate(order)}
    return Draft(
        tuple(draft.guesses[node] for node in order),
        tuple(place[draft.parents[node]] for node in order),
        tuple(draft.sources[node] for node in order),
    )


def spine_tip(draft: Draft) -> int:
    """The last node of a draft's spine, which comes first in it; -1, the root, where it is empty."""
    length = 0
    while length < len(draft) and draft.parents[length] == length - 1:
        length += 1
    return length - 1


def settle(draft: Draft, verdict: Verdict) -> Verdict:
    """What a verdict comes to if side branches are not trusted: their first token, which a row of the spine chose.

    No token is lost that the next pass does not give: it begins with that one instead of a later one.

    Args:
        draft: with its spine first.
        verdict: over it.
    """
    accepted, kept = verdict.accepted, 0
    # The spine's node at depth i is node i, and no other path of nodes counts up so.
    while kept < len(accepted) and accepted[kept] == kept:
        kept += 1
    if kept == len(accepted):
        return verdict
    return Verdict(accepted[:kept], draft.guesses[accepted[kept]].token, False)
