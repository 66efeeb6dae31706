"""Closed lists of replies as token tries in compressed sparse rows, asked about many places at once (STATIC)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
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
        end_ids: stop tokens, any of which ends the reply.

    Raises:
        UsageError: there are no choices or no stop tokens, or a choice is empty, has a negative id or a stop token.

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
        """Bytes that it takes."""
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
    """The trie of different choices in lexicographic order, without a loop over them.

    Returns:
        Token of each slot (N,); first slot of each node's children, and one past them (N + 3,); whether a reply may end
        at each node (N + 2,).
    """
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
    """The tries of one model; the last is kept, as programs ask for the same one each time. Safe from any thread.

    Args:
        tokenizer, encoder: of the model.
        vocab_size: tokens that it has logits for.
    """

    def __init__(self, tokenizer: TokenizerLike, encoder: LiteralEncoder, vocab_size: int) -> None:
        self._tokenizer, self._encoder, self._vocab_size = tokenizer, encoder, vocab_size
        self._lock = Lock()
        self._last: tuple[object, ChoiceTrie] | None = None

    def trie(self, texts: tuple[str, ...], end_ids: Sequence[int], parse_special: bool) -> ChoiceTrie:
        """The trie of a list."""
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
