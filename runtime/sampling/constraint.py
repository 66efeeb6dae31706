"""Constraints on what tokens may follow, one text or several: closed lists of replies and a caller's own check."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

_Ints = NDArray[np.int64]


class ChoiceTrie:
    """The replies of a list, each a sequence of tokens and then a stop token.

    Nodes lie level by level in lexicographic order (STATIC, arXiv 2602.22647), so that the children of a node are one
    slice, and allowing them copies nothing. The places of several texts are followed by one search in one sorted array
    and one gather. Node 0 is the start, node s + 1 the one behind the token in slot s, and the last node, which no slot
    leads to, is where a reply is after its end and off the list.

    The paper's tables of the first levels, one entry for every pair of tokens, are left out: on a CPU the search takes
    less than the lookup there (docs/log).

    Args:
        choices: token ids of each; one may begin another, and repetitions count once.

    Attributes:
        tokens: of each slot. (N,)
        first: first slot of each node's children, and one past them. (N + 3,)
        ends: whether a reply may end at each node. (N + 2,)
        end_ids: the stop tokens, ascending. (E,)
    """

    def __init__(self, choices: Sequence[Sequence[int]], end_ids: Collection[int]) -> None:
        ordered = sorted({tuple(map(int, choice)) for choice in choices})
        lengths = np.fromiter(map(len, ordered), np.int64, len(ordered))  # (K,)
        flat = np.fromiter(chain.from_iterable(ordered), np.int64, int(lengths.sum()))  # (T,)
        self.end_ids: _Ints = np.unique(np.array(list(end_ids), np.int64))
        _check(ordered, flat, self.end_ids)
        self.tokens, self.first, self.ends = _levels(lengths, flat)
        # Slots in order of their parent's number and their token, as one number each.
        self._span = int(flat.max()) + 1
        parents = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        self._keys = parents * self._span + self.tokens  # (N,), ascending
        for array in (self.tokens, self.first, self.ends, self.end_ids, self._keys):
            array.setflags(write=False)

    @property
    def over(self) -> int:
        """The node of replies that have ended, or are not on the list."""
        return len(self.ends) - 1

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.tokens, self.first, self.ends, self.end_ids, self._keys))

    def after(self, nodes: _Ints, tokens: _Ints) -> _Ints:  # (B,), (B,) -> (B,)
        """The nodes behind one further token each."""
        keys = nodes * self._span + tokens
        slots = self._keys.searchsorted(keys)
        slots[slots == len(self._keys)] = 0
        known = (self._keys[slots] == keys) & (tokens >= 0) & (tokens < self._span)
        return np.where(known, slots + 1, self.over)

    def followers(self, nodes: _Ints) -> tuple[_Ints, _Ints]:  # (B,) -> (M,), (M,)
        """What may follow at several nodes: pairs of an index in `nodes` and a token, stop tokens last."""
        begin = self.first[nodes]
        counts = self.first[nodes + 1] - begin
        stops = np.cumsum(counts)
        slots = np.arange(stops[-1]) + np.repeat(begin - stops + counts, counts)
        ending = np.flatnonzero(self.ends[nodes])
        rows = np.concatenate((np.repeat(np.arange(len(nodes)), counts), np.repeat(ending, len(self.end_ids))))
        return rows, np.concatenate((self.tokens[slots], np.tile(self.end_ids, len(ending))))


def _check(choices: Sequence[tuple[int, ...]], flat: _Ints, end_ids: _Ints) -> None:  # (T,), (E,)
    if not choices:
        raise UsageError("The list of choices is empty.", "Add at least one.")
    if not choices[0]:  # sorted: an empty one comes first
        raise UsageError("A choice has no tokens.", "Leave it out, as a reply has at least one token.")
    if not len(end_ids):
        raise UsageError("A reply from a list of choices needs a stop token.", "Add at least one stop token.")
    least = min(int(end_ids[0]), int(flat.min()))
    if least < 0:
        raise UsageError(f"{least} is not a token id.", "Ids count from 0.")
    if np.isin(flat, end_ids).any():
        stops = set(end_ids.tolist())
        wrong = next(choice for choice in choices if not stops.isdisjoint(choice))
        raise UsageError(
            f"The choice {list(wrong)} has a stop token inside.", "Leave it out, as the reply would end there."
        )


def _levels(lengths: _Ints, flat: _Ints) -> tuple[_Ints, _Ints, NDArray[np.bool_]]:  # (K,), (T,)
    """The trie of different choices in lexicographic order, without a loop over them: the token of each slot (N,), the
    first slot of each node's children and one past them (N + 3,), and where a reply may end (N + 2,)."""
    count = len(lengths)
    starts = np.cumsum(lengths) - lengths
    total = len(flat)
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


class ChoiceLists:
    """The tries of one model; the last is kept, as programs ask for the same one each time. Thread-safe."""

    def __init__(self, tokenizer: TokenizerLike, encoder: LiteralEncoder, vocab_size: int) -> None:
        self._tokenizer, self._encoder, self._vocab_size = tokenizer, encoder, vocab_size
        self._lock = Lock()
        self._last: tuple[object, ChoiceTrie] | None = None

    def trie(self, texts: tuple[str, ...], end_ids: Sequence[int], parse_special: bool) -> ChoiceTrie:
        key = (texts, tuple(end_ids), parse_special)
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = None  # two large ones are not held at a time
                self._last = key, ChoiceTrie([self._encoded(text, parse_special) for text in texts], end_ids)
            return self._last[1]

    def _encoded(self, text: str, parse_special: bool) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False) if parse_special else self._encoder.literal(text)
        if max(ids, default=0) >= self._vocab_size:
            message = f"The choice {text!r} contains a token id outside the model's vocabulary of {self._vocab_size}."
            raise UsageError(message, "Leave it out, or spell it differently.")
        return ids


class Constraint(Protocol):
    """Which tokens may follow, as a stack: drafts are evaluated by pushing them and undone by popping. A token that may
    not follow can be pushed, as drafters propose such: after it, and after an end, only stop ids may follow."""

    def allowed(self) -> NDArray[np.int64] | None:  # (A,)
        """Token ids that may follow now, ascending, at least one; None is all. Not to be written to."""

    def forced(self) -> Sequence[int]:
        """Tokens that must follow, in order, or the likeliest spelling where only their text must; empty where there is
        a choice."""

    def push(self, token: int) -> None:
        """Appends one token to the reply."""

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""

    def places(self) -> ConstraintPlaces:
        """Split into a constraint on several texts that go on from here."""


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
        return ()

    def followers(self, places: Sequence[tuple[int, ...]]) -> tuple[_Ints, _Ints]:  # (B,) -> (M,), (M,)
        ids = [self._allowed(place) for place in places]
        return np.repeat(np.arange(len(ids)), [len(each) for each in ids]), np.concatenate(ids)

    def after(self, places: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> Sequence[tuple[int, ...]]:
        return [(*place, token) for place, token in zip(places, tokens, strict=True)]

    def _allowed(self, place: tuple[int, ...]) -> _Ints:  # (A,)
        for token in place:
            self._constraint.push(token)
        ids = self._constraint.allowed()
        self._constraint.pop(len(place))
        assert ids is not None, "a constraint says what may follow"
        return ids


class ChoiceConstraint:
    """Implements `Constraint`: the reply is one of a list of token sequences, and then a stop token."""

    def __init__(self, trie: ChoiceTrie) -> None:
        self._trie = trie
        # Single items are read several times faster through these.
        self._token_at, self._first_at, self._ends = trie.tokens.data, trie.first.data, trie.ends.data
        self._path = [0]

    def allowed(self) -> NDArray[np.int64]:  # (A,)
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
        node = self._path[-1]
        end = self._first_at[node + 1]
        slot = bisect_left(self._token_at, token, self._first_at[node], end)
        self._path.append(slot + 1 if slot < end and self._token_at[slot] == token else self._trie.over)

    def pop(self, count: int = 1) -> None:
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


# What a caller gives: whether a text may still become a reply, or, where it has ended, is one.
Checker = Callable[[str, bool], bool]
Accepts = Callable[[int], bool]

# Tokens of which the text is checked for one place at most, so that a check that refuses all ends the reply.
_MOST_CHECKS = 4096
# Verdicts that are kept: drafted places are judged again when they are accepted.
_KEPT = 4096
# Tokens that are ranked at first; the first few nearly always suffice.
_RANKED = 64
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCheck:
    """A caller's check of texts; a stack, as constraints are.

    Tokens are drawn until one passes (AWRS, adaptive weighted rejection sampling): they are taken in the order in which
    the keyed noise ranks them, which is drawing without replacement, and the first whose text passes is the very token
    that drawing among all those gives. The set of tokens that may follow is never made.
    """

    def __init__(self, checker: Checker, tokenizer: TokenizerLike, stop_ids: frozenset[int]) -> None:
        self._verdict = lru_cache(_KEPT)(checker)
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._tokens: list[int] = []

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def pop(self, count: int = 1) -> None:
        assert 0 <= count <= len(self._tokens), "popping more tokens than were pushed"
        del self._tokens[len(self._tokens) - count :]

    def accepts(self, token: int) -> bool:
        """Whether the text with one more token passes; a character that is not whole yet is left out of it."""
        text = self._tokenizer.decode([*self._tokens, token]).rstrip(_REPLACEMENT)
        try:
            return bool(self._verdict(text, token in self._stop_ids))
        except Exception as error:
            message = f"The checker failed on a text of {len(text)} characters: {type(error).__name__}: {error}"
            raise UsageError(message, "It is called with the text so far and whether that is all.") from error


def first_accepted(scores: NDArray[np.float64], accepts: Accepts) -> int:  # (S,)
    """The index of the largest score that is accepted."""
    for index in islice(_ranked(scores), _MOST_CHECKS):
        if accepts(index):
            return index
    message = f"The checker refuses each of the {min(len(scores), _MOST_CHECKS)} tokens that the reply may go on with."
    raise UsageError(message, "Let it pass every beginning of a text that may still become right.")


def _ranked(scores: NDArray[np.float64]) -> Iterator[int]:  # (S,)
    """Indices by their scores, the largest first; all are sorted only where more than a few are asked for."""
    few = min(_RANKED, len(scores))
    best = np.argpartition(-scores, few)[:few] if few < len(scores) else np.arange(few)
    yield from best[np.argsort(-scores[best], kind="stable")].tolist()
    if few < len(scores):
        yield from np.argsort(-scores, kind="stable")[few:].tolist()
