"""Costs of rounds from a table, for tests that must not depend on a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLAT = dict.fromkeys(range(1, 65), 10.0)
LINEAR = {rows: 10.0 * rows for rows in range(1, 65)}
# Passes are padded to an even number of rows.
STAIRS = {rows: 10.0 + 4.0 * max(0, (rows + 1) // 2 - 1) for rows in range(1, 65)}


@dataclass(frozen=True)
class Prices:
    """Implements `controller.RoundCosts`."""

    passes: Mapping[int, float]
    guesses: Mapping[str, float] = field(default_factory=dict)
    round_ms: float = 0.0
    confirmed: int = 64
    reading: Mapping[str, float] = field(default_factory=dict)

    def pass_ms(self, rows: int) -> float:
        return self.passes[rows]

    def guess_ms(self, drafter: str) -> float:
        return self.guesses.get(drafter, 0.0)

    def read_ms(self, drafter: str) -> float:
        return self.reading.get(drafter, 0.0)
