"""Drafters with heads: what they hear of states, which rows of passes they read, and products on one thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.bundle.additions import Heads
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CapabilityError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.sequence import Passes as Waiting
from edgeinfer.runtime.decoding.sequence import Sequence, run_alone
from edgeinfer.runtime.research.heads import Matrix
from edgeinfer.runtime.research.medusa import MedusaDrafter
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.controller import DraftController
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Round
from edgeinfer.runtime.speculation.drafters.module_drafter import TargetStates, Unread
from tests.alone import Alone
from tests.heads import random_heads
from tests.runtime.speculation.drafters.models import export, pair
from tests.runtime.speculation.prices import FLAT, Prices, eager_rounds
from tests.tables import each_row

PROMPT = [40, 51, 62, 73, 84, 95, 40, 51]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export("reference")


def test_a_product_is_that_of_the_whole_matrix() -> None:
    for count, width in ((1, 1), (5, 3), (64, 128), (1024, 96), (7, 9001), (3, 20000)):
        rng = np.random.default_rng(count)
        values, vector = rng.standard_normal((count, width)).astype(np.float16), rng.standard_normal(width)
        matrix, given = Matrix(values), vector.astype(np.float32)
        expected = values.astype(np.float64) @ given
        np.testing.assert_allclose(matrix @ given, expected, rtol=1e-4, atol=1e-3)
        assert matrix.nbytes >= 4 * values.size
        # No part of it is so large that a BLAS would take threads for it.
        assert all(part.size <= max(9216, width) for part in matrix._stacked)


class Listener(MedusaDrafter):
    """Keeps the states that rounds show."""

    def __init__(self, target: Backend, cache: KVCache, heads: Heads) -> None:
        super().__init__(target, cache, heads)
        self.told: list[tuple[int, Floats]] = []

    def observe(self, round: Round) -> None:
        super().observe(round)
        assert round.hidden is not None
        self.told.append((round.committed[-1], self._state.copy()))


class Resting(DraftController):
    """Takes three plain steps before every round."""

    pause = 3

    @property
    def rest(self) -> int:
        return self.pause

    def rested(self, steps: int) -> None:
        super().rested(steps)
        self.pause = 0

    def draft(self, context: DraftContext, rows: int, depth: int) -> Waiting[Draft]:
        self.pause = 3
        return super().draft(context, rows, depth)


@each_row("kind", [DraftController, Resting])
def test_every_round_shows_the_state_that_predicted_the_root(bundle: Bundle, kind: type[DraftController]) -> None:
    backend = Alone(ReferenceBackend(bundle, 64), 64)
    drafter = Listener(*pair(backend), random_heads(bundle, "medusa"))
    sampler = Sampler(LogitsProcessor(ReplyOptions(), backend.geometry.vocab_size, 0), PROMPT, None)
    sequence = Sequence(*pair(backend), 8)
    rounds = eager_rounds(sequence, sampler, [drafter], Prices(FLAT), kind=kind, most=3)
    steps = sequence.generate(PROMPT, sampler, max_tokens=16, stop_ids=frozenset(), strategy=rounds)
    text = [*PROMPT, *(step.token for step in steps)]
    assert len(drafter.told) >= 3
    backend.cache.trim(0)
    whole = backend.forward(Pass(np.array(text), np.arange(len(text)), np.arange(len(text))))
    assert whole.hidden is not None
    for token, state in drafter.told:
        matches = [p for p in range(len(PROMPT), len(text)) if np.allclose(whole.hidden[p - 1], state, atol=1e-3)]
        assert any(text[place] == token for place in matches)


def test_targets_without_states_are_refused(bundle: Bundle) -> None:
    backend = ReferenceBackend(bundle, 16)
    backend.capabilities = replace(backend.capabilities, hidden=False)
    with pytest.raises(CapabilityError, match="hidden states"):
        MedusaDrafter(backend, backend.new_sequence(16), random_heads(bundle, "medusa"))


# Behind the root 5 come 6 and 7, in rows 2 and 3 of the tree.
TREE, PARENTS, DEPTHS = (5, 9, 6, 7), (-1, 0, 0, 2), (0, 1, 1, 2)


class Passes:
    """States that follow made-up passes, and what was read of them, by row."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[int, float]] = {}
        self.states = TargetStates(1, lambda output: output.hidden, self._read, lambda rows: None)

    def _read(self, unread: Unread) -> Waiting[None]:
        yield from ()
        for row, token, state in zip(unread.positions.tolist(), unread.tokens.tolist(), unread.states, strict=True):
            self.read[row] = token, float(state[0])

    def run(self, start: int, tokens: tuple[int, ...], first_state: float, *, tree: bool = False) -> None:
        """A pass whose rows' states are `first_state` and the numbers behind it."""
        size = len(tokens)
        places = start + (np.array(DEPTHS) if tree else np.arange(size))
        parents = np.array(PARENTS) if tree else None
        batch = Pass(np.array(tokens), places, np.zeros(1, np.int64), tree=parents)
        hidden = np.arange(first_state, first_state + size, dtype=np.float32)[:, None]
        self.states.observe(start, batch, PassResult(np.zeros((1, 1), np.float32), hidden))


@each_row(
    ("again", "read"),
    [
        # The rows before it are the tree's, and rows that waited before the tree still wait.
        (7, {0: (4, 0.0), 1: (5, 1.0), 2: (6, 10.0), 3: (7, 12.0), 4: (8, 20.0)}),
        (1, {0: (4, 0.0), 1: (5, 1.0), 2: (6, 10.0), 3: (1, 12.0), 4: (8, 20.0)}),
    ],
)
def test_the_last_row_of_a_path_that_was_passed_again(again: int, read: dict[int, tuple[int, float]]) -> None:
    passes = Passes()
    passes.run(0, (3, 4), 0.0)
    assert passes.states.waiting == 2
    passes.run(2, TREE, 10.0, tree=True)
    passes.states.keep([0, 2, 3])
    passes.run(4, (again,), 20.0)
    assert run_alone(passes.states.catch_up(5, 8))
    assert passes.read == read and passes.states.waiting == 0
