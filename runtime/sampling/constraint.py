"""Hard constraints on what tokens may follow; the one of a closed list of replies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError

__all__ = ["ChoiceConstraint", "Constraint"]


class Constraint(Protocol):
    """Which tokens may follow, as a stack: draft positions are evaluated by pushing the draft and undone by popping it.

    A token that may not follow can be pushed, as drafters propose such: there, and after an end, only stop ids may
    follow and nothing is forced. Ids rather than a bitmask, so that whoever samples reads nothing but those.
    """

    def allowed(self) -> NDArray[np.int64] | None:  # (A,)
        """Token ids that may follow now, ascending, at least one; None is all. Not to be written to."""

    def forced(self) -> Sequence[int]:
        """Tokens that must follow from here, in order; empty where there is a choice, or only the end follows.

        Where only their text must, other tokens may spell it: these are then the likeliest, and as good as any draft.
        """

    def push(self, token: int) -> None:
        """Appends one token to the reply."""

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""


class ChoiceConstraint:
    """The reply is one of a list of token sequences, and then a stop token.

    A token trie in compressed sparse rows (the form of STATIC, arXiv 2602.22647): nodes lie level by level in
    lexicographic order, so that the children of a node are one slice, and allowing them copies nothing. Building takes
    a sort of the choices and a few passes over arrays; pushing takes a binary search.

    Args:
        choices: token ids of each; one may begin another, and repetitions count once.
        end_ids: stop tokens, any of which ends the reply.

    Raises:
        UsageError: there are no choices or no stop tokens, or a choice is empty, has a negative id or a stop token.
    """

    def __init__(self, choices: Sequence[Sequence[int]], end_ids: Collection[int]) -> None:
        ordered = sorted({tuple(map(int, choice)) for choice in choices})
        _check(ordered, end_ids)
        # Node 0 is the start, node s + 1 the one behind the token in slot s. The last node, which no slot leads to, is
        # where a reply is after its end and off the list.
        self._tokens, self._first, ends = _trie(ordered)  # (N,), (N + 3,), (N + 2,)
        self._end_ids = np.unique(np.array(list(end_ids), np.int64))  # (E,)
        for array in (self._tokens, self._end_ids):
            array.setflags(write=False)
        # Single items are read several times faster through these.
        self._token_at, self._first_at, self._ends = self._tokens.data, self._first.data, ends.tobytes()
        self._over = len(ends) - 1
        self._path = [0]

    def allowed(self) -> NDArray[np.int64]:  # (A,)
        """Token ids that may follow now, ascending, at least one. Not to be written to."""
        node = self._path[-1]
        children = self._tokens[self._first_at[node] : self._first_at[node + 1]]
        if not self._ends[node]:
            return children
        return np.sort(np.concatenate((children, self._end_ids))) if len(children) else self._end_ids

    def forced(self) -> list[int]:
        """Tokens up to the next choice or possible end, in order."""
        first, node, tokens = self._first_at, self._path[-1], list[int]()
        while not self._ends[node] and first[node + 1] - first[node] == 1:
            slot = first[node]
            tokens.append(self._token_at[slot])
            node = slot + 1
        return tokens

    def push(self, token: int) -> None:
        """Appends one token to the reply."""
        node = self._path[-1]
        end = self._first_at[node + 1]
        slot = bisect_left(self._token_at, token, self._first_at[node], end)
        self._path.append(slot + 1 if slot < end and self._token_at[slot] == token else self._over)

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""
        assert 0 <= count < len(self._path), "popping more tokens than were pushed"
        del self._path[len(self._path) - count :]


def _check(choices: Sequence[tuple[int, ...]], end_ids: Collection[int]) -> None:
    if not choices:
        raise UsageError("The list of choices is empty.", "Add at least one.")
    if not choices[0]:  # sorted: an empty one comes first
        raise UsageError("A choice has no tokens.", "Leave it out, as a reply has at least one token.")
    if not end_ids:
        raise UsageError("A reply from a list of choices needs a stop token.", "Add at least one stop token.")
    for token in chain(end_ids, chain.from_iterable(choices)):
        if token < 0:
            raise UsageError(f"{token} is not a token id.", "Ids count from 0.")
    stops = set(end_ids)
    for choice in choices:
        if not stops.isdisjoint(choice):
            raise UsageError(
                f"The choice {list(choice)} has a stop token inside.", "Leave it out, as the reply would end there."
            )


def _trie(choices: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """The trie of different choices in lexicographic order, without a loop over them.

    Returns:
        Token of each slot (N,); first slot of each node's children, and one past them (N + 3,); whether a reply may end
        at each node (N + 2,).
    """
    count = len(choices)
    lengths = np.fromiter(map(len, choices), np.int64, count)  # (K,)
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    flat = np.fromiter(chain.from_iterable(choices), np.int64, total)  # (T,)
    owner = np.repeat(np.arange(count), lengths)
    depth = np.arange(total) - starts[owner]
    # A choice shares nodes with the one before it up to the first token that differs. (The first choice has the last
    # one before it; that does no harm but where there is nothing to compare, so it is cut off by hand.)
    before = owner - 1
    shared = depth < lengths[before]
    shared[shared] = flat[(starts[before] + depth)[shared]] == flat[shared]
    shared[: lengths[0]] = False
    last_new = np.maximum.accumulate(np.where(shared, -1, np.arange(total)))
    opens = np.flatnonzero(last_new >= starts[owner])  # (N,)
    # Level by level, and by choice within a level; a node's parent is the last one of the level above that a choice up
    # to its own opened.
    keys = depth[opens] * count + owner[opens]
    order = np.argsort(keys)
    keys = keys[order]
    parents = keys.searchsorted(keys - count, side="right")  # (N,), ascending
    first = parents.searchsorted(np.arange(len(keys) + 3))
    ends = np.zeros(len(keys) + 2, np.bool_)
    ends[keys.searchsorted((lengths - 1) * count + np.arange(count), side="right")] = True
    ends[-1] = True
    return flat[opens][order], first, ends
