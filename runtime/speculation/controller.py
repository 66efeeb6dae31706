"""Decides, round by round, what to draft: the draft of most expected tokens per millisecond, as far as losses are
bounded.

A round that drafts n tokens takes c(1 + n), a pass of the target over so many rows, and what its guesses take; it gives
one token and those of the draft that are accepted. How often a guess is accepted is learnt for each drafter by the
evidence behind it (its sign), and nothing else. Drafting nothing is always a candidate. What drafts cost beyond what
they gain is bounded for each reply: a small share of its time, and of one pass at its beginning.

All times are the device's measured costs, never a clock's: the same costs and the same texts give the same decisions.
What guesses and reading really took is noted for the costs of later replies.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Generator, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.profile.costs import CHEAP, look_ahead
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter, Guess, Round, guessed

# A prior counts as this many observations: few enough that twenty rounds outweigh it, enough that two do not.
_PRIOR_WEIGHT = 4.0
# Observations that a count remembers: the text may turn from copied to new within a paragraph.
_MEMORY = 200.0
# Guesses that a drafter's mean runs over, and how fast it recovers while the drafter is not asked.
_LATEST, _RECOVERY = 20.0, 0.01
# Ranks among the guesses of one drafter for one place that are counted apart, as at most one of them comes true.
_RANKS = 4
# No guess is certain, as a chain of certain ones would be worth any length; and one that counts as certain.
_SUREST, _SURE = 0.999, 0.995
# What drafting may lose in a reply: this share of what plain decoding would take so far, and this share of one pass.
_LOSS, _FIRST_LOSS = 0.01, 0.25
# Plain steps at most that are saved up before drafters are asked again.
_LONGEST_REST = 64
# A draft must beat the empty one by this factor: a measured c(m) is good to a few percent.
_MARGIN = 1.02
# Places looked ahead to see whether a step of c(m), as from two rows to four, pays by its end.
_AHEAD = 6
# Rounds that the rate of decoding runs over.
_ROUNDS = 16.0
# A path less likely than this cannot pay: no c(m) has a row for a fiftieth of a pass.
_LEAST = 0.02
# Drafts of a reply that may be longer than any pass that the session has run often: up to twice as long, in the hope
# that such a pass costs at most so much more than the longest known one. Otherwise costs that a busy moment spoiled, by
# which no longer draft pays, would never be found out.
_LONGER_TRIES, _HOPED = 2, 1.25
# Tokens read at once that tell what reading takes: of few the guess behind them is most of the time.
_TELLING = 16


class Acceptance:
    """How often guesses come true, by drafter, sign and rank."""

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.float64]] = {}  # accepted and seen, (2, signs, ranks)
        self._priors: dict[str, NDArray[np.float64]] = {}  # (signs, ranks)
        self._estimates: dict[str, list[list[float]]] = {}
        self._means: dict[str, list[float]] = {}  # of the latest guesses, by rank

    def add(self, drafter: str, priors: Sequence[float]) -> None:
        """Begin to learn about a drafter, with its acceptance by sign before any observation."""
        self._priors[drafter] = np.repeat(np.array(priors, np.float64)[:, None], _RANKS, 1)
        self._set(drafter, np.zeros((2, len(priors), _RANKS)))

    def _set(self, drafter: str, counts: NDArray[np.float64]) -> None:
        priors, (accepted, seen) = self._priors[drafter], counts
        self._counts[drafter] = counts
        self._estimates[drafter] = ((accepted + _PRIOR_WEIGHT * priors) / (seen + _PRIOR_WEIGHT)).tolist()
        self._means[drafter] = [self._first_mean(drafter, rank) for rank in range(_RANKS)]

    def _first_mean(self, drafter: str, rank: int) -> float:
        """What a drafter's guesses of a rank come to, by all that is known."""
        accepted, seen = self._counts[drafter][:, :, rank].sum(1)
        mean = float(self._priors[drafter].mean())
        return float((accepted + mean * (1 - mean) ** rank) / (seen + 1))

    def estimate(self, drafter: str, sign: int, rank: int = 0) -> float:
        """Probability that the target chooses this guess, if all before it in the draft are accepted."""
        return min(self._estimates[drafter][sign][min(rank, _RANKS - 1)], _SUREST)

    def mean(self, drafter: str, rank: int = 0) -> float:
        """Share of the drafter's latest guesses of a rank that came true, whatever their signs."""
        return self._means[drafter][min(rank, _RANKS - 1)]

    def observe(self, drafter: str, sign: int, came: bool, rank: int = 0) -> None:
        """Learn what became of a guess whose predecessors were accepted."""
        counts, rank = self._counts[drafter], min(rank, _RANKS - 1)
        accepted, seen = (counts[:, sign, rank] * (1 - 1 / _MEMORY)).tolist()
        counts[:, sign, rank] = accepted + came, seen + 1
        prior = float(self._priors[drafter][sign, rank])
        self._estimates[drafter][sign][rank] = (accepted + came + _PRIOR_WEIGHT * prior) / (seen + 1 + _PRIOR_WEIGHT)
        self._means[drafter][rank] += (came - self._means[drafter][rank]) / _LATEST

    def recover(self, drafter: str) -> None:
        """Believe a little more of a drafter that was not asked in a round."""
        means = self._means[drafter]
        for rank, mean in enumerate(means):
            means[rank] = mean + _RECOVERY * (self._first_mean(drafter, rank) - mean)

    def state(self) -> dict[str, NDArray[Any]]:
        """Accepted and seen guesses of every drafter, for the next session."""
        return {name: counts.copy() for name, counts in self._counts.items()}

    def restore(self, drafter: str, state: Mapping[str, NDArray[Any]]) -> None:
        """Take back what `state` gave for one drafter; nothing where it is not in it, or has other signs."""
        counts = state.get(drafter)
        if counts is None or counts.shape != self._counts[drafter].shape:
            return
        accepted, seen = counts = counts.astype(np.float64)
        # NaN compares false with everything.
        if not bool(np.all((accepted >= 0) & (accepted <= seen + 1e-6) & (seen <= _MEMORY + 1))):
            raise StorageError(f"The kept acceptance of {drafter} is damaged.", "Delete it; it is learned again.")
        self._set(drafter, counts)


class RoundCosts(Protocol):
    """Tells what a round costs on this device."""

    def pass_ms(self, rows: int) -> float:
        """One pass of the target over so many new tokens with all their logits."""

    def guess_ms(self, drafter: str) -> float:
        """One guess."""

    def read_ms(self, drafter: str) -> float:
        """Reading one token of the text before a guess."""

    @property
    def round_ms(self) -> float:
        """What a round costs besides its pass and its guesses."""

    @property
    def confirmed(self) -> int:
        """Rows of the largest pass that this session has run often; costs of larger ones may be outdated."""


class Asked(NamedTuple):
    """A guess and how likely it is to be right."""

    drafter: str
    guess: Guess
    rank: int  # guesses of the same drafter for the same place before it
    estimate: float


class _Tree:
    """A draft as it grows, with the probability of every path."""

    def __init__(self) -> None:
        self.nodes: list[Asked] = []
        self.parents: list[int] = []
        self.likely: list[float] = []
        self.paths: list[tuple[int, ...]] = []
        self.expected = 1.0  # tokens of the round
        self.sure = 0  # nodes of a chain from the root that are as good as certain

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, asked: Asked, parent: int, likely: float) -> None:
        """Add a node below one of the tree, or below the root (-1)."""
        # What a grammar forces, and what was right so often that it may count as such.
        if asked.estimate >= _SURE and self.sure == parent + 1 == len(self):
            self.sure += 1
        self.nodes.append(asked)
        self.parents.append(parent)
        self.likely.append(likely)
        self.paths.append((*self.path(parent), asked.guess.token))
        self.expected += likely

    def path(self, node: int) -> tuple[int, ...]:
        return () if node < 0 else self.paths[node]

    def likely_of(self, node: int) -> float:
        return 1.0 if node < 0 else self.likely[node]

    def cut(self, length: int) -> Draft:
        nodes = self.nodes[:length]
        guesses, sources = (tuple(getattr(each, name) for each in nodes) for name in ("guess", "drafter"))
        return Draft(guesses, tuple(self.parents[:length]), sources, tuple(self.likely[:length]))


class DraftController:
    """Builds drafts and learns from what becomes of them. Drafters come in the order in which they are preferred where
    nothing else decides. Above a `width` of 1 guesses per drafter and place, drafts are trees."""

    def __init__(
        self, drafters: Sequence[Drafter], costs: RoundCosts, acceptance: Acceptance, most: int, width: int = 1
    ) -> None:
        self._acceptance = acceptance
        self._most, self.width = most, width
        self._guess_ms = {drafter.name: costs.guess_ms(drafter.name) for drafter in drafters}
        self._read_ms = {drafter.name: costs.read_ms(drafter.name) for drafter in drafters}
        # Cheap ones first: whether a costly one is asked depends on what they say.
        self._drafters = sorted(drafters, key=lambda drafter: self._guess_ms[drafter.name])
        self._round_ms = costs.round_ms
        self._reprice(costs)
        # Milliseconds that may be lost now.
        self._free = _FIRST_LOSS * self._pass_ms[0]
        self._said = 0  # tokens of the reply
        self._asked: dict[tuple[int, ...], list[Asked]] = {}  # of this round, by the path before them
        self._at_work: Drafter | None = None
        self._paid: set[str] = set()  # drafters whose further guesses of this round cost nothing
        self._spent = self._reading_ms = 0.0
        self._unread: dict[str, int] = {}  # tokens by drafter, as far as known in this round
        self._context: DraftContext  # of the round
        # Tokens and milliseconds of the latest rounds; and tokens per millisecond that time is worth.
        self._tokens, self._ms = 1.0, self._pass_ms[0]
        self._rate = self._plain_rate
        self._rounds_left = 1.0  # that the reply is expected to have
        self.timed_guesses: list[tuple[str, float]] = []
        self.timed_reading: list[tuple[str, float]] = []

    def _reprice(self, costs: RoundCosts) -> None:
        """Go by other costs of passes from now on."""
        self._pass_ms = [costs.pass_ms(rows) for rows in range(1, self._most + 2)]
        self._confirmed, self._longer_tries = costs.confirmed, _LONGER_TRIES
        known = self._pass_ms[: self._confirmed]
        hoped = self._pass_ms[self._confirmed : 2 * self._confirmed]
        # By these it is decided what to draft, by those above what it was worth.
        self._prices = known + [min(ms, _HOPED * known[-1]) for ms in hoped] + self._pass_ms[2 * self._confirmed :]
        self._cheap_ms = CHEAP * self._pass_ms[0]
        self._asking_ms = self._round_ms + sum(ms for ms in self._guess_ms.values() if ms <= self._cheap_ms)
        self._plain_rate = 1 / self._pass_ms[0]

    @property
    def rest(self) -> int:
        """Plain steps before drafters are asked, by which asking and the shortest draft are paid for."""
        needed = self._asking_ms + self._pass_ms[min(1, self._most)] - self._pass_ms[0] - self._free
        return min(max(0, math.ceil(needed / (_LOSS * self._pass_ms[0]))), _LONGEST_REST)

    @property
    def asks(self) -> bool:
        """Whether drafters are asked for anything as things are; until they are, they need not know the text."""
        return True

    @property
    def guessed_ms(self) -> float:
        """What the last draft's guesses cost, with what was read for them."""
        return self._spent + self._reading_ms

    def rested(self, steps: int) -> None:
        """Learn that so many plain steps were taken."""
        self._add(steps, steps * self._pass_ms[0])

    def draft(self, context: DraftContext, rows: int, depth: int) -> Passes[Draft]:
        """Build the draft to verify next; empty where nothing pays."""
        self._begin(context, depth)
        most, tree, order = min(rows, self._most), _Tree(), count()
        waiting: list[tuple[float, int, int, Asked]] = []  # the likeliest path first, of equals the one found first

        def expand(node: int) -> Passes[None]:
            """Find the guesses that may follow a node, each token once, at the estimate of whoever is surest of it."""
            likely, left, said = tree.likely_of(node), 1.0, set[int]()
            for asked in sorted((yield from self._ask(tree, node)), key=lambda asked: -asked.estimate):
                if asked.guess.token not in said and len(said) < self.width:
                    said.add(asked.guess.token)
                    # At most one of different tokens comes true.
                    estimate = min(asked.estimate, left)
                    left -= estimate
                    heapq.heappush(waiting, (-likely * estimate, next(order), node, asked))

        if min(most, depth) > 0:
            yield from expand(-1)
        length = 0
        while waiting and len(tree) < most:
            unlikely, _, parent, asked = heapq.heappop(waiting)
            tree.add(asked, parent, -unlikely)
            rate, size = self._rate_of(tree.expected, len(tree)), len(tree)
            if rate > max(self._rate, _MARGIN * self._plain_rate) and self._covers(size, 1 + tree.sure):
                self._rate, length = rate, size
            if size < most and len(tree.paths[-1]) < depth and -unlikely > _LEAST:
                further = self._ahead(-unlikely, asked.estimate, size, self._price(asked.drafter))
                if further > 0 and self._covers(max(length, 1), 1 + tree.sure):
                    yield from expand(size - 1)
        self._hope_for(length)
        return tree.cut(length)

    def observe(self, round: Round) -> None:
        """Learn from what became of the last draft."""
        committed = round.committed
        for depth, token in enumerate(committed):
            for asked in self._asked.get(committed[:depth], ()):
                self._acceptance.observe(asked.drafter, asked.guess.sign, asked.guess.token == token, asked.rank)
        now = {asked.drafter for every in self._asked.values() for asked in every}
        for name in self._guess_ms.keys() - now:
            self._acceptance.recover(name)
        self._add(len(committed), self._pass_ms[len(round.draft)] + self._spent + self._round_ms)

    def _begin(self, context: DraftContext, depth: int) -> None:
        self._asked, self._at_work, self._spent, self._reading_ms = {}, None, 0.0, 0.0
        self._paid.clear()
        self._unread.clear()
        self.timed_guesses, self.timed_reading = [], []
        self._context, self._rate = context, self._rate_of(1.0, 0)
        # Nothing tells how long a reply will be: it is taken to go on for as long as it has until now.
        self._rounds_left = max(1.0, min(self._said, depth) / 2)

    def _add(self, tokens: int, ms: float) -> None:
        """Enter what a round or plain steps gave and took."""
        self._free += tokens * self._pass_ms[0] * (1 + _LOSS) - ms
        self._said += tokens
        kept = (1 - 1 / _ROUNDS) ** (tokens if tokens == ms * self._plain_rate else 1)
        self._tokens, self._ms = self._tokens * kept + tokens, self._ms * kept + ms

    def _covers(self, size: int, sure: int = 1, ms: float = 0.0) -> bool:
        """Whether a draft of so many tokens, for guesses of so much more, may be lost but for these tokens."""
        lost = self._prices[min(size, self._most)] + self._spent + ms - sure * self._pass_ms[0] * (1 + _LOSS)
        return lost <= self._free

    def _rate_of(self, tokens: float, size: int) -> float:
        """Tokens per millisecond of a round with a draft of so many tokens."""
        return tokens / (self._prices[size] + self._spent + self._round_ms)

    def _hope_for(self, length: int) -> None:
        """Count a draft whose pass may cost more than it is hoped to."""
        if 1 + length > self._confirmed and self._longer_tries:
            self._longer_tries -= 1
            if not self._longer_tries:
                self._prices = self._pass_ms

    def _price(self, name: str) -> float:
        """What a drafter's next guess costs."""
        return 0.0 if name in self._paid else self._guess_ms[name]

    def _to_read(self, drafter: Drafter) -> float:
        """What a drafter's reading before its next guess costs. All drafts to come have the use of it."""
        name, price = drafter.name, self._read_ms[drafter.name]
        if price and name not in self._unread:  # once a round, as some copy the text to tell
            self._unread[name] = drafter.unread(self._context)
        return price * self._unread.get(name, 0)

    def _ahead(self, likely: float, acceptance: float, size: int, guess_ms: float, *, once: bool = False) -> float:
        """The most that further nodes behind a path are worth if each is accepted with this probability."""
        most, rate = min(_AHEAD, self._most - size), self._rate
        if guess_ms:
            rate = max(rate, self._tokens / self._ms)
        return look_ahead(self._prices, size, most, likely, acceptance, rate, guess_ms, once=once).worth

    def _worth_asking(self, drafter: Drafter, likely: float, acceptance: float, size: int) -> float:
        """What guesses are worth that a drafter has not made yet, less this round's share of what it reads before; 0
        where what it takes may not be lost, or another's rows would be: only one works on the target's cache."""
        ms, reading = self._price(drafter.name), self._to_read(drafter)
        barred = drafter.uses_target and self._at_work not in (None, drafter)
        if barred or not self._covers(1, ms=ms + reading):
            return 0.0
        worth = self._ahead(likely, acceptance, size, ms, once=drafter.at_once)
        return worth - self._rate * reading / self._rounds_left

    def _ask(self, tree: _Tree, node: int) -> Passes[list[Asked]]:
        """All guesses for the place behind a node: of tables, and of others if they may be worth more than those."""
        path, likely, asked = tree.path(node), tree.likely_of(node), list[Asked]()
        for drafter in self._drafters:
            if self._price(drafter.name) + self._to_read(drafter) > self._cheap_ms:
                best = max(asked, key=attrgetter("estimate"), default=None)
                without = 0.0
                if best is not None:
                    without = self._ahead(likely, best.estimate, len(tree), self._price(best.drafter))
                mean = self._acceptance.mean(drafter.name)
                if self._worth_asking(drafter, likely, mean, len(tree)) <= without:
                    continue
            asked += yield from self._guesses(drafter, path, self.width)
        self._asked[path] = asked
        return asked

    def _guesses(self, drafter: Drafter, path: Sequence[int], width: int) -> Passes[list[Asked]]:
        """A drafter's guesses behind a path, which the draft pays for: the only place where drafters are asked."""
        name, price, reading = drafter.name, self._price(drafter.name), self._to_read(drafter)
        unread = self._unread.pop(name, 0)
        self._spent += price
        self._reading_ms += reading  # which is no part of what this draft is worth
        self._free -= reading
        if drafter.at_once:
            self._paid.add(name)
        if drafter.uses_target:
            self._at_work = drafter
        started = time.perf_counter_ns()
        found = drafter.guesses(self._context, path, width if drafter.branches else 1)
        guesses = (yield from found) if isinstance(found, Generator) else found
        ms = (time.perf_counter_ns() - started) / 1e6
        if guesses and unread >= _TELLING:
            self.timed_reading.append((name, max(0.0, ms - price) / unread))
        elif price and guesses:
            self.timed_guesses.append((name, max(0.0, ms - reading)))
        estimate = self._acceptance.estimate
        return [Asked(name, guess, rank, estimate(name, guess.sign, rank)) for rank, guess in enumerate(guesses)]


class StochasticController(DraftController):
    """Builds drafts whose tokens are drawn from distributions. Verification by ratio is lossless where no token's
    presence or place is decided by its own draw (rejection.py): how many are drawn at a place, and by which drafter, is
    decided before, by running means, by what tables say, and by the tokens drawn so far. What was drawn is never
    dropped."""

    def draft(self, context: DraftContext, rows: int, depth: int) -> Passes[Draft]:
        self._begin(context, depth)
        most, tree, order = min(rows, self._most), _Tree(), count()
        slots: list[tuple[float, int, int, Drafter, int, float, float]] = []

        def offer(node: int, drafter: Drafter, rank: int, left: float, estimate: float) -> None:
            """Queue a draw behind a node, `left` being how likely it is that none before it there is accepted."""
            if estimate > 0:
                likely = tree.likely_of(node) * estimate
                heapq.heappush(slots, (-likely, next(order), node, drafter, rank, left, estimate))

        def look(node: int) -> Passes[None]:
            drafter, estimate = yield from self._most_promising(tree.path(node), tree.likely_of(node), len(tree))
            if drafter is not None:
                offer(node, drafter, 0, 1.0, estimate)

        if min(most, depth) > 0:
            yield from look(-1)
        while slots and len(tree) < most:
            _, _, node, drafter, rank, left, estimate = heapq.heappop(slots)
            path, likely, ms = tree.path(node), tree.likely_of(node), self._price(drafter.name)
            # The draft has grown since it was queued.
            pays = self._ahead(likely, estimate, len(tree), ms) > 0
            if not pays or not self._covers(len(tree) + 1, ms=0.0 if rank else ms):
                continue
            if rank == 0:
                self._asked[path] = yield from self._guesses(drafter, path, self.width)
            if rank == len(drawn := self._asked[path]):
                continue
            estimate = min(drawn[rank].estimate, left)
            tree.add(drawn[rank], node, likely * estimate)
            if rank + 1 < self.width:
                left -= estimate
                offer(node, drafter, rank + 1, left, min(self._acceptance.mean(drafter.name, rank + 1), left))
            if len(path) + 1 < depth:
                yield from look(len(tree) - 1)
        self._hope_for(len(tree))
        draft = tree.cut(len(tree))
        # Without what a shared pass would cut it by: drafts that were drawn are verified whole.
        return Draft(draft.guesses, draft.parents, draft.sources)

    def _most_promising(self, path: Sequence[int], likely: float, size: int) -> Passes[tuple[Drafter | None, float]]:
        """Whose guess is worth most as far as can be said before it is drawn, and its estimate; None: none pays."""
        best: Drafter | None = None
        best_estimate, most = 0.0, 0.0
        for drafter in self._drafters:
            name, estimate = drafter.name, self._acceptance.mean(drafter.name)
            if not drafter.draws:
                # What a table says depends on tokens before only, so it may be looked at.
                guesses = yield from guessed(drafter, self._context, path, 1)
                estimate = self._acceptance.estimate(name, guesses[0].sign) if guesses else 0.0
            if (worth := self._worth_asking(drafter, likely, estimate, size)) > most:
                best, best_estimate, most = drafter, estimate, worth
        return best, best_estimate
