"""Which rows of a target's passes a draft module reads."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput
from edgeinfer.runtime.speculation.drafters.module_drafter import TargetStates, Unread
from tests.tables import each_row

# Behind the root 5 come 6 and 7, in rows 2 and 3 of the tree.
TREE, PARENTS, DEPTHS = (5, 9, 6, 7), (-1, 0, 0, 2), (0, 1, 1, 2)


class Passes:
    """States that follow made-up passes, and what was read of them, by row."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[int, float]] = {}
        self.states = TargetStates(1, lambda output: output.hidden, self._read, lambda rows: None)

    def _read(self, unread: Unread) -> None:
        for row, token, state in zip(unread.positions.tolist(), unread.tokens.tolist(), unread.states, strict=True):
            self.read[row] = token, float(state[0])

    def run(self, start: int, tokens: tuple[int, ...], first_state: float, *, tree: bool = False) -> None:
        """A pass whose rows' states are `first_state` and the numbers behind it."""
        size = len(tokens)
        places = start + (np.array(DEPTHS) if tree else np.arange(size))
        parents = np.array(PARENTS) if tree else None
        batch = ForwardInput(np.array(tokens), places, np.zeros(1, np.int64), tree=parents)
        hidden = np.arange(first_state, first_state + size, dtype=np.float32)[:, None]
        self.states.observe(start, batch, ForwardOutput(np.zeros((1, 1), np.float32), hidden))


@each_row(
    ("again", "read"),
    [
        # The rows before it are the tree's, and rows that waited before the tree still wait.
        (7, {0: (4, 0.0), 1: (5, 1.0), 2: (6, 10.0), 3: (7, 12.0), 4: (8, 20.0)}),
        # Another text is not taken for a path of the tree.
        (1, {4: (8, 20.0)}),
    ],
)
def test_the_last_row_of_a_path_that_was_passed_again(again: int, read: dict[int, tuple[int, float]]) -> None:
    passes = Passes()
    passes.run(0, (3, 4), 0.0)
    assert passes.states.waiting == 2
    passes.run(2, TREE, 10.0, tree=True)
    passes.run(4, (again,), 20.0)
    passes.states.keep([0, 2, 3])
    assert passes.states.catch_up(5, 8)
    assert passes.read == read and passes.states.waiting == 0
