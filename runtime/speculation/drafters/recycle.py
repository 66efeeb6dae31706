"""Drafts by what the model itself thought after the last token before; knows nothing of models or costs.

Token Recycling's candidate matrix (algorithms.md C1): for each token the eight likeliest successors of its latest row.
Rows of rejected drafts count too. While chains are drafted only the likeliest is taken from a row, to the front of what
is there: ranking a row's other tokens costs more than all else here, and only trees use them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError
from edgeinfer.runtime.contracts import Floats
from edgeinfer.runtime.speculation.contracts import Context, Guess, Resumption, Round, State

__all__ = ["RecycleDrafter"]

# Candidates of a token, as in the released code.
_WIDTH = 8
# Times in a row that a token's first candidate was confirmed, counted up to here.
_MOST_CONFIRMED = 3
_CONFIRMATIONS = _MOST_CONFIRMED + 1
# First candidates by confirmations, then the others by rank.
_FIRST_PRIORS = (0.2, 0.4, 0.55, 0.7)
_OTHER_PRIORS = (0.12, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
# Columns whose maxima are compared first when a row is ranked.
_BLOCK = 128


class RecycleDrafter:
    """Implements `contracts.Drafter`.

    Args:
        vocabulary: V.
    """

    name = "recycle"
    uses_target = False
    branches = True
    draws = False
    priors: Sequence[float] = _FIRST_PRIORS + _OTHER_PRIORS

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._text: list[int] = []
        self._ranks = False
        self._adopt(np.full((vocabulary, _WIDTH), -1, np.int32), np.zeros(vocabulary, np.uint8))

    @staticmethod
    def planned_bytes(vocabulary: int) -> int:
        """Bytes of the matrix."""
        return vocabulary * (4 * _WIDTH + 1)

    def _adopt(self, candidates: NDArray[np.int32], confirmed: NDArray[np.uint8]) -> None:  # (V, 8), (V,)
        self._candidates, self._confirmed = candidates, confirmed

    def begin(self, tokens: Sequence[int]) -> None:
        """Takes in the successors that a prompt shows, as far as it is new."""
        shared, most = 0, min(len(tokens), len(self._text))
        while shared < most and self._text[shared] == tokens[shared]:
            shared += 1
        for place in range(max(shared, 1), len(tokens)):
            self._put_first(tokens[place - 1], tokens[place])
        self._text = list(tokens)
        self._ranks = False

    def observe(self, round: Round) -> None:
        """Takes in what the model thought after every row of a pass."""
        self._text += round.committed
        fed = round.fed.tolist()
        if self._ranks:
            for token, row in zip(fed, round.logits, strict=True):
                self._candidates[token] = _largest(row)
            return
        for token, best in zip(fed, round.logits.argmax(axis=1).tolist(), strict=True):
            self._put_first(token, best)

    def _put_first(self, token: int, best: int) -> None:
        row = self._candidates[token]
        if row[0] == best:
            if self._confirmed[token] < _MOST_CONFIRMED:
                self._confirmed[token] += 1
            return
        known = row.tolist()
        known = [best, *(other for other in known if other != best)][:_WIDTH]
        row[:] = known
        self._confirmed[token] = 0

    def guesses(self, context: Context, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The candidates after the last token, the likeliest first."""
        last = drafted[-1] if drafted else context.tokens[-1]
        if width == 1:
            first = int(self._candidates[last, 0])
            return (Guess(first, int(self._confirmed[last])),) if first >= 0 else ()
        self._ranks = True
        found = [token for token in self._candidates[last, :width].tolist() if token >= 0]
        signs = (int(self._confirmed[last]), *range(_CONFIRMATIONS, _CONFIRMATIONS + _WIDTH - 1))
        return [Guess(token, sign) for token, sign in zip(found, signs, strict=False)]

    def resume(self, context: Context, drafted: Sequence[int]) -> Resumption | None:
        """Nothing: it does not use the target."""
        return None

    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self._candidates.nbytes + self._confirmed.nbytes

    def state(self) -> State:
        """The rows that were ever filled."""
        rows = np.flatnonzero(self._candidates[:, 0] >= 0).astype(np.int32)
        return {"rows": rows, "candidates": self._candidates[rows], "confirmed": self._confirmed[rows]}

    def restore(self, state: State) -> None:
        """Takes kept rows back; without any, forgets all."""
        candidates, confirmed = np.full((self._vocabulary, _WIDTH), -1, np.int32), np.zeros(self._vocabulary, np.uint8)
        if state:
            rows, kept, times = (state.get(name, np.zeros(0)) for name in ("rows", "candidates", "confirmed"))
            types = rows.dtype == np.int32 and kept.dtype == np.int32 and times.dtype == np.uint8
            shapes = rows.ndim == 1 and kept.shape == (len(rows), _WIDTH) and times.shape == rows.shape
            ids = (
                types
                and shapes
                and all(a.size == 0 or -1 <= a.min() <= a.max() < self._vocabulary for a in (rows, kept))
            )
            if not ids or (rows.size and (rows.min() < 0 or times.max() > _MOST_CONFIRMED)):
                hint = "Delete them; they are learnt anew."
                raise StorageError("The kept candidates are damaged or of another model.", hint)
            candidates[rows], confirmed[rows] = kept, times
        self._adopt(candidates, confirmed)

    def close(self) -> None:
        """Forgets the text."""
        self._text.clear()


def _largest(row: Floats) -> NDArray[np.int32]:  # (V,) -> (8,)
    """Ids of a row's largest logits, the largest first; -1 beyond the vocabulary."""
    whole = len(row) // _BLOCK * _BLOCK
    ids = np.arange(len(row))
    if whole > _BLOCK * 4 * _WIDTH:
        # The largest eight lie in the eight blocks of largest maxima, or behind the last whole block.
        blocks = np.argpartition(row[:whole].reshape(-1, _BLOCK).max(axis=1), -_WIDTH)[-_WIDTH:]
        within = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        ids = np.concatenate([within, np.arange(whole, len(row))])
    values = row[ids]
    count = min(_WIDTH, len(ids))
    some = np.argpartition(values, len(ids) - count)[len(ids) - count :]
    best = ids[some[np.argsort(-values[some], kind="stable")]]
    filled = np.full(_WIDTH, -1, np.int32)
    filled[:count] = best
    return filled
