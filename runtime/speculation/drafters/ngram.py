"""Drafts by tables of n-grams learnt from every text seen, prompts and replies. ADED's adaptive table (algorithms.md
C3) with contexts of one to six tokens in place of its trigrams: the longest one that is known decides. Contexts are
hashed into arrays of fixed size, where those seldom seen give way to new ones. What is kept is token ids and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess, Round, State
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod

# Contexts of up to six tokens: in simulation on stories 2.6 times plain decoding, 2.4 with up to three.
_ORDERS = 6
# 65536 slots keep what 36 thousand tokens of stories taught; half of them cost 3%.
_BITS = 16
# Different successors remembered of a context.
_WAYS = 4
# Contexts that one token may enter, the shortest first: a longer one is entered when it comes again. Without this bound
# contexts that never come again push the others out.
_GROWTH = 3
_MOST = 255
_SPREAD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_TAG = (1 << 32) - 1
_NONE = -1
# Tokens of the conversation that are remembered, so that each is learnt once. What a prompt has beyond them is learnt
# again in every turn.
_REMEMBERED = 1 << 15
_AGAIN = "Delete it; it is learned again."
# Signs: tokens of context, times the successor was seen (1, 2-3, 4-7, more), its share (under 0.4, 0.7, 1; all).
_COUNTS = 4
_SHARES = 4
# Acceptance in a simulation of 230 dialogues with the built-in model, as a logistic model of the three, less the last.
_BY_ORDER = (-1.17, -0.77, -0.14, 0.56, 0.72, 1.11)
_BY_COUNT = (-0.33, -0.37, 0.35, 0.64)
_BY_SHARE = (-0.87, -0.71, 0.22, 1.66)
_CAUTION = 0.5
_PRIORS = tuple(1 / (1 + math.exp(_CAUTION - sum(terms))) for terms in product(_BY_ORDER, _BY_COUNT, _BY_SHARE))


class NgramDrafter(Drafter):
    """Guesses what most often followed the latest tokens, by tables of 2**bits slots of 24 bytes, its own or shared
    ones."""

    name = "ngram"
    priors: Sequence[float] = _PRIORS
    branches = True

    def __init__(self, vocabulary: int, bits: int = _BITS, *, shared: NgramDrafter | None = None) -> None:
        self._vocabulary = vocabulary
        self._bits = bits
        self._shift = 64 - bits
        self._shares = shared is not None
        if shared is not None:
            self._hold(shared._tags, shared._tokens, shared._counts)
        else:
            slots = 1 << bits
            tokens, counts = np.full((slots, _WAYS), _NONE, np.int32), np.zeros((slots, _WAYS), np.uint8)
            self._hold(np.zeros(slots, np.uint32), tokens, counts)
        self._text = np.zeros(_REMEMBERED, np.int32)  # what was learnt last, as far as it is remembered
        self._length = 0
        self._tail: list[int] = []

    def _hold(self, tags: NDArray[np.uint32], tokens: NDArray[np.int32], counts: NDArray[np.uint8]) -> None:
        # A slot is a context: its tag, 0 where empty, and its successors with their counts, most frequent first.
        self._tags = tags  # (slots,)
        self._tokens = tokens  # (slots, ways)
        self._counts = counts  # (slots, ways)
        # Reading one number from a memoryview takes a third of the time that it takes from the array.
        self._tag_at = tags.data
        self._token_at = tokens.reshape(-1).data
        self._count_at = counts.reshape(-1).data

    @staticmethod
    def planned_bytes() -> int:
        """What the tables will take."""
        return (1 << _BITS) * (4 + _WAYS * 5) + NgramDrafter.text_bytes()

    @staticmethod
    def text_bytes() -> int:
        """What the text will take, which each drafter has of its own."""
        return 4 * _REMEMBERED

    def begin(self, tokens: Sequence[int]) -> None:
        new = np.array(tokens, np.int32)
        shared = min(len(new), self._length)
        differing = np.flatnonzero(new[:shared] != self._text[:shared])
        shared = int(differing[0]) if differing.size else shared
        self._tail = new[max(0, shared - _ORDERS) : shared].tolist()
        for token in new[shared:].tolist():
            self._learn(token)
        self._length = min(len(new), _REMEMBERED)
        self._text[: self._length] = new[: self._length]

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """Successors of the longest known context, the most frequent first, then those of shorter ones."""
        known = self._known([*self._tail, *drafted[-_ORDERS:]][-_ORDERS:])
        if not known:
            return []
        if width == 1:
            order, first = known[-1]
            return [Guess(self._token_at[first], self._sign(order, first, 0))]
        found: dict[int, Guess] = {}
        for order, first in reversed(known):
            for way in range(_WAYS):
                token = self._token_at[first + way]
                if token == _NONE or len(found) == width:
                    break
                if token not in found:
                    found[token] = Guess(token, self._sign(order, first, way))
        return list(found.values())

    def observe(self, round: Round) -> None:
        for token in round.committed:
            self._learn(token)
            if self._length < _REMEMBERED:
                self._text[self._length] = token
                self._length += 1

    def for_sequence(self, cache: KVCache) -> NgramDrafter:
        return NgramDrafter(self._vocabulary, self._bits, shared=self)

    def nbytes(self) -> int:
        """Bytes of the tables, where they are its own, and of the text; the same from the beginning."""
        tables = 0 if self._shares else self._tags.nbytes + self._tokens.nbytes + self._counts.nbytes
        return tables + self._text.nbytes

    def state(self) -> State:
        """The tables and the vocabulary's size."""
        vocabulary = np.array([self._vocabulary], np.int64)
        return {"tags": self._tags, "tokens": self._tokens, "counts": self._counts, "vocabulary": vocabulary}

    def restore(self, state: State) -> None:
        if not state:
            return
        vocabulary = state.get("vocabulary", np.zeros(0))
        if vocabulary.tolist() != [self._vocabulary]:
            raise StorageError("The kept n-grams belong to another vocabulary.", _AGAIN)
        tags, tokens, counts = self._alike(state, "tags"), self._alike(state, "tokens"), self._alike(state, "counts")
        # Most slots are empty, so what is in the others is looked at alone, and that nothing is anywhere else.
        used = np.flatnonzero(tags)
        some_tokens, some_counts = tokens[used], counts[used]
        filled = some_counts > 0
        sound = (
            np.array_equal(filled, (some_tokens >= 0) & (some_tokens < self._vocabulary))
            and bool(np.all(some_tokens[~filled] == _NONE))
            and bool(np.all(filled[:, 0]))
            and bool(np.all(some_counts[:, :-1] >= some_counts[:, 1:]))
            and np.count_nonzero(counts) == np.count_nonzero(some_counts)
            and np.count_nonzero(tokens != _NONE) == np.count_nonzero(some_tokens != _NONE)
        )
        if not sound:
            raise StorageError("The kept n-grams are damaged.", _AGAIN)
        for mine, kept in ((self._tags, tags), (self._tokens, tokens), (self._counts, counts)):
            mine[:] = kept

    def close(self) -> None:
        self._length, self._tail = 0, []

    def _alike(self, state: State, name: str) -> NDArray[Any]:
        """An array of a state, if it has the shape and type of this drafter's own."""
        mine, kept = self.state()[name], state.get(name)
        if kept is None or kept.shape != mine.shape or kept.dtype != mine.dtype:
            raise StorageError(f"The kept n-grams have no {name} of {mine.shape} {mine.dtype}.", _AGAIN)
        return kept

    def _known(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """Known contexts that end a tail, the shortest first: tokens less one, and where its successors begin."""
        tags, shift, key, known = self._tag_at, self._shift, 0, []
        for order, previous in enumerate(reversed(tail)):
            key = ((key + previous + 1) * _SPREAD) & _WORD
            slot, tag = key >> shift, key & _TAG | 1
            if tags[slot] == tag:
                known.append((order, slot * _WAYS))
            elif tags[slot ^ 1] == tag:
                known.append((order, (slot ^ 1) * _WAYS))
        return known

    def _learn(self, token: int) -> None:
        """Count a token behind each context that ends the text; it then joins the text."""
        tags, shift, key, entered = self._tag_at, self._shift, 0, 0
        for previous in reversed(self._tail):
            key = ((key + previous + 1) * _SPREAD) & _WORD
            slot, tag = key >> shift, key & _TAG | 1
            if tags[slot] != tag:
                if tags[slot ^ 1] == tag:
                    slot ^= 1
                elif entered == _GROWTH:
                    break
                else:
                    entered += 1
                    self._enter(slot, tag, token)
                    continue
            self._count(slot * _WAYS, token)
        self._tail = [*self._tail[1 - _ORDERS :], token]

    def _enter(self, slot: int, tag: int, token: int) -> None:
        """A new context in one of two slots: an empty one, or that of the context less often seen."""
        tags, counts = self._tag_at, self._count_at
        if tags[slot] and (not tags[slot ^ 1] or counts[slot * _WAYS] > counts[(slot ^ 1) * _WAYS]):
            slot ^= 1
        if tags[slot]:
            # The other one ages, so that no context stays only because it was frequent once.
            other = (slot ^ 1) * _WAYS
            if counts[other] > max(1, counts[other + 1]):
                counts[other] -= 1
            self._tokens[slot] = _NONE
            self._counts[slot] = 0
        tags[slot] = tag
        self._token_at[slot * _WAYS] = token
        counts[slot * _WAYS] = 1

    def _count(self, first: int, token: int) -> None:
        """One more of this successor, before those that are not more frequent; a new one pushes the last one out."""
        tokens, counts = self._token_at, self._count_at
        way = first
        while tokens[way] != token and counts[way] and way < first + _WAYS - 1:
            way += 1
        count = counts[way] + 1 if tokens[way] == token else 1
        while way > first and counts[way - 1] <= count:
            tokens[way], counts[way] = tokens[way - 1], counts[way - 1]
            way -= 1
        tokens[way], counts[way] = token, count
        if count == _MOST:
            for each in range(first, first + _WAYS):
                counts[each] = (counts[each] + 1) >> 1

    def _sign(self, order: int, first: int, way: int) -> int:
        """Groups by the context's length, how often the successor was seen, and its share of the context's."""
        counts = self._count_at[first : first + _WAYS].tolist()
        count, total = counts[way], sum(counts)
        share = 3 if count == total else 2 if 10 * count >= 7 * total else 1 if 10 * count >= 4 * total else 0
        return (order * _COUNTS + min(count.bit_length(), _COUNTS) - 1) * _SHARES + share


METHODS = (
    DrafterMethod(
        name="ngram",
        help="what most often followed the latest tokens in all texts seen",
        make=lambda parts: NgramDrafter(parts.target.geometry.vocab_size),
        in_auto=lambda parts: True,
        prior=Prior(0.15, 0.33, tables=True),
        nbytes=lambda bundle, context: NgramDrafter.planned_bytes(),
        sequence_bytes=lambda context: NgramDrafter.text_bytes(),
        order=20,
    ),
)
