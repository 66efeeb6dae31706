"""Counts and times of one generation's rounds; knows nothing of how they come about."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from edgeinfer.results import DrafterUse
from edgeinfer.runtime.speculation.contracts import Round

__all__ = ["RoundTimes", "SpeculationStatistics"]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of one round: proposing, the target's pass, and all else."""

    draft_ms: float
    verify_ms: float
    overhead_ms: float


@dataclass
class SpeculationStatistics:
    """What the rounds of one generation came to; fields as in `results.Speculation`.

    Attributes:
        committed: tokens.
        pass_ms: milliseconds of whole passes of the target by their rows.
        asking: what rounds in which drafters were asked took besides pass and guesses, each with the tokens it made.
        plain_overhead_ms: what plain steps took besides their pass, one entry each.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    rechecked: int = 0
    committed: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)
    pass_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    asking: list[tuple[float, int]] = field(default_factory=list)
    plain_overhead_ms: list[float] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    per_drafter: dict[str, DrafterUse] = field(default_factory=dict)

    def add(self, round: Round, times: RoundTimes, guessed_ms: float) -> None:
        """Counts one round.

        Args:
            guessed_ms: what its guesses cost by the governor's reckoning.
        """
        draft, verdict = round.draft, round.verdict
        self.rounds += 1
        self.drafted += len(draft)
        self.accepted += len(verdict.accepted)
        self.committed += len(round.committed)
        if verdict.bonus:
            self.bonus += 1
        else:
            self.recovered += 1
        self.draft_ms += times.draft_ms
        self.verify_ms += times.verify_ms
        self.overhead_ms += times.overhead_ms
        self.asking.append((max(0.0, times.draft_ms - guessed_ms) + times.overhead_ms, len(round.committed)))
        self.choices["+".join(dict.fromkeys(draft.sources)) or "none"] += 1
        self.accepted_per_position = _raised(self.accepted_per_position, range(len(verdict.accepted)))
        for name in dict.fromkeys(draft.sources):
            self._add_use(name, round)

    def add_plain(self, verify_ms: Sequence[float], overhead_ms: float) -> None:
        """Counts plain steps, each with its pass; the rest took the same each time."""
        steps = len(verify_ms)
        self.rounds += steps
        self.bonus += steps
        self.committed += steps
        self.verify_ms += sum(verify_ms)
        self.overhead_ms += steps * overhead_ms
        self.choices["none"] += steps
        self.pass_ms[1] += verify_ms
        self.plain_overhead_ms += [overhead_ms] * steps

    def _add_use(self, name: str, round: Round) -> None:
        use = self.per_drafter.get(name, DrafterUse())
        mine = [place for place, node in enumerate(round.verdict.accepted) if round.draft.sources[node] == name]
        self.per_drafter[name] = DrafterUse(
            rounds=use.rounds + 1,
            drafted=use.drafted + round.draft.sources.count(name),
            accepted=use.accepted + len(mine),
            accepted_per_position=tuple(_raised(list(use.accepted_per_position), mine)),
        )


def _raised(counts: list[int], places: range | list[int]) -> list[int]:
    """The counts with one more at each of these places."""
    more = [0] * (max(places) + 1 if places else 0)
    for place in places:
        more[place] = 1
    return [a + b for a, b in zip_longest(counts, more, fillvalue=0)]
