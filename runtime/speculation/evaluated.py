"""What the pass that verifies a draft gave, and the logits of its rows: all of them, or a few at a time where the
backend computes further ones when they are asked for. A row of logits is as large as the vocabulary, and what lies
behind the first guess that is refused is never read."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import HEAD_ROWS
from edgeinfer.runtime.speculation.drafters.contract import Deciding, Verdict


class LogitRows:
    """The logits after the rows of a pass, by number: `rows` are the first ones (R, V). Where those are not all, others
    are brought in their place by `head`, from the states of all rows after the last layer (S, D)."""

    def __init__(
        self,
        rows: Floats,
        hidden: Floats | None = None,
        head: Callable[[Floats], Floats] | None = None,
        leaving: Callable[[int, Floats], None] | None = None,
    ) -> None:
        # Rows in memory, a view until the next pass; the number of the first of them; milliseconds that the head took.
        self.rows, self.first, self.head_ms = rows, 0, 0.0
        self._left = 0 if hidden is None else len(hidden) - len(rows)  # rows that were never computed
        self._hidden, self._head, self._leaving = hidden, head, leaving

    def has(self, row: int) -> bool:
        """Whether a row is in memory."""
        return 0 <= row - self.first < len(self.rows)

    def row(self, row: int) -> Floats:  # (V,)
        """The logits after a row that is in memory."""
        found: Floats = self.rows[row - self.first]
        return found

    @property
    def complete(self) -> bool:
        """Whether as many rows were computed as there are, so that the pass took what one of its size takes."""
        return self._left <= 0

    def bring(self, row: int) -> None:
        """Run the head for a row and those behind it, which overwrites the rows in memory."""
        assert self._head is not None and self._hidden is not None, "all rows of other passes are in memory"
        if self._leaving is not None:
            for place, logits in enumerate(self.rows, self.first):
                self._leaving(place, logits)
        started = time.perf_counter_ns()
        self.rows, self.first = self._head(self._hidden[row : row + HEAD_ROWS]), row
        self.head_ms += (time.perf_counter_ns() - started) / 1e6
        self._left -= len(self.rows)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a verification pass gave; arrays are views until the next pass."""

    fed: Ints  # the root, then the draft's nodes. (S,)
    logits: LogitRows  # after each of them
    hidden: Floats | None  # states after the last layer; None where the backend gives none. (S, D)
    started: int  # when the pass began, in nanoseconds
    resumed: bool  # the pass went on where drafting had left the target
    chain: bool  # its rows follow one another


def decided(deciding: Deciding, logits: LogitRows) -> Verdict:
    """What a rule decides, with the rows that it asks for brought one after the other."""
    try:
        while True:
            row = next(deciding) + 1
            if not logits.has(row):
                logits.bring(row)
    except StopIteration as done:
        verdict: Verdict = done.value
        return verdict
