"""A draft as it grows: the nodes that may be added and those that were, with how likely each path is."""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess

# A guess that counts as certain.
_SURE = 0.995


class Asked(NamedTuple):
    """A guess with what it was estimated at, before and after what is known of guesses that were taken.

    Attributes:
        rank: guesses of the same drafter for the same place before it.
    """

    drafter: str
    guess: Guess
    rank: int
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
