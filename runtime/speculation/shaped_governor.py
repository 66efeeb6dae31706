"""Trees drawn depth by depth without replacement (Recursive Speculative Decoding, Jeon et al. 2024, arXiv 2402.14160).

RSD-C draws as many siblings behind every node of a depth as a branching vector says. RSD-S keeps the best paths of a
depth by stochastic beam search (Kool et al. 2019, arXiv 1903.06059), here as a race: a path of probability p arrives
after an exponential time of rate p, and the first ones are kept. A path's first child arrives when the path itself
does; behind k siblings the next one takes an exponential time of rate p times what the k have left of the distribution.
So whether a sibling is drawn depends on those before it and on times, never on itself, and verification by recursive
rejection gives the target's distribution (rejection.py).

Another depth is drawn while the tokens drawn so far promise more of it than it costs. That decides about tokens which
are not drawn yet, so it may look at all that are.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial

from edgeinfer.config import GenerationConfig
from edgeinfer.records import dataclass
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.draft_tree import Asked
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter
from edgeinfer.runtime.speculation.governor import Governor, RoundCosts
from edgeinfer.runtime.speculation.stochastic_governor import ChainsGovernor, StochasticGovernor
from edgeinfer.runtime.speculation.verification import VerificationRule

# Depths looked ahead to see whether a step of c(m) pays by its end.
_AHEAD = 6


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the depth that is drawn behind.

    Attributes:
        index: of the draft; -1 is the root.
        path: tokens from the root's child to it.
        likely: how likely it is that all of them are accepted.
        probability: of the path, as the drafter has it.
        arrives: when it arrives in the race; 0 where there is none.
    """

    index: int
    path: tuple[int, ...]
    likely: float
    probability: float = 1.0
    arrives: float = 0.0


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A token drawn behind a node of the draft; `node` is itself, whose index says where it is put."""

    asked: Asked
    parent: int
    node: _Node


@dataclass(frozen=True, slots=True, order=True)
class _Runner:
    """The next sibling behind a node of the race; `left` is what the `rank` before it have left of the distribution."""

    arrives: float
    order: int
    node: _Node = field(compare=False)
    rank: int = field(compare=False)
    left: float = field(compare=False)


class _ShapedGovernor(StochasticGovernor):
    """Draws a tree depth by depth from the most promising drafter; drafters without distributions are its base's."""

    def draft(self, context: DraftContext, rows: int, depth: int) -> Draft:
        """What to verify next; see `Governor.draft`."""
        self._begin(context, depth)
        most = min(rows, self._most)
        drafter = self._most_promising(context, (), 1.0, 0)[0] if min(most, depth) > 0 else None
        if drafter is None or not drafter.draws:
            return super().draft(context, rows, depth)
        drawn: list[_Drawn] = []
        level = [_Node(-1, (), 1.0)]
        while level and len(level[0].path) < depth and self._depth_pays(drafter, level, len(drawn), most):
            found = list(self._grown(context, drafter, level, len(drawn)))
            drawn += found
            level = [each.node for each in found]
        self._hope_for(len(drawn))
        guesses, parents = tuple(each.asked.guess for each in drawn), tuple(each.parent for each in drawn)
        return Draft(guesses, parents, (drafter.name,) * len(drawn))

    @abstractmethod
    def _rows(self, depth: int, nodes: int) -> int:
        """How many tokens are drawn behind so many nodes of a depth, the root's being 0."""

    @abstractmethod
    def _grown(self, context: DraftContext, drafter: Drafter, level: Sequence[_Node], size: int) -> Iterator[_Drawn]:
        """Draws behind the nodes of a depth of a draft of so many tokens: of each node's children the eldest first."""

    def _depth_pays(self, drafter: Drafter, level: Sequence[_Node], size: int, most: int) -> bool:
        """Whether the next depth of a draft of so many tokens, with what may follow, is worth its time."""
        name, reached, depth = drafter.name, sum(node.likely for node in level), len(level[0].path)
        ms, nodes, gained, spent = self._price(name), len(level), 0.0, 0.0
        rows, pass_ms, due = size, self._prices[size], self._due(drafter)
        for further in range(depth, depth + _AHEAD):
            drawn = self._rows(further, nodes)
            rows, spent = rows + drawn, ms if drafter.at_once else spent + ms * nodes
            if drawn == 0 or rows > most:
                return False
            if further == depth and not self._account.affords(self._prices[rows] + self._spent + spent + due):
                return False
            reached *= self._any(name, drawn / nodes)
            gained, nodes = gained + reached, drawn
            if gained > self.rate * (self._prices[rows] - pass_ms + spent):
                return True
        return False

    def _any(self, name: str, siblings: float) -> float:
        """How likely one of so many siblings is accepted where their place is reached."""
        estimates = (self._estimates[name], *self._siblings[name])
        return min(1.0, sum(share * min(1.0, max(0.0, siblings - rank)) for rank, share in enumerate(estimates)))

    def _draw(self, context: DraftContext, drafter: Drafter, node: _Node, rank: int) -> Asked | None:
        """The next sibling behind a node, after `rank` of them; None where nothing is left."""
        if rank == 0:
            guesses = self._paid_guesses(drafter, context, node.path, 1)
        else:
            guesses = drafter.guesses(context, node.path, rank + 1 if drafter.branches else 1)
        if rank >= len(guesses):
            return None
        asked = self._estimated(drafter.name, rank, guesses[rank], len(node.path))
        self._asked.setdefault(node.path, []).append(asked)
        return asked


class BranchingGovernor(_ShapedGovernor):
    """Draws as many siblings behind every node of a depth as a branching vector says (RSD-C); arguments as its base.

    Args:
        branching: siblings by depth, at most `width`; there is no depth behind them.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: RoundCosts,
        acceptance: Acceptance,
        most: int,
        width: int,
        *,
        branching: Sequence[int],
    ) -> None:
        super().__init__(drafters, costs, acceptance, most, width)
        self._branching = tuple(branching)

    def _rows(self, depth: int, nodes: int) -> int:
        return nodes * self._branching[depth] if depth < len(self._branching) else 0

    def _grown(self, context: DraftContext, drafter: Drafter, level: Sequence[_Node], size: int) -> Iterator[_Drawn]:
        for node in level:
            left = 1.0
            for rank in range(self._branching[len(node.path)]):
                asked = self._draw(context, drafter, node, rank)
                if asked is None:
                    break
                estimate = min(asked.estimate, left)
                left -= estimate
                yield _Drawn(asked, node.index, _Node(size, (*node.path, asked.guess.token), node.likely * estimate))
                size += 1


class BeamGovernor(_ShapedGovernor):
    """Keeps the `width` paths of every depth that arrive first (RSD-S)."""

    def _rows(self, depth: int, nodes: int) -> int:
        return self.width

    def _grown(self, context: DraftContext, drafter: Drafter, level: Sequence[_Node], size: int) -> Iterator[_Drawn]:
        depth, draws = len(level[0].path), 0
        race = [_Runner(node.arrives, order, node, 0, 1.0) for order, node in enumerate(level)]
        heapq.heapify(race)
        taken = dict.fromkeys((node.index for node in level), 1.0)  # of acceptance, what siblings left
        while race and draws < self.width:
            runner = heapq.heappop(race)
            node = runner.node
            asked = self._draw(context, drafter, node, runner.rank)
            if asked is None:
                continue
            guess, draws = asked.guess, draws + 1
            share = 1.0 if guess.probabilities is None else float(guess.probabilities[guess.token])
            estimate = min(asked.estimate, taken[node.index])
            taken[node.index] -= estimate
            path, probability = (*node.path, guess.token), node.probability * share
            yield _Drawn(asked, node.index, _Node(size, path, node.likely * estimate, probability, runner.arrives))
            size += 1
            left = runner.left - share
            rate = node.probability * left
            if rate > 0:
                arrives = runner.arrives - math.log1p(-context.chance(depth, draws)) / rate
                heapq.heappush(race, _Runner(arrives, len(level) + draws, node, runner.rank + 1, left))


def stochastic_governor(verification: VerificationRule, config: GenerationConfig) -> Callable[..., Governor]:
    """The governor of drafts that a rule verifies by ratio."""
    if verification.iid_chains:
        return ChainsGovernor
    if config.draft_tree == "beam":
        return BeamGovernor
    return partial(BranchingGovernor, branching=config.branching) if config.branching else StochasticGovernor
