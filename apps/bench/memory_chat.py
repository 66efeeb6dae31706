"""Whether memory stays flat while two people chat for long; knows nothing of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgeinfer.apps.bench.memory_timed import run_job
from edgeinfer.errors import UsageError

__all__ = ["FLAT_SHARE", "WARM_TURNS", "ChatResults", "measure_chat"]

# Turns in which everything is used for the first time, and the share by which the peak may grow afterwards.
WARM_TURNS, FLAT_SHARE = 10, 0.01


@dataclass(frozen=True)
class ChatResults:
    """A loop of turns.

    Attributes:
        peaks: bytes of peak RSS after each turn.
        planned: bytes.
    """

    peaks: tuple[int, ...]
    planned: int
    context: int

    @property
    def growth(self) -> float:
        """Of the peak, from the warm turns to the end."""
        return max(self.peaks) / max(self.peaks[:WARM_TURNS]) - 1

    @property
    def flat(self) -> bool:
        """Whether the peak grew by less than `FLAT_SHARE`."""
        return self.growth < FLAT_SHARE

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self) | {"growth": self.growth, "flat": self.flat}


def measure_chat(model: str | None, options: Mapping[str, Any], turns: int, reply_tokens: int) -> ChatResults:
    """Chats in a process of its own: two conversations in turns, begun again whenever the context is nearly full.

    Args:
        options: of `edgeinfer.load`.

    Raises:
        UsageError: there are too few turns to tell.
        BackendError: the process failed.
    """
    if turns <= WARM_TURNS:
        raise UsageError(f"{turns} turns tell nothing: the first {WARM_TURNS} are a warm-up.", "Ask for more.")
    found = run_job("chat", {"model": model, "turns": turns, "reply_tokens": reply_tokens, **options})
    return ChatResults(tuple(found["peaks"]), found["planned"], found["context"])
