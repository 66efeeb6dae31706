"""Draft trees as sequences of llama.cpp: one for each path from the root to a leaf; knows no context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.runtime.arrays import Ints

__all__ = ["Branches"]


@dataclass(frozen=True)
class Branches:
    """The paths of a tree. The first belongs to sequence 0, which holds the context, the next to sequence 1 and so on.

    Attributes:
        start: tokens of the context.
        paths: rows of each path, from the root on.
        members: sequences that each row belongs to, ascending.
    """

    start: int
    paths: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: Ints, start: int) -> Branches:  # (S,)
        """The paths of a tree, each row naming its parent among the earlier rows, or -1, behind so many tokens."""
        parents = tree.tolist()
        leaves = sorted(set(range(len(parents))) - set(parents))
        paths, members = [], [list[int]() for _ in parents]
        for sequence, leaf in enumerate(leaves):
            path, row = [], leaf
            while row >= 0:
                path.append(row)
                members[row].append(sequence)
                row = parents[row]
            paths.append(tuple(reversed(path)))
        return cls(start, tuple(paths), tuple(map(tuple, members)))

    @property
    def depths(self) -> list[int]:
        """Of each row, 0 for roots."""
        depths = [0] * len(self.members)
        for path in self.paths:
            for depth, row in enumerate(path):
                depths[row] = depth
        return depths

    def sequence_of(self, rows: Sequence[int]) -> int | None:
        """The sequence whose path begins with these rows; None where they are no path."""
        wanted = tuple(rows)
        return next((s for s, path in enumerate(self.paths) if path[: len(wanted)] == wanted), None)
