"""Decides, round by round, what to draft: which drafter's token next, and where to stop.

The rules are the renewal-reward ones (algorithms.md A4): of all lengths of a draft, none included, the one of most
expected tokens per millisecond is verified; and a drafter is asked for one more token while that is worth more than R
times its milliseconds, R being the tokens per millisecond that decoding achieves. A cascade of drafters is nothing
special: at every place the guess of most worth is taken, whoever made it.
All times are the device's measured costs, never a clock's: the same costs and the same texts give the same decisions.
What guesses and reading really took is noted for the costs of later replies.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Generator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from edgeinfer.runtime.decoding.sequence import Passes, run_alone
from edgeinfer.runtime.planning.economics import CHEAP, look_ahead, tokens_per_ms
from edgeinfer.runtime.speculation.acceptance import SUREST, Acceptance, Answer, Mixer, Mixture
from edgeinfer.runtime.speculation.budget import LossBudget, Trials
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter, Guess, Round

# A guess that counts as certain.
_SURE = 0.995


class Asked(NamedTuple):
    """A guess with what it was estimated at, before and after what is known of guesses that were taken."""

    drafter: str
    guess: Guess
    rank: int  # guesses of the same drafter for the same place before it
    raw: float
    estimate: float


class NodeCandidate(NamedTuple):
    """A node that may be added: the likeliest path comes first, of equals the one that was found first."""

    unlikely: float
    order: int  # unlike any other's, so that nothing behind it is compared
    parent: int
    asked: Asked
    main_branch: bool


class Tree:
    """A draft as it grows, with the probability of every path."""

    def __init__(self) -> None:
        self.nodes: list[Asked] = []
        self.parents: list[int] = []
        self.likely: list[float] = []
        self.paths: list[list[int]] = []
        self.main_branch: list[bool] = []
        self.expected = 1.0
        self.sure = 0  # nodes of a chain from the root that are as good as certain
        self.found = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, candidate: NodeCandidate) -> None:
        self.nodes.append(candidate.asked)
        self.parents.append(candidate.parent)
        self.likely.append(-candidate.unlikely)
        self.paths.append([*self.path(candidate.parent), candidate.asked.guess.token])
        self.main_branch.append(candidate.main_branch)
        self.expected -= candidate.unlikely
        # What a grammar forces, and what was right so often that it may count as such.
        if candidate.asked.estimate >= _SURE and self.sure == candidate.parent + 1 == len(self.nodes) - 1:
            self.sure += 1

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else self.paths[node]

    def cut(self, length: int) -> Draft:
        nodes = self.nodes[:length]
        return Draft(
            tuple(asked.guess for asked in nodes),
            tuple(self.parents[:length]),
            tuple(asked.drafter for asked in nodes),
            tuple(self.likely[:length]),
        )


# A draft must beat the empty one by this factor: a measured c(m) is good to a few percent.
_MARGIN = 1.02
# Places looked ahead to see whether a step of c(m), as from two rows to four, pays by its end.
_AHEAD = 6
# A path less likely than this cannot pay: no c(m) has a row for a fiftieth of a pass.
_LEAST = 0.02
# Rounds that R averages over.
_ROUNDS = 16.0
# Guesses of drafters that cost a good part of a pass that are not paid for yet, in each reply: without any, the first
# would have to wait for dozens of tokens.
_TRIES = 2
# Drafts of a reply that may be longer than any pass that the session has run often: up to twice as long, in the hope
# that such a pass costs at most so much more than the longest known one. Otherwise costs that a busy moment spoiled, by
# which no longer draft pays, would never be found out.
_LONGER_TRIES, _HOPED = 2, 1.25
# How fast the estimate of a costly drafter that is no longer asked recovers: some seventy rounds to half.
_RECOVERY = 0.01
# Tokens read at once that tell what reading takes: of few the guess behind them is most of the time.
_TELLING = 16


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
        costly = [0.0 if ms <= self._cheap_ms else ms for ms in self._guess_ms.values()]
        self._budget = LossBudget(self._pass_ms[0], self._pass_ms[min(1, most)] + min(costly, default=0.0))
        self._tokens, self._ms = 1.0, self._pass_ms[0] + costs.round_ms
        self._estimates = {drafter.name: acceptance.mean(drafter.name) for drafter in drafters}
        self._first_estimates = dict(self._estimates)
        self._asked: dict[tuple[int, ...], list[Asked]] = {}
        self._mixer = Mixer(acceptance.mixing, drafters)
        self._mixtures: dict[tuple[int, ...], Mixture] = {}  # of the places in `_asked` where several may be asked
        self._at_work: Drafter | None = None
        self._paid: set[str] = set()  # drafters whose further guesses of this round cost nothing
        self._asked_drafters: Sequence[Drafter] = self._drafters
        self._watched: int | None = None  # the surest guess for a plain step
        self._spent = self._least_ms = self._watching_ms = self.watched_ms = self._reading_ms = 0.0
        self._unread: dict[str, int] = {}  # tokens by drafter, as far as known in this round
        self._context: DraftContext  # of the round
        self._rounds_left = 1.0  # that the reply is expected to have
        self.timed_guesses: list[tuple[str, float]] = []
        self.timed_reading: list[tuple[str, float]] = []
        self._tries = _TRIES

    def _reprice(self, costs: RoundCosts) -> None:
        """Go by other costs of passes from now on, by which it finds out again whether drafting is faster."""
        self._pass_ms = [costs.pass_ms(rows) for rows in range(1, self._most + 2)]
        self._confirmed, self._longer_tries = costs.confirmed, _LONGER_TRIES
        known = self._pass_ms[: self._confirmed]
        hoped = self._pass_ms[self._confirmed : 2 * self._confirmed]
        # By these it is decided what to draft, by those above what it was worth.
        self._prices = known + [min(ms, _HOPED * known[-1]) for ms in hoped] + self._pass_ms[2 * self._confirmed :]
        self._cheap_ms = CHEAP * self._pass_ms[0]
        self._asking_ms = self._round_ms + sum(ms for ms in self._guess_ms.values() if ms <= self._cheap_ms)
        cheap = [d for d in self._drafters if self._guess_ms[d.name] <= self._cheap_ms]
        # Plain steps keep no rows but their own.
        self._tables = [d for d in cheap if not (d.draws or d.uses_target)]
        self._trials = Trials()

    @property
    def rest(self) -> int:
        """Plain steps before a drafter is asked: plain decoding was faster, or asking is not paid for yet."""
        return max(self._trials.rest, self._budget.steps_to_save(self._asking_ms))

    @property
    def asks(self) -> bool:
        """Whether drafters are asked for anything as things are; until they are, they need not know the text."""
        return True

    @property
    def guessed_ms(self) -> float:
        """What the last draft's guesses cost, with what was read for them."""
        return self._spent + self._reading_ms

    @property
    def watches(self) -> bool:
        """Whether tables are to be judged by the next plain step: a few right guesses pay for an early draft."""
        return (
            bool(self._tables)
            and not self._trials.rest
            and self._budget.may_trust_tables(self._asking_ms)
            and self.asks
        )

    def watch(self, context: DraftContext) -> None:
        """Has tables guess the token of a plain step, which is not drafted."""
        self._forget_draft()
        self._asked_drafters = self._tables
        asked = run_alone(self._ask(context, [], 1.0, 0, True))  # tables take no passes
        self._watched = max(asked, key=attrgetter("estimate")).guess.token if asked else None

    def watched(self, token: int) -> None:
        """Learn the token of that step."""
        self._budget.judge(token == self._watched)
        self._watching_ms += self._spent

    def rested(self, steps: int) -> None:
        """Learn that so many plain steps were taken, of which some may have been watched."""
        self.watched_ms, self._watching_ms = self._watching_ms, 0.0
        ms, kept = self._pass_ms[0] * steps + self.watched_ms, (1 - 1 / _ROUNDS) ** steps
        self._tokens, self._ms = self._tokens * kept + steps, self._ms * kept + ms
        self._budget.add_steps(steps, ms)
        self._trials.rested(steps)

    @property
    def rate(self) -> float:
        """Tokens per millisecond that decoding achieves, by the costs' reckoning."""
        return self._tokens / self._ms

    def draft(self, context: DraftContext, rows: int, depth: int) -> Passes[Draft]:
        """Build the draft to verify next; empty where nothing pays."""
        self._begin(context, depth)
        most, tree = min(rows, self._most), Tree()
        best, length = self._worth(tree), 0
        waiting = (yield from self._children(context, tree, -1)) if min(most, depth) > 0 else []
        heapq.heapify(waiting)
        while waiting and len(tree) < most:
            candidate = heapq.heappop(waiting)
            tree.add(candidate)
            worth = self._worth(tree)
            ms = self._prices[len(tree)] + self._spent
            if worth > best and self._beats_plain(tree) and self._budget.covers(ms, 1 + tree.sure):
                best, length, self._least_ms = worth, len(tree), self._prices[len(tree)]
            asked, node = candidate.asked, len(tree) - 1
            likely, ms = tree.likely[node], self._price(asked.drafter)
            pays = likely > _LEAST and self._ahead(likely, asked.estimate, len(tree), ms) > 0
            # Guesses that come to nothing must be paid for too.
            goes_on = len(tree) < most and len(tree.path(node)) < depth
            if goes_on and pays and self._budget.covers(self._least_ms + self._spent, 1 + tree.sure):
                for child in (yield from self._children(context, tree, node)):
                    heapq.heappush(waiting, child)
        self._hope_for(length)
        return tree.cut(length)

    def _hope_for(self, length: int) -> None:
        """Count a draft whose pass may cost more than it is hoped to."""
        if 1 + length > self._confirmed and self._longer_tries:
            self._longer_tries -= 1
            if not self._longer_tries:
                self._prices = self._pass_ms

    def observe(self, round: Round) -> None:
        """Learn from what became of the last draft."""
        committed = round.committed
        for depth, token in enumerate(committed):
            if not (here := self._asked.get(committed[:depth])):
                continue
            for asked in here:
                came, sign = asked.guess.token == token, asked.guess.sign
                self._acceptance.observe(asked.drafter, sign, depth, came, asked.rank)
            top = max(here, key=attrgetter("estimate"))
            self._acceptance.observe_taken(top.drafter, top.raw, top.guess.token == token)
            if mixture := self._mixtures.get(committed[:depth]):
                self._mixer.observe(mixture, token)
        asked_now = {asked.drafter for every in self._asked.values() for asked in every}
        for name, estimate in self._estimates.items():
            recovered = estimate + (self._first_estimates[name] - estimate) * _RECOVERY
            self._estimates[name] = self._acceptance.mean(name) if name in asked_now else recovered
        kept = 1 - 1 / _ROUNDS
        ms = self._pass_ms[len(round.draft)] + self._spent + self._round_ms
        self._tokens, self._ms = self._tokens * kept + len(committed), self._ms * kept + ms
        self._budget.add_round(len(committed), ms)
        self._trials.add_round(ms - len(committed) * self._pass_ms[0])

    def _begin(self, context: DraftContext, depth: int) -> None:
        self._budget.begin_round()
        self._forget_draft()
        self._context = context
        # Nothing tells how long a reply will be: it is taken to go on for as long as it has until now.
        self._rounds_left = max(1.0, min(self._budget.said, depth) / max(1.0, self.rate * self._pass_ms[0]))
        # Of the pass to come: guesses leave enough for what they are for, the best draft so far or the shortest.
        self._least_ms = self._pass_ms[min(1, self._most)]
        # The loan is for drafters that were right, so no others are asked.
        self._asked_drafters = self._tables if self._budget.trusts_tables else self._drafters

    def _forget_draft(self) -> None:
        self._asked, self._mixtures, self._at_work, self._spent, self._reading_ms = {}, {}, None, 0.0, 0.0
        self._paid.clear()
        self._unread.clear()
        self.timed_guesses, self.timed_reading = [], []

    def _worth(self, tree: Tree) -> float:
        # Not tokens less R times milliseconds, which R* would make the same: R lags, and cost 2 to 5% (docs/log).
        return tokens_per_ms(tree.expected, self._prices[len(tree)], self._spent, self._round_ms)

    def _beats_plain(self, tree: Tree) -> bool:
        return self._worth(tree) > _MARGIN * tokens_per_ms(1.0, self._pass_ms[0], 0.0, self._round_ms)

    def _price(self, name: str) -> float:
        """What a drafter's next guess costs."""
        return 0.0 if name in self._paid else self._guess_ms[name]

    def _to_read(self, drafter: Drafter) -> float:
        """What a drafter's reading before its next guess costs. All drafts to come have the use of it."""
        name, price = drafter.name, self._read_ms[drafter.name]
        if price and name not in self._unread:  # once a round, as some copy the text to tell
            self._unread[name] = drafter.unread(self._context)
        return price * self._unread.get(name, 0)

    def _due(self, drafter: Drafter) -> float:
        """What savings have to pay of that."""
        return self._budget.reading_due(self._to_read(drafter))

    def _paid_guesses(
        self, drafter: Drafter, context: DraftContext, path: Sequence[int], width: int
    ) -> Passes[Sequence[Guess]]:
        """Guesses behind a path, which the draft pays for."""
        name, price, reading = drafter.name, self._price(drafter.name), self._to_read(drafter)
        unread = self._unread.pop(name, 0)
        self._spent += price
        self._reading_ms += reading  # which is no part of what this draft is worth
        self._budget.add_reading(reading)
        if drafter.at_once:
            self._paid.add(name)
        if drafter.uses_target:
            self._at_work = drafter
        started = time.perf_counter_ns()
        found = drafter.guesses(context, path, width if drafter.branches else 1)
        guesses = (yield from found) if isinstance(found, Generator) else found
        ms = (time.perf_counter_ns() - started) / 1e6
        if guesses and unread >= _TELLING:
            self.timed_reading.append((name, max(0.0, ms - price) / unread))
        elif price and guesses:
            self.timed_guesses.append((name, max(0.0, ms - reading)))
        return guesses

    def _ahead(self, likely: float, acceptance: float, size: int, guess_ms: float, *, once: bool = False) -> float:
        """The most that further nodes behind a path are worth if each is accepted with this probability."""
        most = min(_AHEAD, self._most - size)
        return look_ahead(self._prices, size, most, likely, acceptance, self.rate, guess_ms, once=once).worth

    def _worth_asking(self, drafter: Drafter, likely: float, acceptance: float, size: int) -> float:
        """What guesses are worth that a drafter has not made yet, less this round's share of what it reads before."""
        worth = self._ahead(likely, acceptance, size, self._price(drafter.name), once=drafter.at_once)
        return worth - self.rate * self._to_read(drafter) / self._rounds_left

    def _children(self, context: DraftContext, tree: Tree, node: int) -> Passes[list[NodeCandidate]]:
        """The guesses that may follow a node, each token once, at the estimate of whoever is surest of it."""
        path = tree.path(node)
        likely, main_branch = (tree.likely[node], tree.main_branch[node]) if node >= 0 else (1.0, True)
        asked = yield from self._ask(context, path, likely, len(tree), main_branch)
        self._asked[tuple(path)] = asked
        if not asked:
            return []
        surest: dict[int, Asked] = {}
        for a in sorted(asked, key=lambda a: -a.estimate):
            surest.setdefault(a.guess.token, a)
        candidates, left = [], 1.0
        for rank, a in enumerate(list(surest.values())[: self.width]):
            # At most one of different tokens comes true.
            estimate = min(a.estimate, left)
            left -= estimate
            candidates.append(NodeCandidate(-likely * estimate, tree.found, node, a, main_branch and rank == 0))
            tree.found += 1
        return candidates

    def _ask(
        self, context: DraftContext, path: list[int], likely: float, size: int, main_branch: bool
    ) -> Passes[list[Asked]]:
        answers: list[Answer] = []
        mixture, asked = self._mixed(answers)
        for drafter in self._asked_drafters:
            name, ms, reading = drafter.name, self._price(drafter.name), self._to_read(drafter)
            if ms + reading > self._cheap_ms:
                # Another's rows would be lost: only one drafter works on the target's cache at a time.
                if drafter.uses_target and self._at_work not in (None, drafter):
                    continue
                if len(asked) < len(answers):
                    mixture, asked = self._mixed(answers)
                best, whose = self._best(mixture, asked)
                without = self._ahead(likely, best, size, self._price(whose) if whose else 0.0)
                if self._worth_asking(drafter, likely, self._estimates[name], size) <= without:
                    continue
                due = self._budget.reading_due(reading)
                if not self._budget.covers(self._least_ms + self._spent + ms + due):
                    if due or not self._tries or not main_branch:
                        continue
                    self._tries -= 1
            for rank, guess in enumerate((yield from self._paid_guesses(drafter, context, path, self.width))):
                estimate = self._acceptance.estimate(name, guess.sign, len(path), rank)
                answers.append(Answer(name, rank, guess, estimate))
        if len(asked) < len(answers):
            mixture, asked = self._mixed(answers)
        self._mixtures[tuple(path)] = mixture
        return asked

    def _best(self, mixture: Mixture, asked: Sequence[Asked]) -> tuple[float, str | None]:
        """The highest probability of a guess so far, set against what is yet to be asked, and whose it is."""
        if not asked:
            return 0.0, None
        best = max(asked, key=attrgetter("estimate"))
        return self._mixer.against_tables(mixture, best.estimate), best.drafter

    def _mixed(self, answers: Sequence[Answer]) -> tuple[Mixture, list[Asked]]:
        """What the answers for a place say together, and what each is worth then."""
        mixture, asked = self._mixer.mix(tuple(answers)), []
        for drafter, rank, guess, _ in answers:
            raw = min(mixture.probabilities[guess.token], SUREST)
            asked.append(Asked(drafter, guess, rank, raw, self._acceptance.reliable(drafter, raw)))
        return mixture, asked
