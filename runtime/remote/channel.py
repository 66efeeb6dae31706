"""How long drafts should be that are sent to a verifier elsewhere: what rounds and drafts take here, as measured."""

from __future__ import annotations

from statistics import median

__all__ = ["Channel"]

# By how much a new figure counts in a running mean.
_WEIGHT = 0.2
# Share of drafted tokens that a verifier is taken to accept before it has seen any, and how many tokens that is worth.
_PRIOR, _PRIOR_TOKENS = 0.7, 8.0
# How much longer a pass takes for each row more, until passes of two sizes were seen.
_ROW = 0.1
# Tokens of the first draft, before anything is known of the way.
_FIRST = 4
# Tokens that count in the share accepted: older ones by less.
_MEMORY = 64.0
# By so much drafting must be faster than streaming, which asks nothing of this machine.
_GAIN = 1.02


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
        self._draft_ms: float | None = None
        self._link_ms: float | None = None
        self._pass_ms: dict[int, float] = {}  # of the server, by rows
        self._stream_ms: float | None = None  # between two of its own tokens
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
        self._draft_ms = _mean(self._draft_ms, ms)

    def verified(self, drafted: int, accepted: int, server_ms: float, total_ms: float) -> None:
        """A round was answered."""
        self.links.append(max(0.0, total_ms - server_ms))
        self.passes.append(server_ms)
        self._link_ms = _mean(self._link_ms, self.links[-1])
        self._pass_ms[1 + drafted] = _mean(self._pass_ms.get(1 + drafted), server_ms)
        self.judged(accepted, min(drafted, accepted + 1))

    def judged(self, agreed: int, seen: int) -> None:
        """Of so many tokens that were compared with the verifier's, one after the other, so many agreed."""
        left = max(0.0, 1 - seen / _MEMORY)
        self._agreed, self._seen = left * self._agreed + agreed, left * self._seen + seen
        if self._seen <= 0:
            self._agreed, self._seen = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS

    def streamed(self, tokens: int, ms: float) -> None:
        """The verifier made so many tokens by itself in so many milliseconds."""
        if tokens:
            self._stream_ms = _mean(self._stream_ms, ms / tokens)

    def length(self) -> int | None:
        """Tokens that the next draft should have; None where it is faster to let the verifier stream."""
        if self._link_ms is None or self._draft_ms is None:
            return min(_FIRST, self._most)
        best = max(range(self._most + 1), key=self._pace)
        stream = self._stream_ms if self._stream_ms is not None else self._server_ms(1)
        return best if self._pace(best) * stream >= _GAIN else None

    def ahead(self) -> int:
        """Tokens that can be drafted while a round is under way."""
        if not self._draft_ms or self._link_ms is None:
            return self._most
        return int((self._link_ms + self._server_ms(1)) / self._draft_ms)

    def _pace(self, drafted: int) -> float:
        """Tokens that a millisecond is expected to bring, with drafts of so many tokens."""
        assert self._link_ms is not None and self._draft_ms is not None, "rounds and drafts were timed"
        share = self.acceptance
        whole = share ** (drafted + 1)
        tokens = (1 - whole) / (1 - share)
        paid = drafted - whole * min(drafted, self.ahead())
        return tokens / (paid * self._draft_ms + self._link_ms + self._server_ms(1 + drafted))

    def _server_ms(self, rows: int) -> float:
        """What the server takes for a pass of so many rows: on the line through the sizes that were seen."""
        known = self._pass_ms
        if rows in known or not known:
            return known.get(rows, 0.0)
        low, high = min(known), max(known)
        slope = (known[high] - known[low]) / (high - low) if high > low else _ROW * known[low]
        return max(known[low] + max(slope, 0.0) * (rows - low), 0.1)


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
