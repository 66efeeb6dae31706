"""Controls drafts for a verifier elsewhere: draft or stream, and how many tokens, by what both take as measured.

It reads no clock, so tests run it in simulated time (`tests/runtime/remote/simulated.py`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from statistics import median

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.decoding.shares import DraftAdvice

# Samples kept of each kind; the least of them says what it takes, as other work makes the rest longer.
_KEPT = 8
# Share of drafted tokens assumed to be accepted before any was seen, and how many tokens that assumption weighs.
_PRIOR, _PRIOR_TOKENS = 0.7, 8.0
# By how much each further row is assumed to lengthen a pass before several sizes were seen, and at best.
_ROW, _BEST_ROW = 0.1, 0.05
# Passes of one size after which the least of them is believed; one may have met with other work.
_BELIEVED = 3
# Tokens of the first draft, before anything is known of the way.
_FIRST = 4
# Tokens that count in the share accepted; older ones count less.
_MEMORY = 64.0
# Rounds whose pace is judged: so many tell for sure, and fewer where they are slower by a lot.
_JUDGED, _SOON, _BADLY = 8, 4, 1.3
# How much faster rounds must be expected to be than the stream they end, and than one where costs are only assumed.
_GAIN, _HOPED_GAIN = 1.06, 1.15
# Share of the time that may be lost by trying what turns out slower.
_RISK = 0.012
# The last rounds, which tell whether the link has changed.
_LATE = 3
# How much of the share accepted is counted on where it is asked what may be lost.
_DOUBT = 0.8
# What may be lost before anything was earned: the time of so many streamed tokens.
_ALLOWED = 16
# Tokens of a stream that are timed together, and of a stream that is only tried.
_WINDOW, TRIED = 8, 16
# Tokens after which a stream's pace is measured again, if rounds are not faster than it by this factor.
_STALE, _CLEARLY = 400, 1.5
# Of a stream's tokens all of the first so many are compared with drafts, then those of one window in four.
_COMPARED = 32
# Bytes of a round's request and answer, of each drafted token, and of a streamed token, by HTTP/1.1 and JSON.
_ROUND_BYTES, _DRAFT_BYTES, _EVENT_BYTES = 800, 6, 40


@dataclass(frozen=True)
class Prices:
    """What a device's energy is worth, in milliseconds of waiting: of a drafted token, and of a kilobyte either way."""

    draft: float = 0.0
    kilobyte: float = 0.0

    def of(self, drafted: float, size: float) -> float:
        """The price of drafted tokens and bytes."""
        return self.draft * drafted + self.kilobyte * size / 1e3


class Channel:
    """What was measured of a way to a verifier and of the drafter, and what follows from it.

    A round with g drafted tokens takes g drafts, the way there and back, and a pass of 1 + g rows. The verifier then
    decides (1 - a^(1+g)) / (1 - a) tokens, where it accepts a share a of what is drafted. Where it accepts all, drafts
    made during the round are the next round's (PEARL, Liu et al. 2025), and cost nothing.

    A stream goes on until rounds are expected to be faster, and rounds go on until they were slower. What is tried and
    turns out slower is paid from an account, into which a small share of the time goes.
    """

    def __init__(self, most: int, prices: Prices | None = None) -> None:
        self._most, self._prices = most, prices or Prices()
        self._room = most  # tokens of a draft that the server looks at
        self._advised_ms: float | None = None  # of a streamed token, as the server says
        self._agreed, self._seen = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS
        self._draft_ms, self._link_ms, self._stream_ms = (deque[float](maxlen=_KEPT) for _ in range(3))
        self._pass_ms: dict[int, deque[float]] = {}  # of the server, by rows
        # Tokens and costs of rounds since the last stream, and how much longer than expected rounds took.
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_JUDGED)
        self._excess: deque[float] = deque(maxlen=_KEPT)
        self._late: deque[float] = deque(maxlen=_LATE)  # the last of them, as they were
        self._streams = self._trying = False
        self._spare: float | None = None  # milliseconds that may be lost; None before rounds and passes are known
        self._window = self._unmeasured = self._run = 0  # tokens
        self._window_ms = 0.0
        # What follows from the figures, until one of them changes: a round asks for it several times.
        self._passes_known: dict[float, list[float]] = {}
        self._rounds_known: dict[tuple[float, bool], list[float]] = {}
        self.links: list[float] = []
        self.passes: list[float] = []

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that is accepted."""
        return min(self._agreed / self._seen, 0.995)

    @property
    def link_ms(self) -> float:
        """Median milliseconds of a round on the way; 0 before the first."""
        return median(self.links) if self.links else 0.0

    @property
    def server_ms(self) -> float:
        """Median milliseconds of a round in the server; 0 before the first."""
        return median(self.passes) if self.passes else 0.0

    @property
    def compares(self) -> bool:
        """Whether the next token of the stream shall be drafted too, to see how many would be accepted."""
        return self._room > 0 and (self._run < _COMPARED or self._run // _WINDOW % 4 == 0)

    def drafted(self, ms: float) -> None:
        """Record the milliseconds of a drafted token."""
        self._draft_ms.append(ms)
        self._rounds_known.clear()

    def joins(self, advice: DraftAdvice | None) -> None:
        """Take a server's advice for replies that share passes; None if no others do."""
        self._room = self._most if advice is None else min(advice.draft_tokens, self._most)
        if advice is None or not self._streams:
            self._advised_ms = None if advice is None else advice.stream_ms

    def verified(self, verified: int, server_ms: float, total_ms: float) -> None:
        """Record a round, of whose draft the server verified some tokens."""
        self.links.append(max(0.0, total_ms - server_ms))
        self.passes.append(server_ms)
        self._link_ms.append(self.links[-1])
        self._pass_ms.setdefault(1 + verified, deque(maxlen=_KEPT)).append(server_ms)
        self._passes_known.clear()
        self._rounds_known.clear()

    def went(self, drafted: int, tokens: int, ms: float) -> None:
        """Record a round: drafted tokens that were verified, tokens it brought, and its milliseconds with drafts."""
        cost = ms + self._prices.of(drafted, _ROUND_BYTES + _DRAFT_BYTES * drafted)
        self._rounds.append((tokens, cost))
        self._late.append(cost / max(self._round_costs(_ROW)[min(drafted, self._most)], 0.1))
        self._excess.append(self._late[-1])
        self._unmeasured += tokens
        if self._spare is not None:
            most = 2 * self._risk(drafted)
            self._spare = min(self._spare + tokens * self._stream_cost(_ROW) - cost, max(most, self._spare))

    def judged(self, agreed: int, seen: int) -> None:
        """Record how many of the tokens compared with the verifier's agreed."""
        left = max(0.0, 1 - seen / _MEMORY)
        self._agreed, self._seen = left * self._agreed + agreed, left * self._seen + seen
        self._rounds_known.clear()
        if self._seen <= 0:
            self._agreed, self._seen = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS

    def streamed(self, tokens: int, ms: float) -> None:
        """Record streamed tokens and the milliseconds since those before."""
        self._window, self._window_ms, self._run = self._window + tokens, self._window_ms + ms, self._run + tokens
        if self._window < _WINDOW:
            return
        self._stream_ms.append(self._window_ms / self._window)
        self._passes_known.clear()
        self._rounds_known.clear()
        if self._spare is not None:
            self._spare = min(self._spare + _RISK * self._window_ms, max(4 * self._risk(self._most), self._spare))
        # What was slow once is less and less a reason not to try again.
        self._excess = deque((1 + 0.9 * (excess - 1) for excess in self._excess), maxlen=_KEPT)
        self._window, self._window_ms, self._unmeasured = 0, 0.0, 0
        self._advised_ms = None  # as this was measured

    def length(self) -> int | None:
        """Length of the next draft; None if streaming is faster."""
        if not (self._link_ms and self._draft_ms):
            return min(_FIRST, self._most)
        if self._spare is None:
            self._spare = _ALLOWED * self._stream_cost(_ROW)
        if self._streams:
            length = self._entering()
        else:
            best, gain = self._best(_ROW)
            lost = self._disappoints and not self._is_sure
            self._trying = gain >= 1 and not lost and self._tries_stream(gain)
            length = None if gain < 1 or lost or self._trying else best
        if length is None and not self._streams:
            self._start_stream()
        return length

    def leaves(self) -> bool:
        """Whether to end the stream, as rounds are expected to be faster."""
        return self._window == 0 and not self._trying and self._entering(peeking=True) is not None

    def tokens_of_stream(self) -> int | None:
        """Tokens to ask for; None for the rest of the reply."""
        return TRIED if self._trying else None

    def ahead(self) -> int:
        """Tokens that are worth drafting while a round is under way."""
        if not (self._link_ms and self._draft_ms):
            return self._most
        draft = max(median(self._draft_ms), 1e-3)
        length, _ = self._best(_ROW)
        # Of use where all of the draft is accepted, and the token behind it was predicted.
        if self._prices.draft > self.acceptance ** (length + 1) * draft:
            return 0
        return min(length, int((min(self._link_ms) + self._server_ms(_ROW)[0]) / draft))

    def _start_stream(self) -> None:
        self._streams = True
        self._rounds.clear()
        self._window, self._window_ms, self._run = 0, 0.0, 0

    def _entering(self, *, peeking: bool = False) -> int | None:
        """Length of drafts with which rounds follow the stream; None if it goes on."""
        if self._trying:
            self._trying = self._streams = False
            best, gain = self._best(_ROW)
            if gain >= 1:
                return best
            self._start_stream()
            return None
        length, gain = self._best(_ROW)
        pays = gain >= _GAIN
        if not pays:
            length, gain = self._best(_BEST_ROW, hoping=True)
            pays = gain >= _HOPED_GAIN
        if not pays or length == 0 or not (self._is_sure or (self._spare or 0.0) >= self._risk(length)):
            return None
        if not peeking:
            self._spare = (self._spare or 0.0) - min(self._link_ms)
            self._streams = False
        return length

    def _tries_stream(self, gain: float) -> bool:
        """Whether to measure a stream's pace although rounds are expected to be faster."""
        known = bool(self._stream_ms) and self._unmeasured < _STALE
        if known or self._advised_ms is not None or len(self._rounds) < _JUDGED or gain >= _CLEARLY:
            return False
        lost = TRIED * (self._stream_cost(_ROW) - self._pace) + min(self._link_ms)
        if (self._spare or 0.0) < lost:
            return False
        self._spare = (self._spare or 0.0) - lost
        return True

    @property
    def _pace(self) -> float:
        """Cost of a token in the last rounds."""
        return sum(cost for _, cost in self._rounds) / max(1, sum(tokens for tokens, _ in self._rounds))

    @property
    def _disappoints(self) -> bool:
        """Whether rounds turned out slower than streams."""
        known = self._advised_ms is not None or bool(self._stream_ms)
        if not known or len(self._rounds) < _SOON:
            return False
        return self._pace > self._stream_cost(_ROW) * (1 if len(self._rounds) == _JUDGED else _BADLY)

    @property
    def _is_sure(self) -> bool:
        """Whether rounds are expected to be faster even if drafts are right less often by a standard error."""
        # Where the link has changed, the last rounds took longer than expected.
        if len(self._excess) < _SOON or not self._stream_ms or median(self._late) > _BADLY:
            return False
        share = self.acceptance
        return self._best(_ROW, share=share - math.sqrt(share * (1 - share) / self._seen))[1] >= 1

    def _risk(self, drafted: int) -> float:
        """Milliseconds lost if the first rounds of such drafts bring as little as possible."""
        stream = self._stream_cost(_ROW)
        least = _tokens(_DOUBT * self.acceptance, drafted) * stream
        return max(_SOON * (self._round_costs(_ROW)[drafted] - least), 2 * stream)

    def _best(self, row: float, *, hoping: bool = False, share: float | None = None) -> tuple[int, float]:
        """The length of drafts whose rounds cost least per token, and their expected gain over a stream. `row` is by
        how much each row lengthens a pass if that was not measured, `share` the share of tokens accepted."""
        if self._room == 0:
            return 0, 0.0
        share, stream = self.acceptance if share is None else share, self._stream_cost(row)
        excess = 1.0 if hoping or not self._excess else min(max(median(self._excess), 0.7), 3.0)
        costs = self._round_costs(row, hoping=hoping)
        gain, length = max((_tokens(share, at) / cost, -at) for at, cost in enumerate(costs[: self._room + 1]))
        return -length, gain * stream / excess

    def _round_costs(self, row: float, *, hoping: bool = False) -> list[float]:
        """What rounds cost that draft none, one, two tokens and so on; arguments as `_best` has them."""
        if (known := self._rounds_known.get((row, hoping))) is not None:
            return known
        draft = median(self._draft_ms) if self._draft_ms else 0.0
        link = min(self._link_ms) if self._link_ms else 0.0
        passes = self._server_ms(row)
        if hoping:
            passes = [passes[0] * (1 + row * drafted) for drafted in range(self._most + 1)]
        ahead = (link + passes[0]) / max(draft, 1e-3)
        share, whole, costs = self.acceptance, 1.0, []
        for drafted, server in enumerate(passes):
            whole *= share
            paid = drafted - whole * min(drafted, ahead)
            price = self._prices.of(drafted, _ROUND_BYTES + _DRAFT_BYTES * drafted)
            costs.append(paid * draft + link + server + price)
        self._rounds_known[row, hoping] = costs
        return costs

    def _stream_cost(self, row: float) -> float:
        """Cost of a streamed token: as the server says, as the last windows had it, or a pass of one row."""
        ms = self._advised_ms
        if ms is None:
            ms = median(list(self._stream_ms)[-4:]) if self._stream_ms else self._server_ms(row)[0]
        return ms + self._prices.of(0, _EVENT_BYTES)

    def _server_ms(self, row: float) -> list[float]:
        """Milliseconds of the server's passes by rows, interpolated between believed sizes, at most what larger passes
        took."""
        if (known := self._passes_known.get(row)) is not None:
            return known
        least = {size: min(ms) for size, ms in self._pass_ms.items()}
        if self._stream_ms:
            least[1] = min([*self._stream_ms, *self._pass_ms.get(1, ())])
        if not least:
            return [0.1] * (self._most + 1)
        sizes = sorted(size for size in least if size == 1 or len(self._pass_ms[size]) >= _BELIEVED) or sorted(least)
        costs, bound = [0.0] * (self._most + 1), math.inf
        for rows in range(max(self._most + 1, *least), 0, -1):
            bound = min(bound, least.get(rows, math.inf))
            if rows <= self._most + 1:
                costs[rows - 1] = max(min(_on_line(least, sizes, rows, row), bound), 0.1)
        self._passes_known[row] = costs
        return costs


def _on_line(least: dict[int, float], sizes: list[int], rows: int, row: float) -> float:
    """Milliseconds of a pass on the line through the nearest sizes; `row` as in `Channel._best`."""
    above = max(bisect_right(sizes, rows), 1)
    low = sizes[above - 1]
    high = sizes[above] if above < len(sizes) else None
    slope = row * least[low] / (1 + row * (low - 1))
    if high is not None:
        slope = max((least[high] - least[low]) / (high - low), 0.0)
    return least[low] + slope * (rows - low)


def _tokens(share: float, drafted: int) -> float:
    """Expected tokens of a round, given the share of drafted tokens accepted."""
    return (1 - share ** (drafted + 1)) / (1 - share)
