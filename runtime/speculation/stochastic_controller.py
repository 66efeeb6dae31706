"""Drafts whose tokens are drawn from distributions: no token's presence or place is decided by its own draw.

Verification by ratio is lossless where each token, given all that was drafted before it, is drawn from its distribution
(rejection.py). So before each draw it is decided whether and where to draw, by running means, by what tables say, and
by the tokens drawn so far: how likely the path is that they make (SpecDec++), and whether an elder sibling leaves
anything (DySpec). What was drawn is never dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import field
from itertools import count

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.controller import Asked, DraftController, RoundCosts
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter, Guess, Round, guessed

# How fast the estimate of siblings that are no longer drawn recovers: some seventy rounds to half.
_RECOVERY = 0.01


@dataclass(frozen=True, slots=True)
class _Place:
    """Where draws may follow each other: behind a node, by one drafter."""

    node: int  # of the draft; -1 is the root
    path: tuple[int, ...]  # tokens from the root's child to it
    likely: float  # how likely it is that all of them are accepted
    drafter: Drafter  # that draws
    estimate: float  # how likely its first draw is accepted, as far as can be said before it is drawn


@dataclass(frozen=True, slots=True, order=True)
class _Slot:
    """A draw that may be made: the likeliest to be accepted comes first, of equals the one that was found first."""

    unlikely: float
    order: int
    place: _Place = field(compare=False)
    rank: int = field(compare=False)  # draws at the place before it
    left: float = field(compare=False)  # how likely it is that none of those is accepted where the place is reached


class StochasticController(DraftController):
    """Builds a chain, or with a width above 1 a tree of up to so many siblings at every node, and learns as its base.
    The next draw is made where it is likeliest to be accepted, as long as it and what may follow are worth their
    time."""

    def __init__(
        self, drafters: Sequence[Drafter], costs: RoundCosts, acceptance: Acceptance, most: int, width: int = 1
    ) -> None:
        super().__init__(drafters, costs, acceptance, most, width)
        ranks = range(1, width)
        self._siblings = {d.name: [acceptance.mean(d.name, rank) for rank in ranks] for d in drafters}

    @property
    def watches(self) -> bool:
        """Plain steps tell nothing of how tokens are drawn."""
        return False

    def draft(self, context: DraftContext, rows: int, depth: int) -> Passes[Draft]:
        self._begin(context, depth)
        most, order = min(rows, self._most), count()
        guesses: list[Guess] = []
        parents: list[int] = []
        sources: list[str] = []
        slots: list[_Slot] = []

        def offer(place: _Place, rank: int, left: float) -> None:
            name = place.drafter.name
            estimate = place.estimate if rank == 0 else min(self._siblings[name][rank - 1], left)
            heapq.heappush(slots, _Slot(-place.likely * estimate, next(order), place, rank, left))

        def look(node: int, path: tuple[int, ...], likely: float) -> Passes[None]:
            drafter, estimate = yield from self._most_promising(context, path, likely, len(guesses))
            if drafter is not None:
                offer(_Place(node, path, likely, drafter, estimate), 0, 1.0)

        if min(most, depth) > 0:
            yield from look(-1, (), 1.0)
        while slots and len(guesses) < most:
            slot = heapq.heappop(slots)
            place, rank = slot.place, slot.rank
            if not self._pays(slot, len(guesses)):
                continue
            if rank == 0:
                yield from self._ask_one(place.drafter, context, list(place.path), self.width)
            asked = self._asked[place.path]
            if rank == len(asked):
                continue
            drawn = asked[rank]
            guesses.append(drawn.guess)
            parents.append(place.node)
            sources.append(place.drafter.name)
            estimate = min(drawn.estimate, slot.left)
            if rank + 1 < self.width:
                offer(place, rank + 1, slot.left - estimate)
            if len(guesses) < most and len(place.path) + 1 < depth:
                yield from look(len(guesses) - 1, (*place.path, drawn.guess.token), place.likely * estimate)
        self._hope_for(len(guesses))
        return Draft(tuple(guesses), tuple(parents), tuple(sources))

    def observe(self, round: Round) -> None:
        super().observe(round)
        ranks = {(asked.drafter, asked.rank) for every in self._asked.values() for asked in every}
        for name, estimates in self._siblings.items():
            first = self._estimates[name]
            for rank, estimate in enumerate(estimates, 1):
                if (name, rank) in ranks:
                    estimates[rank - 1] = self._acceptance.mean(name, rank)
                else:
                    estimates[rank - 1] = estimate + (first * (1 - first) ** rank - estimate) * _RECOVERY

    def _pays(self, slot: _Slot, size: int) -> bool:
        """Whether a draw and what may follow it are worth their time in a draft of so many tokens."""
        place = slot.place
        ms = self._price(place.drafter.name)
        if self._ahead(-slot.unlikely / place.estimate, place.estimate, size, ms) <= 0:
            return False
        return self._budget.covers(self._prices[size + 1] + self._spent + (0.0 if slot.rank else ms))

    def _most_promising(
        self, context: DraftContext, path: Sequence[int], likely: float, size: int
    ) -> Passes[tuple[Drafter | None, float]]:
        """Whose guess is worth most as far as can be said before it is drawn, and its estimate; None: none pays."""
        best: Drafter | None = None
        best_estimate, most = 0.0, 0.0
        for drafter in self._drafters:
            name, estimate = drafter.name, self._estimates[drafter.name]
            if not drafter.draws:
                # What a table says depends on tokens before only, so it may be looked at.
                guesses = yield from guessed(drafter, context, path, 1)
                estimate = self._acceptance.estimate(name, guesses[0].sign, len(path)) if guesses else 0.0
            ms = self._price(name)
            worth = self._worth_asking(drafter, likely, estimate, size)
            barred = drafter.uses_target and self._at_work not in (None, drafter)
            affordable = self._budget.covers(self._prices[size + 1] + self._spent + ms + self._due(drafter))
            if worth > most and not barred and affordable:
                best, best_estimate, most = drafter, estimate, worth
        return best, best_estimate

    def _ask_one(self, drafter: Drafter, context: DraftContext, path: list[int], width: int) -> Passes[list[Asked]]:
        guesses = yield from self._paid_guesses(drafter, context, path, width)
        asked = [self._estimated(drafter.name, rank, guess, len(path)) for rank, guess in enumerate(guesses)]
        self._asked[tuple(path)] = asked
        return asked

    def _estimated(self, name: str, rank: int, guess: Guess, depth: int) -> Asked:
        raw = self._acceptance.estimate(name, guess.sign, depth, rank)
        return Asked(name, guess, rank, raw, self._acceptance.reliable(name, raw))
