"""Drafts by what followed the last few tokens in all texts so far; knows nothing of models or costs.

ADED's adaptive table (algorithms.md C3) with counts instead of scores and contexts of one to five tokens: the guess is
the successor of largest share among all contexts that match, a share of few observations counting for less. The table
has a fixed size; a context that comes again and again outlives one that came once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError
from edgeinfer.runtime.speculation.contracts import Context, Guess, Resumption, Round, State

__all__ = ["NgramDrafter"]

# Tokens of context; longer ones found nothing more in simulation (docs/LOG.md).
_ORDERS = (1, 2, 3, 4, 5)
_LONGEST = _ORDERS[-1]
# What a share's denominator is raised by: short contexts need more evidence before they are believed.
_DOUBT = (3.0, 2.0, 1.2, 0.8, 0.6)
# Contexts, a power of two, and successors kept of each: 2.2 MB.
_CONTEXTS, _WAYS = 1 << 16, 4
_MOST_COUNT = 255
_MULTIPLIER, _MASK = 0x9E3779B1, 0xFFFFFFFF
# Edges of the buckets of counts and believed shares that make a sign, beside the length of the context.
_COUNTS = (2, 3, 6)
_SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
_COUNT_BUCKETS, _SHARE_BUCKETS = len(_COUNTS) + 1, len(_SHARES) + 1
# Middle of each bucket of shares, a little lower: what is believed of a table was learnt from other texts.
_SHARE_PRIORS = (0.08, 0.22, 0.36, 0.5, 0.62, 0.75)


class NgramDrafter:
    """Implements `contracts.Drafter`.

    Args:
        vocabulary: V; tokens beyond it are refused when kept tables are taken back.
    """

    name = "ngram"
    uses_target = False
    branches = True
    draws = False
    priors: Sequence[float] = _SHARE_PRIORS * (_COUNT_BUCKETS * len(_ORDERS))

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._text: list[int] = []
        self._adopt(
            np.zeros(_CONTEXTS, np.uint32),
            np.full(_CONTEXTS * _WAYS, -1, np.int32),
            np.zeros(_CONTEXTS * _WAYS, np.uint8),
        )

    @staticmethod
    def planned_bytes() -> int:
        """Bytes of the table."""
        return _CONTEXTS * (4 + 5 * _WAYS)

    def _adopt(self, tags: NDArray[np.uint32], tokens: NDArray[np.int32], counts: NDArray[np.uint8]) -> None:
        self._arrays: dict[str, NDArray[Any]] = {"tags": tags, "tokens": tokens, "counts": counts}
        # Single elements are read and written faster through a memoryview than through an array.
        self._tags, self._tokens, self._counts = (memoryview(a) for a in (tags, tokens, counts))  # type: ignore[arg-type]

    def begin(self, tokens: Sequence[int]) -> None:
        """Learns what is new of a prompt."""
        shared, most = 0, min(len(tokens), len(self._text))
        while shared < most and self._text[shared] == tokens[shared]:
            shared += 1
        del self._text[shared:]
        for token in tokens[shared:]:
            self._learn(token)

    def observe(self, round: Round) -> None:
        """Learns the committed tokens."""
        for token in round.committed:
            self._learn(token)

    def guesses(self, context: Context, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """Successors in the order of their believed share, over all lengths of context."""
        best: dict[int, tuple[float, int]] = {}  # token -> believed share, sign
        for order, slot in enumerate(self._slots([*self._text[-_LONGEST:], *drafted][-_LONGEST:])):
            if slot < 0:
                continue
            counts = self._counts[slot : slot + _WAYS].tolist()
            total = sum(counts) + _DOUBT[order]
            for way, count in enumerate(counts):
                if not count:
                    continue
                share, token = count / total, self._tokens[slot + way]
                if share > best.get(token, (0.0, 0))[0]:
                    bucket = order * _COUNT_BUCKETS + bisect_right(_COUNTS, count)
                    best[token] = share, bucket * _SHARE_BUCKETS + bisect_right(_SHARES, share)
        if width == 1:
            if not best:
                return ()
            token = max(best, key=lambda t: best[t][0])
            return (Guess(token, best[token][1]),)
        ranked = sorted(best, key=lambda t: -best[t][0])[:width]
        return [Guess(token, best[token][1]) for token in ranked]

    def _slots(self, last: Sequence[int]) -> list[int]:
        """Where the successors of each length of context lie, -1 where it is not known."""
        slots, key = [], 0
        for token in reversed(last):
            key = ((key ^ (token + 1)) * _MULTIPLIER + 1) & _MASK
            place = key >> 16 & _CONTEXTS - 1
            slots.append(place * _WAYS if self._tags[place] == key else -1)
        return slots

    def _learn(self, token: int) -> None:
        tags, tokens, counts = self._tags, self._tokens, self._counts
        key = 0
        for before in reversed(self._text[-_LONGEST:]):
            key = ((key ^ (before + 1)) * _MULTIPLIER + 1) & _MASK
            place = key >> 16 & _CONTEXTS - 1
            slot = place * _WAYS
            if tags[place] != key:
                if counts[slot] > 1:
                    # The settled context ages instead; whoever comes more often has the place in the end.
                    for way in range(slot, slot + _WAYS):
                        counts[way] >>= 1
                    continue
                tags[place] = key
                for way in range(slot, slot + _WAYS):
                    tokens[way], counts[way] = -1, 0
            self._count(slot, token)
        self._text.append(token)

    def _count(self, slot: int, token: int) -> None:
        """One more of a successor; a new one takes the place of the rarest."""
        tokens, counts = self._tokens, self._counts
        rarest = slot
        for way in range(slot, slot + _WAYS):
            if tokens[way] == token:
                if counts[way] == _MOST_COUNT:
                    for other in range(slot, slot + _WAYS):
                        counts[other] >>= 1
                counts[way] += 1
                return
            if counts[way] < counts[rarest]:
                rarest = way
        tokens[rarest], counts[rarest] = token, 1

    def resume(self, context: Context, drafted: Sequence[int]) -> Resumption | None:
        """Nothing: it does not use the target."""
        return None

    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum(array.nbytes for array in self._arrays.values())

    def state(self) -> State:
        """The table."""
        return self._arrays

    def restore(self, state: State) -> None:
        """Takes a kept table back; without one, forgets all."""
        fresh = NgramDrafter(self._vocabulary)._arrays
        arrays: dict[str, NDArray[Any]] = {name: state.get(name, array) for name, array in fresh.items()}
        same = all(arrays[n].shape == a.shape and arrays[n].dtype == a.dtype for n, a in fresh.items())
        if not same or int(arrays["tokens"].max()) >= self._vocabulary or int(arrays["tokens"].min()) < -1:
            raise StorageError(
                "The kept n-grams are damaged or of another model.", "Delete them; they are learnt anew."
            )
        arrays["counts"][arrays["tokens"] < 0] = 0
        self._adopt(arrays["tags"], arrays["tokens"], arrays["counts"])

    def close(self) -> None:
        """Forgets the text."""
        self._text.clear()
