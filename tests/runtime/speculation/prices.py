"""Costs of rounds from a table, for tests that must not depend on a clock, and rounds by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.controller import Acceptance, DraftController, StochasticController
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from edgeinfer.runtime.speculation.verification.rule import find_verification

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


def eager_rounds(
    text: Text,
    sampler: Sampler,
    drafters: Sequence[Drafter],
    prices: Prices,
    *,
    kind: type[DraftController] | None = None,
    verification: str = "keyed",
    most: int = 7,
    width: int = 1,
    noise: float = 0.0,
) -> SpeculativeDecoding:
    """Rounds by these prices in which whatever can be drafted is believed to be right."""
    acceptance, rule = Acceptance(), find_verification(verification)
    for drafter in drafters:
        acceptance.add(drafter.name, [0.9] * len(drafter.priors))
    kind = kind or (StochasticController if rule.stochastic else DraftController)
    controller = kind(drafters, prices, acceptance, most, width)
    return SpeculativeDecoding(text, sampler, drafters, controller, rule, noise=noise, on_plain_ms=lambda ms: None)
