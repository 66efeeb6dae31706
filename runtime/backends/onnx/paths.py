"""What paged attention is told of the rows of a pass: the path of each, as arrays that stay where a graph is bound to.

A path is the first slots of its sequence and then some further ones, the last of all the row's own
(edgeinfer.bundle.graph).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.paging.layout import pages_for

# Rows of a sequence beyond its capacity, for a pass's last row that is there again.
SPARE_ROWS = 1
# Columns of the number of first slots, and of a row's own where it names that.
_PREFIX, _OWN = 1, 2
_NAMES_ITS_SLOT = -1

# Slots of a row: how many of the first, and the further ones.
Path = tuple[int, Sequence[int]]


class PathTables:
    """Memory for the paths of passes of up to `size` rows.

    Args:
        capacity: rows of a sequence, padding included.
        slots: further slots there is room for.

    Attributes:
        rows: of each row its sequence, how many first slots it sees, where its further ones begin in `slots`, and how
            many they are. (S, 4)
        slots: further slots. (X,)
    """

    def __init__(self, size: int, capacity: int, slots: int = 1) -> None:
        self.rows: NDArray[np.int32] = np.zeros((size, 4), np.int32)
        self.slots: NDArray[np.int32] = np.zeros(slots, np.int32)
        self._counting: NDArray[np.int32] = np.arange(capacity + 1, dtype=np.int32)
        self._plain = True  # nothing but the second column is in use

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.rows.nbytes + self.slots.nbytes + self._counting.nbytes

    def tell_chain(self, start: int, size: int) -> None:
        """Tells of rows that follow `start` ones of the first sequence, each seeing all before it."""
        if not self._plain:
            self.rows[:] = 0
            self._plain = True
        self.rows[:size, _PREFIX] = self._counting[start + 1 : start + 1 + size]

    def tell_block(self, start: int, size: int, block: int) -> None:
        """Tells of rows that follow `start` ones of the first sequence, of which the last see all, the others nothing.

        A row sees something, be it the first slot. Who reads keys and values alone does not mind.
        """
        rows = self.rows[:size]
        rows[:] = 0, 1, 0, _NAMES_ITS_SLOT
        rows[:, _OWN] = self._counting[start : start + size]
        rows[size - block :, _PREFIX] = start + size
        self._plain = False

    def tell(self, sequences: Sequence[Sequence[Path]]) -> None:
        """Tells of the rows of each sequence, for whose further slots there must be room."""
        row = first = 0
        for sequence, paths in enumerate(sequences):
            for prefix, further in paths:
                self.rows[row] = sequence, prefix, first, len(further)
                self.slots[first : first + len(further)] = further
                first += len(further)
                row += 1
        self._plain = False


def pages_of(capacity: int) -> int:
    """Pages that a sequence of so many tokens takes: its rows', and one to share its last page with a copy of it."""
    return pages_for(capacity + SPARE_ROWS) + 1


def paths_of(start: int, size: int, tree: Ints | None) -> list[Path]:
    """The paths of `size` rows behind `start` ones: of a chain, where there is no tree."""
    if tree is None:
        return [(start + row + 1, ()) for row in range(size)]
    paths: list[Path] = []
    for slot, parent in enumerate(tree.tolist(), start):
        prefix, further = paths[parent] if parent >= 0 else (start, ())
        paths.append((slot + 1, ()) if prefix == slot else (prefix, (*further, slot)))
    return paths


def repeated(path: Path, slot: int) -> Path:
    """The path of a row that is another one again, in a slot behind all others."""
    prefix, further = path
    return (prefix, (*further[:-1], slot)) if further else (prefix - 1, (slot,))
