"""What drafting may risk in a reply, so that no reply ends up slower than plain decoding."""

from __future__ import annotations

import math

__all__ = ["LossAccount"]

# What a reply may lose against plain decoding before it has gained anything: this share of what plain decoding would
# have taken so far. Beyond that a draft may only risk what earlier ones saved.
_LOSS_BUDGET = 0.01
# What a reply may lose on top, as a share of a pass: enough to ask tables at its beginning.
_FIRST_LOSS_BUDGET = 0.05
# Plain steps at most that are saved up for a draft that would have paid, had there been anything to risk.
_LONGEST_SAVING = 64
# Tokens of a reply after which drafters are asked though nothing has paid for it: on models so small that asking costs
# most of a pass, drafting would otherwise begin only after some seventy.
_UNPAID = (8, 32)


class LossAccount:
    """Keeps what a reply has saved against plain decoding, and tells what that pays for.

    Args:
        plain_ms: milliseconds of a plain step.

    Attributes:
        plain_ms: as given; may change when others share the passes.
        needs: what the cheapest draft would have risked that promised more than plain decoding; 0 where none did.
    """

    def __init__(self, plain_ms: float) -> None:
        self.plain_ms = plain_ms
        self.needs = 0.0
        self._saved = _FIRST_LOSS_BUDGET * plain_ms
        self._said, self._unpaid = 0, list(_UNPAID)

    @property
    def free(self) -> float:
        """Milliseconds that may be lost now."""
        return max(self._saved, 0.0)

    def risk(self, ms: float, sure: int = 1) -> float:
        """What a reply would lose by a round that takes so long and gives no more than these tokens."""
        return ms - sure * self.plain_ms * (1 + _LOSS_BUDGET)

    def affords(self, ms: float, sure: int = 1) -> bool:
        """Whether a round that takes so long and gives no more than these tokens would leave the reply no slower."""
        return self.risk(ms, sure) <= self.free

    def steps_to_save(self, asking_ms: float) -> int:
        """Plain steps before asking drafters is paid for, and the draft that could not be risked.

        Asking again at once would only spend what is to pay for it.
        """
        budget = _LOSS_BUDGET * self.plain_ms
        steps = math.ceil((asking_ms - budget - self.free) / budget)
        steps = max(steps, min(math.ceil((self.needs - self.free) / budget), _LONGEST_SAVING))
        if self._unpaid:
            steps = min(steps, self._unpaid[0] - self._said)
        return max(steps, 0)

    def begin_round(self) -> None:
        """Drafters are asked now."""
        if self._unpaid and self._said >= self._unpaid[0]:
            del self._unpaid[0]

    def book(self, tokens: int, ms: float) -> None:
        """Enters what a round gave and took, or some plain steps."""
        self._saved += tokens * self.plain_ms * (1 + _LOSS_BUDGET) - ms
        self._said += tokens
