"""Hard constraints on what tokens may follow, behind one text or several; the one of a closed list of replies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.sampling.choice_trie import ChoiceTrie

_Ints = NDArray[np.int64]


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

    def places(self) -> ConstraintPlaces:
        """The same constraint for several texts that go on from here."""


class ConstraintPlaces(Protocol):
    """What may follow several texts; a place, which is whatever suits the constraint, says where one of them is."""

    def start(self) -> Any:
        """The place that no text has left."""

    def followers(self, places: Sequence[Any]) -> tuple[_Ints, _Ints]:  # (B,) -> (M,), (M,)
        """What may follow: pairs of an index in `places` and a token."""

    def after(self, places: Sequence[Any], tokens: Sequence[int]) -> Sequence[Any]:  # (B,), (B,) -> (B,)
        """The places behind one further token each."""


class TextPlaces:
    """Implements `ConstraintPlaces` by a constraint's stack: each place is the tokens that lead there."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def start(self) -> tuple[int, ...]:
        """No tokens."""
        return ()

    def followers(self, places: Sequence[tuple[int, ...]]) -> tuple[_Ints, _Ints]:  # (B,) -> (M,), (M,)
        """See `ConstraintPlaces`."""
        ids = [self._allowed(place) for place in places]
        return np.repeat(np.arange(len(ids)), [len(each) for each in ids]), np.concatenate(ids)

    def after(self, places: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """See `ConstraintPlaces`."""
        return [(*place, token) for place, token in zip(places, tokens, strict=True)]

    def _allowed(self, place: tuple[int, ...]) -> _Ints:  # (A,)
        for token in place:
            self._constraint.push(token)
        ids = self._constraint.allowed()
        self._constraint.pop(len(place))
        assert ids is not None, "a constraint says what may follow"
        return ids


class ChoiceConstraint:
    """Implements `Constraint`: the reply is one of a list of token sequences, and then a stop token.

    Pushing takes a binary search.
    """

    def __init__(self, trie: ChoiceTrie) -> None:
        self._trie = trie
        # Single items are read several times faster through these.
        self._token_at, self._first_at, self._ends = trie.tokens.data, trie.first.data, trie.ends.data
        self._path = [0]

    def allowed(self) -> NDArray[np.int64]:  # (A,)
        """Token ids that may follow now, ascending, at least one. Not to be written to."""
        node, trie = self._path[-1], self._trie
        children = trie.tokens[self._first_at[node] : self._first_at[node + 1]]
        if not self._ends[node]:
            return children
        return np.sort(np.concatenate((children, trie.end_ids))) if len(children) else trie.end_ids

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
        self._path.append(slot + 1 if slot < end and self._token_at[slot] == token else self._trie.over)

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""
        assert 0 <= count < len(self._path), "popping more tokens than were pushed"
        del self._path[len(self._path) - count :]

    def places(self) -> ConstraintPlaces:
        """The nodes of the trie."""
        return _TriePlaces(self._trie, self._path[-1])


class _TriePlaces:
    """Implements `ConstraintPlaces` by the nodes of a trie."""

    def __init__(self, trie: ChoiceTrie, start: int) -> None:
        self._trie, self._start = trie, start

    def start(self) -> int:
        return self._start

    def followers(self, places: Sequence[int]) -> tuple[_Ints, _Ints]:  # (B,) -> (M,), (M,)
        return self._trie.followers(np.array(places, np.int64))

    def after(self, places: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        nodes: list[int] = self._trie.after(np.array(places, np.int64), np.array(tokens, np.int64)).tolist()
        return nodes
