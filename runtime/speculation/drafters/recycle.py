"""Drafts by what the target found best whenever a token was fed (Token Recycling).

A matrix holds eight candidates for every token (arXiv 2408.08696). Every pass over a token overwrites its row with the
eight tokens of its largest logits; where a token is fed several times, its last row counts. Beyond the paper, a prompt
puts what follows each of its tokens in front, and the number of times in a row that the first candidate came tells how
far to trust it. Where drafts do not branch no one reads further candidates, so the token of the largest logit is put in
front and the other seven are not looked for. What is kept is token ids and counts.

A text has far fewer different tokens than a large vocabulary, so the matrix has rows for those that were met; where it
is full, the oldest row is given to the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess, Round, State
from edgeinfer.runtime.speculation.drafters.logit_drafter import best_tokens
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod

_BEST = 8
_NONE = -1
# Tokens that have rows at most: rows for all of a vocabulary of 152 thousand would take 5 MB.
_ROOM = 8192
_MOST = 255
_AGAIN = "Delete it; it is learned again."
# Signs: bits of the number of times in a row that the first candidate came (0, 1, 2-3, ...), then further ranks. Their
# acceptance is that of a simulation of 230 dialogues with the built-in model, rounded down.
_PRIORS = (0.2, 0.4, 0.65, 0.85, 0.9, 0.95, 0.97, 0.98, 0.98, 0.1, 0.05, 0.03, 0.03, 0.02, 0.02, 0.01)
_RANKED = _MOST.bit_length()


# The row of tokens that have none: it never has candidates.
_NOWHERE = 0


@dataclass(frozen=True)
class _Rows:
    """Candidates of the tokens that were met."""

    of: NDArray[np.uint16]  # the row of each token. (V,)
    best: NDArray[np.int32]  # best first; _NONE behind the last that is known. (R, 8)
    came: NDArray[np.uint8]  # how often in a row the first candidate came. (R,)
    token: NDArray[np.int32]  # whose row it is; of the first, which is no token's, the row that is taken next. (R,)

    @classmethod
    def empty(cls, vocabulary: int) -> _Rows:
        """A matrix of no token."""
        size = 1 + min(vocabulary, _ROOM)
        token = np.full(size, _NONE, np.int32)
        token[_NOWHERE] = 1
        of, came = np.zeros(vocabulary, np.uint16), np.zeros(size, np.uint8)
        return cls(of, np.full((size, _BEST), _NONE, np.int32), came, token)

    @classmethod
    def of_tokens(
        cls, vocabulary: int, tokens: NDArray[np.int32], best: NDArray[np.int32], came: NDArray[np.uint8]
    ) -> _Rows:
        """A matrix of these tokens, no more than there is room for."""
        rows, end = cls.empty(vocabulary), 1 + len(tokens)
        rows.of[tokens] = np.arange(1, end)
        rows.best[1:end], rows.came[1:end], rows.token[1:end] = best, came, tokens
        rows.token[_NOWHERE] = end if end < len(rows.token) else 1
        return rows

    @property
    def nbytes(self) -> int:
        return self.of.nbytes + self.best.nbytes + self.came.nbytes + self.token.nbytes

    def take(self, token: int) -> int:
        """The row of a token, which may have been that of another."""
        if row := int(self.of[token]):
            return row
        row = int(self.token[_NOWHERE])
        if (before := int(self.token[row])) != _NONE:
            self.of[before] = _NOWHERE
            self.best[row], self.came[row] = _NONE, 0
        self.of[token], self.token[row] = row, token
        self.token[_NOWHERE] = row % (len(self.token) - 1) + 1
        return row


class RecycleDrafter(Drafter):
    """Guesses what came out best when a token was fed before; may share another's matrix."""

    name = "recycle"
    priors: Sequence[float] = _PRIORS
    branches = True

    def __init__(self, vocabulary: int, *, shared: RecycleDrafter | None = None) -> None:
        self._vocabulary = vocabulary
        self._shares = shared is not None
        self._hold(_Rows.empty(vocabulary) if shared is None else shared._rows)
        self._last = _NONE

    def _hold(self, rows: _Rows) -> None:
        self._rows = rows
        # Reading one number from a memoryview takes a third of the time that it takes from the array.
        self._row_at, self._best_at, self._came_at = rows.of.data, rows.best.reshape(-1).data, rows.came.data

    @staticmethod
    def planned_bytes(vocabulary: int) -> int:
        """What the matrix will take."""
        return 2 * vocabulary + (1 + min(vocabulary, _ROOM)) * (4 * _BEST + 1 + 4)

    def begin(self, tokens: Sequence[int]) -> None:
        """Move what follows each token of a prompt to the front; the last occurrence counts."""
        for token, follower in dict(pairwise(tokens)).items():
            self._move_first(token, follower)
        self._last = tokens[-1] if len(tokens) else _NONE

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        last = drafted[-1] if drafted else self._last
        row = _NOWHERE if last == _NONE else self._row_at[last]
        start = row * _BEST
        if self._best_at[start] == _NONE:
            return []
        came = self._came_at[row].bit_length()
        if width == 1:
            return [Guess(self._best_at[start], came)]
        best = self._best_at[start : start + min(width, _BEST)].tolist()
        return [Guess(token, _RANKED + rank if rank else came) for rank, token in enumerate(best) if token != _NONE]

    def observe(self, round: Round) -> None:
        """Learn the best tokens behind every one that was fed, also those that were rejected."""
        last = self._last
        for token in round.committed:
            if last != _NONE:
                row = self._row_at[last]
                again = self._best_at[row * _BEST] == token
                self._came_at[row] = min(self._came_at[row] + 1, _MOST) if again else 0
            last = token
        self._last = last
        if round.first_row:
            # What led to the rows that are in memory is what the target said.
            for fed, said in pairwise((int(round.fed[0]), *round.committed)):
                self._move_first(fed, said)
        known = round.fed[round.first_row : round.first_row + len(round.logits)].tolist()
        for fed, place in {token: place for place, token in enumerate(known)}.items():
            if not round.branches:
                self._move_first(fed, int(round.logits[place].argmax()))
                continue
            found, row = best_tokens(round.logits[place], _BEST), self._rows.take(fed)
            if self._rows.best[row, 0] != found[0]:
                self._rows.came[row] = 0
            self._rows.best[row, : len(found)] = found

    def for_sequence(self, cache: KVCache) -> RecycleDrafter:
        return RecycleDrafter(self._vocabulary, shared=self)

    def nbytes(self) -> int:
        """Bytes of the matrix and the counts, where they are its own; the same from the beginning."""
        return 0 if self._shares else self._rows.nbytes

    def state(self) -> State:
        """The tokens that have rows, these, and the vocabulary's size."""
        tokens = np.flatnonzero(self._rows.of).astype(np.int32)
        rows, vocabulary = self._rows.of[tokens], np.array([self._vocabulary], np.int64)
        return {"rows": tokens, "best": self._rows.best[rows], "came": self._rows.came[rows], "vocabulary": vocabulary}

    def restore(self, state: State) -> None:
        if not state:
            return
        vocabulary = state.get("vocabulary", np.zeros(0))
        if vocabulary.tolist() != [self._vocabulary]:
            raise StorageError("The kept candidates belong to another vocabulary.", _AGAIN)
        rows, best, came = (state.get(name, np.zeros(0)) for name in ("rows", "best", "came"))
        typed = rows.dtype == best.dtype == np.int32 and came.dtype == np.uint8
        count = len(rows) if rows.ndim == 1 else -1
        if not typed or best.shape != (count, _BEST) or came.shape != (count,) or not self._sound(rows, best):
            raise StorageError("The kept candidates are damaged.", _AGAIN)
        # Of more than there is room for, those that came true most often.
        kept = np.sort(np.argsort(-came.astype(np.int64), kind="stable")[:_ROOM])
        self._hold(_Rows.of_tokens(self._vocabulary, rows[kept], best[kept], came[kept]))

    def _sound(self, rows: NDArray[np.int32], best: NDArray[np.int32]) -> bool:  # (N,), (N, 8)
        """Whether rows ascend, and hold different tokens and nothing behind the last of them."""
        known = best != _NONE
        ordered = np.sort(best, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _NONE)
        inside = (best >= _NONE) & (best < self._vocabulary)
        ascending = bool(np.all(np.diff(rows, prepend=_NONE) > 0)) and bool(np.all(rows < self._vocabulary))
        return ascending and bool(np.all(inside)) and not twice.any() and bool(np.all(known[:, :-1] >= known[:, 1:]))

    def close(self) -> None:
        self._last = _NONE

    def _move_first(self, token: int, follower: int) -> None:
        """Move a candidate of a token to the front; a new one pushes the last one out."""
        row = self._row_at[token] or self._rows.take(token)
        best, start = self._best_at, row * _BEST
        if best[start] == follower:
            return
        end = start + 1
        while end < start + _BEST - 1 and best[end] != follower:
            end += 1
        best[start + 1 : end + 1] = best[start:end]
        best[start] = follower
        self._came_at[row] = 0


METHODS = (
    DrafterMethod(
        name="recycle",
        help="what the model found likeliest when a token was fed before",
        make=lambda parts: RecycleDrafter(parts.target.geometry.vocab_size),
        in_auto=lambda parts: True,
        prior=Prior(0.3, 0.38, tables=True),
        nbytes=lambda bundle, context: RecycleDrafter.planned_bytes(bundle.manifest.geometry.vocab_size),
        order=30,
    ),
)
