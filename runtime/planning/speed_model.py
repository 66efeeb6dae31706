"""How fast a configuration decodes, by costs measured on this device or a stated guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgeinfer.records import dataclass
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.profile.costs import PassCosts

__all__ = ["REPLY_TOKENS", "ROUND_MS", "TURN_TOKENS", "Pace", "Speed", "SpeedModel", "guessed_passes"]

# A turn of a chat, by which configurations are compared: so many new tokens of prompt, so many of reply.
TURN_TOKENS, REPLY_TOKENS = 64, 128
# Of a round that drafts, besides its pass (docs/LOG.md, 2026-11-21).
ROUND_MS = 0.3
# Bytes of weights that a core of a laptop reads per millisecond, and what each further row adds to a pass: what is
# reckoned with until the device was measured (docs/LOG.md, 2026-11-21: 9 to 34 GB/s, 5% to 15% a row).
_READ_PER_MS = 12_000_000
_ROW_SHARE = 0.12
# Milliseconds that nothing takes less than.
_LEAST_MS = 0.2
# Rate at which a draft's first token is accepted, and each further one after it, until replies were measured: means
# over 17 texts.
_FIRST_ACCEPTED, _NEXT_ACCEPTED = 0.30, 0.75
# Share of the gain of all drafters that remains without the largest table, and with copying alone: by the gains of
# each drafter in docs/LOG.md, 2026-11-21.
_WITHOUT_RECYCLE, _COPY_ALONE = 0.97, 0.63


@dataclass(frozen=True)
class Speed:
    """A predicted pace.

    Attributes:
        tokens_per_second: of a reply.
        turn_ms: a turn of 64 prompt tokens and 128 of reply.
        measured: whether it rests on passes timed on this device.
    """

    tokens_per_second: float
    turn_ms: float
    measured: bool


@dataclass(frozen=True)
class Pace:
    """What is known of a device and a model before it is loaded.

    Attributes:
        passes: c(m).
        measured: whether they were timed here, or guessed from the size of the weights.
        round_ms: of a round that drafts, besides its pass.
        acceptance: rate at which a draft's token is accepted, by its position; () where no reply was measured.
        tokenizer_ms: making the tokenizer.
    """

    passes: PassCosts
    measured: bool
    round_ms: float
    acceptance: Sequence[float]
    tokenizer_ms: float


def guessed_passes(weight_bytes: int, expert_bytes: Callable[[int], float] = lambda rows: 0.0) -> PassCosts:
    """c(m) of a model that never ran here.

    Args:
        weight_bytes: that every pass reads.
        expert_bytes: that a pass over so many rows reads besides, of the experts they choose.
    """

    def ms(rows: int) -> float:
        return max(_LEAST_MS, (weight_bytes + expert_bytes(rows)) / _READ_PER_MS)

    return PassCosts(tuple((rows, ms(rows) + ms(1) * _ROW_SHARE * (rows - 1)) for rows in (1, 2, 4, 8, 16, 32)))


class SpeedModel:
    """Predicts the pace of configurations of one model.

    Args:
        pace_of: what is known of a configuration.
    """

    def __init__(self, pace_of: Callable[[Configuration], Pace]) -> None:
        self._pace_of = pace_of

    def speed(self, configuration: Configuration) -> Speed:
        """The pace of a configuration."""
        pace = self._pace_of(configuration)
        token_ms = _token_ms(pace, configuration)
        chunk = min(configuration.prefill_chunk, TURN_TOKENS)
        prompt_ms = -(-TURN_TOKENS // chunk) * _chunk_ms(pace, chunk)
        making_ms = pace.tokenizer_ms if configuration.tokenizer == "transient" else 0.0
        return Speed(1e3 / token_ms, making_ms + prompt_ms + REPLY_TOKENS * token_ms, pace.measured)


def _token_ms(pace: Pace, configuration: Configuration) -> float:
    """Milliseconds per token at the best length of draft, as the governor chooses it; 0 is one of them."""
    best = pace.passes.ms(1)
    share, tokens = _share(configuration.drafters), 1.0
    for length in range(1, configuration.draft_max + 1):
        tokens += share * _accepted(pace, length)
        best = min(best, (pace.round_ms + pace.passes.ms(length + 1)) / tokens)
    return best


def _chunk_ms(pace: Pace, chunk: int) -> float:
    """Milliseconds of a chunk of a prompt; beyond the measured passes a row costs what it does in the largest."""
    largest = pace.passes.largest
    return pace.passes.ms(chunk) if chunk <= largest else pace.passes.ms(largest) * chunk / largest


def _accepted(pace: Pace, place: int) -> float:
    if pace.acceptance:
        return pace.acceptance[place - 1] if place <= len(pace.acceptance) else 0.0
    return _FIRST_ACCEPTED * _NEXT_ACCEPTED ** (place - 1)


def _share(drafters: Sequence[str]) -> float:
    if "recycle" in drafters:
        return 1.0
    return _WITHOUT_RECYCLE if "ngram" in drafters else _COPY_ALONE
