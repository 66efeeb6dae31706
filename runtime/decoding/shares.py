"""How many rows of prompts and of drafts a pass has that several sequences share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from edgeinfer.core.records import dataclass

# Rows of devices' drafts in a pass where the model drafts nothing itself: one device's longest draft.
VERIFIED_ROWS = 64

# Rows of prompts in the first pass with others'; a pass of eight costs little more than one of one.
_FIRST_ROWS = 8
# How many times longer a step may take with prompts than without, where nothing is said.
_USUAL_GAP = 2.0
# By how much one pass may change the rows of prompts in the next.
_SLOWER, _FASTER = 0.5, 1.5
# By how much a new figure counts in the running mean of a step without prompts.
_WEIGHT = 0.2
# Passes with prompts in a row after which one without tells again what a step takes.
_LOOK = 32
# A step of so many times more or fewer rows tells nothing of a step.
_NEAR = 2
# Milliseconds that a request for a round, and a streamed token, take of a processor besides their rows: measured, see
# docs/log, devices that share passes.
_ROUND_MS, _EVENT_MS = 3.7, 0.9
# How much faster drafts must be expected to be than streams, as rounds do not all come at once.
_BATCH_GAIN = 1.3


@dataclass(frozen=True)
class DraftAdvice:
    """What is best for all replies that share passes; `draft_tokens` is 0 where all are better streamed."""

    stream_ms: float
    draft_tokens: int


class PromptShare:
    """How many rows of prompts a pass with others' rows has, so that these come no later than they may. A step with
    such a pass may take `inter_token_latency` milliseconds; None is twice those of one without prompts. One row of a
    prompt comes with a pass in any case."""

    def __init__(self, most: int, inter_token_latency: float | None = None) -> None:
        # Of prompts in a pass with others'; see `prompt_rows`.
        self.rows = most if inter_token_latency == math.inf else min(_FIRST_ROWS, most)
        self._wanted_ms = inter_token_latency
        self._most = most
        self._plain_ms: dict[int, float] = {}  # by rows
        self._since = 0  # passes with prompts since the last without

    def prompt_rows(self, rows: int) -> int:
        """Rows of prompts in the next pass with this many rows of sequences that are being decoded. While prompts wait,
        no pass would show what a step takes without them. So where that is unknown, and again every `_LOOK` passes, one
        goes without."""
        if self._wanted_ms is not None:
            return self.rows
        near = any(max(known, rows) <= _NEAR * min(known, rows) for known in self._plain_ms)
        return self.rows if near and self._since < _LOOK else 0

    def observe(self, rows: int, prompt_rows: int, ms: float) -> None:
        """Learn from the milliseconds of a step whose pass had these rows of decoded sequences and of prompts."""
        self._since = self._since + 1 if prompt_rows else 0
        if not prompt_rows:
            known = self._plain_ms.get(rows, ms)
            self._plain_ms[rows] = known + _WEIGHT * (ms - known)
        elif prompt_rows >= self.rows and (wanted_ms := self._wanted(rows)) is not None:
            change = min(max(wanted_ms / ms, _SLOWER), _FASTER)
            least = self.rows + 1 if change > 1 else 1
            self.rows = min(max(int(self.rows * change), least), self._most)

    def _wanted(self, rows: int) -> float | None:
        """Milliseconds that a step with prompts may take; None before anything was measured."""
        if self._wanted_ms is not None or not self._plain_ms:
            return self._wanted_ms
        return _USUAL_GAP * self._plain_ms[min(self._plain_ms, key=lambda known: (abs(known - rows), known))]


def draft_rows(gains: Sequence[Sequence[float]], pass_ms: Callable[[int], float], most: int) -> list[int]:
    """How many rows of each draft, its root included, give a pass the most expected tokens per millisecond.

    Roots come in any case. Of what may follow, the row of the highest gain is next, whose draft it is of; where the
    tokens per millisecond are most, rows end (goodput, Liu et al. 2024, "Optimizing Speculative Decoding for Serving
    Large Language Models Using Goodput"). What drafts cost to make is spent by then.

    `gains` are the expected tokens of each row, by drafts; a draft that must be whole, or is none, has its root alone.
    """
    rows = [1] * len(gains)
    chosen = list(rows)
    total, tokens = len(gains), sum(draft[0] for draft in gains)
    best = tokens / pass_ms(total)
    waiting = [(-draft[1], place) for place, draft in enumerate(gains) if len(draft) > 1]
    heapq.heapify(waiting)
    while waiting and total - len(gains) < most:
        gain, place = heapq.heappop(waiting)
        rows[place] += 1
        total += 1
        tokens -= gain
        if (worth := tokens / pass_ms(total)) > best:
            best, chosen = worth, list(rows)
        if rows[place] < len(gains[place]):
            heapq.heappush(waiting, (-gains[place][rows[place]], place))
    return chosen


def draft_advice(replies: int, acceptance: float, pass_ms: Callable[[int], float], most: int) -> DraftAdvice:
    """Whether replies that are drafted elsewhere are better streamed, by what a token costs where all do alike.
    `draft_rows` looks at drafts that were sent, so what it takes to ask for a round is spent there; here it counts. A
    device that asked this of itself alone would always draft: all of what its rows gain is its own, and others wait."""
    stream_ms = pass_ms(replies) + replies * _EVENT_MS
    best, chosen, tokens = _BATCH_GAIN / stream_ms, 0, 1.0
    for drafted in range(1, most // replies + 1):
        tokens += acceptance**drafted
        worth = tokens / (pass_ms(replies * (1 + drafted)) + replies * _ROUND_MS)
        if worth > best:
            best, chosen = worth, drafted
    return DraftAdvice(stream_ms, chosen)
