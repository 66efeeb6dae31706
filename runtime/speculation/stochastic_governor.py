"""Drafts whose tokens are drawn from distributions: nothing about a draft is decided by what was drawn.

Verification by ratio is lossless only if presence and place of a drawn token do not depend on the draws, its own
included. So who is asked and how far is decided by running means, before each draw, and nothing drawn is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from edgeinfer.runtime.speculation.acceptance import ALONE
from edgeinfer.runtime.speculation.drafters.contract import Context, Draft, Drafter, Guess
from edgeinfer.runtime.speculation.governor import Asked, Governor

__all__ = ["ChainsGovernor", "StochasticGovernor"]


class StochasticGovernor(Governor):
    """Builds a chain, or with a width above 1 a chain with siblings at every node, and learns as its base does."""

    def draft(self, context: Context, room: int) -> Draft:
        """What to verify next; see `Governor.draft`."""
        self._begin()
        most = min(room, self._most)
        guesses: list[Guess] = []
        parents: list[int] = []
        sources: list[str] = []
        path: list[int] = []
        node, likely = -1, 1.0
        while len(guesses) < most:
            drafter, estimate = self._most_promising(context, path, likely, len(guesses))
            if drafter is None:
                break
            asked = self._ask_one(drafter, context, path, min(self._width, most - len(guesses)))
            if not asked:
                break
            likely *= estimate
            parents += [node] * len(asked)
            guesses += [a.guess for a in asked]
            sources += [drafter.name] * len(asked)
            node = len(guesses) - len(asked)
            path.append(asked[0].guess.token)
        return Draft(tuple(guesses), tuple(parents), tuple(sources))

    def _most_promising(
        self, context: Context, path: Sequence[int], likely: float, size: int
    ) -> tuple[Drafter | None, float]:
        """Whose guess is worth most as far as can be said before it is drawn, and its estimate; None: none pays."""
        best: Drafter | None = None
        best_estimate, most = 0.0, 0.0
        for drafter in self._drafters:
            name, estimate = drafter.name, self._estimates[drafter.name]
            if not drafter.draws:
                # What a table says depends on tokens before only, so it may be looked at.
                guesses = drafter.guesses(context, path, 1)
                estimate = self._acceptance.estimate(name, guesses[0].sign, ALONE, len(path)) if guesses else 0.0
            worth = self._ahead(likely, estimate, size, self._guess_ms[name])
            barred = drafter.uses_target and self._at_work not in (None, drafter)
            affordable = self._affords(self._pass_ms[size + 1] + self._spent + self._guess_ms[name])
            if worth > most and not barred and affordable:
                best, best_estimate, most = drafter, estimate, worth
        return best, best_estimate

    def _ask_one(self, drafter: Drafter, context: Context, path: list[int], width: int) -> list[Asked]:
        self._spent += self._guess_ms[drafter.name]
        if drafter.uses_target:
            self._at_work = drafter
        answers = [(drafter.name, guess) for guess in drafter.guesses(context, path, width if drafter.branches else 1)]
        asked = [self._estimated(name, guess, answers, len(path)) for name, guess in answers]
        self._asked[tuple(path)] = asked
        return asked


class ChainsGovernor(StochasticGovernor):
    """Builds `width` chains drawn independently from the most promising drafter; equal ones stay apart."""

    def draft(self, context: Context, room: int) -> Draft:
        """What to verify next; see `Governor.draft`."""
        self._begin()
        drafter, estimate = self._most_promising(context, (), 1.0, 0)
        length = 0 if drafter is None else self._length(drafter, estimate, min(room, self._most // self._width))
        if drafter is None or length == 0:
            return Draft()
        guesses: list[Guess] = []
        parents: list[int] = []
        ends = [-1] * self._width
        paths: list[tuple[int, ...]] = [()] * self._width
        for _ in range(length):
            groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for chain, path in enumerate(paths):
                groups[path].append(chain)
            for path, chains in groups.items():
                # A distribution is the same for all chains of a path; their draws are not.
                asked = self._ask_one(drafter, context, list(path), len(chains))
                for chain, a in zip(chains, asked, strict=False):
                    parents.append(ends[chain])
                    guesses.append(a.guess)
                    ends[chain] = len(guesses) - 1
                    paths[chain] = (*path, a.guess.token)
        return Draft(tuple(guesses), tuple(parents), (drafter.name,) * len(guesses))

    def _length(self, drafter: Drafter, estimate: float, most: int) -> int:
        """The length at which so many chains are worth most."""
        ms = self._guess_ms[drafter.name]
        either = 1 - (1 - estimate) ** self._width
        best, length, gained, likely = 0.0, 0, 0.0, 1.0
        for depth in range(1, most + 1):
            likely *= either
            gained += likely
            rows = depth * self._width
            worth = gained - self.rate * (self._pass_ms[rows] - self._pass_ms[0] + rows * ms)
            if worth > best and self._affords(self._pass_ms[rows] + rows * ms):
                best, length = worth, depth
        return length
