"""How long drafts should be that are sent to a verifier elsewhere: what rounds and drafts take here, as measured."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Channel"]

# How many figures of a kind are kept, of which the least say what it takes: other work makes the rest longer.
_KEPT = 8
# Share of drafted tokens that a verifier is taken to accept before it has seen any, and how many tokens that is worth.
_PRIOR, _PRIOR_TOKENS = 0.7, 8.0
# How much longer a pass takes for each row more, before passes of several sizes were seen, and at the best.
_ROW, _BEST_ROW = 0.1, 0.05
# Passes of a size after which the least of them is believed; one may have met with other work.
_BELIEVED = 3
# Tokens of the first draft, before anything is known of the way.
_FIRST = 4
# Tokens that count in the share accepted: older ones by less.
_MEMORY = 64.0
# By so much drafting must be faster than streaming, which asks nothing of this machine.
_GAIN = 1.02
# Rounds in a row by which their pace is judged, whatever was expected of them.
_JUDGED = 8


class Channel:
    """What was measured of a way to a verifier and of the drafter.

    A round with g drafted tokens takes g drafts, the way there and back, and a pass of 1 + g rows. The verifier then
    decides (1 - a^(1+g)) / (1 - a) tokens, where it accepts a share a of what is drafted. Where it accepts all, drafts
    that were made while the round was under way are the next round's (PEARL, Liu et al. 2025), and cost nothing.

    Args:
        most: tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._agreed, self._seen = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS
        self._draft_ms, self._link_ms, self._stream_ms = (deque[float](maxlen=_KEPT) for _ in range(3))
        self._pass_ms: dict[int, deque[float]] = {}  # of the server, by rows
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_JUDGED)  # tokens and milliseconds, since the last stream
        self._probes = False
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

    def drafted(self, ms: float) -> None:
        """One token was drafted in so many milliseconds."""
        self._draft_ms.append(ms)

    def verified(self, drafted: int, accepted: int, server_ms: float, total_ms: float) -> None:
        """A round was answered."""
        self.links.append(max(0.0, total_ms - server_ms))
        self.passes.append(server_ms)
        self._link_ms.append(self.links[-1])
        self._pass_ms.setdefault(1 + drafted, deque(maxlen=_KEPT)).append(server_ms)
        self.judged(accepted, min(drafted, accepted + 1))

    def went(self, tokens: int, ms: float) -> None:
        """A round brought so many tokens, its drafts and all else included."""
        self._rounds.append((tokens, ms))

    def judged(self, agreed: int, seen: int) -> None:
        """Of so many tokens that were compared with the verifier's, one after the other, so many agreed."""
        left = max(0.0, 1 - seen / _MEMORY)
        self._agreed, self._seen = left * self._agreed + agreed, left * self._seen + seen
        if self._seen <= 0:
            self._agreed, self._seen = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS

    def streamed(self, tokens: int, ms: float) -> None:
        """The verifier made so many tokens by itself in so many milliseconds."""
        if tokens:
            self._stream_ms.append(ms / tokens)
            self._probes = True
        self._rounds.clear()

    def length(self) -> int | None:
        """Tokens that the next draft should have; None where it is faster to let the verifier stream.

        Behind a stream a draft is tried where it would pay if rows cost as little as they may: what passes take was
        perhaps measured beside other work.
        """
        if not (self._link_ms and self._draft_ms):
            return min(_FIRST, self._most)
        best = self._paying(_ROW)
        if best is not None and not self._disappoints:
            return best
        probing, self._probes = self._probes, False
        return self._paying(_BEST_ROW, believing=False) if probing else None

    def ahead(self) -> int:
        """Tokens that can be drafted while a round is under way."""
        if not (self._link_ms and self._draft_ms):
            return self._most
        return int((min(self._link_ms) + self._server_ms(1, _ROW)) / max(median(self._draft_ms), 1e-3))

    @property
    def _disappoints(self) -> bool:
        """Whether rounds are slower than streams were, whatever was expected of them."""
        if len(self._rounds) < _JUDGED or not self._stream_ms:
            return False
        tokens, ms = sum(tokens for tokens, _ in self._rounds), sum(ms for _, ms in self._rounds)
        return tokens * median(self._stream_ms) < ms

    def _paying(self, row: float, *, believing: bool = True) -> int | None:
        """The length of drafts that brings most, where that is more than a stream; None where none does.

        Args:
            row: how much longer a pass takes for each row, where that was not measured.
            believing: what was measured.
        """
        ahead, base = self.ahead(), self._server_ms(1, row)
        draft, link = median(self._draft_ms), min(self._link_ms)

        def pace(drafted: int) -> float:
            """Tokens that a millisecond is expected to bring."""
            share = self.acceptance
            whole = share ** (drafted + 1)
            paid = drafted - whole * min(drafted, ahead)
            verifying = self._server_ms(1 + drafted, row) if believing else base * (1 + row * drafted)
            return (1 - whole) / (1 - share) / (paid * draft + link + verifying)

        best = max(range(self._most + 1), key=pace)
        stream = min(self._stream_ms) if self._stream_ms else base
        return best if pace(best) * stream >= _GAIN else None

    def _server_ms(self, rows: int, row: float) -> float:
        """What the server takes for a pass of so many rows: on the line through the nearest sizes that are believed,
        and no more than the least that one of as many rows or more took."""
        kept = dict(self._pass_ms)
        if self._stream_ms:
            kept[1] = deque([*kept.get(1, ()), *self._stream_ms])
        if not kept:
            return 0.1
        least = {size: min(ms) for size, ms in kept.items()}
        sizes = sorted(size for size in kept if len(kept[size]) >= _BELIEVED or size == 1) or sorted(kept)
        low = max((size for size in sizes if size <= rows), default=sizes[0])
        high = min((size for size in sizes if size > low), default=sizes[0])
        slope = row * least[low]
        if high != low:
            slope = max((least[high] - least[low]) / (high - low), 0.0)
        bounds = [ms for size, ms in least.items() if size >= rows]
        return max(min([least[low] + slope * (rows - low), *bounds]), 0.1)
