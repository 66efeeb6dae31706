"""What drafters with small heads over the state that predicted the root share: the state, products, output rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, require
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter

# OpenBLAS takes further threads from 9216 elements on.
_ALONE = 9000


class Matrix:
    """Multiplies a float32 matrix (N, K) by vectors on one thread.

    numpy's BLAS shares out larger products among threads of its own, which then fight with those of the execution
    engine for the same processors: while another program runs, a product of 0.07 ms took 16 ms on two cores, the time
    slice of a thread that it waited for. Products of few elements it leaves alone, so the matrix is kept as a stack of
    such.
    """

    def __init__(self, values: NDArray[np.floating]) -> None:  # (N, K)
        count, width = values.shape
        rows = min(count, max(1, _ALONE // width))
        stacked = np.zeros((-(-count // rows), rows, width), np.float32)
        stacked.reshape(-1, width)[:count] = values
        self._stacked = stacked
        self._product = np.empty(stacked.shape[:2], np.float32)
        self._count = count

    def __matmul__(self, vector: Floats) -> Floats:  # (K,) -> (N,)
        """The product; a view that the next one overwrites."""
        np.matmul(self._stacked, vector, out=self._product)
        product: Floats = self._product.reshape(-1)[: self._count]
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of matrix and buffer."""
        return self._stacked.nbytes + self._product.nbytes


def silu(x: Floats) -> Floats:
    """x times its sigmoid."""
    # exp of more than 88 is infinite in float32, and x / infinity the 0 that it should be.
    with np.errstate(over="ignore"):
        scaled: Floats = x / (1 + np.exp(-x))
    return scaled


class OutputRows:
    """Logits of the tokens that heads may guess; all others are impossible."""

    def __init__(self, heads: Heads, vocabulary: int) -> None:
        self._tokens = heads.arrays["tokens"].astype(np.int64)  # (K,)
        self._rows = Matrix(heads.arrays["rows"])  # (K, D)
        self._all = np.full(vocabulary, -np.inf, np.float32)
        self.places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def logits(self, state: Floats) -> Floats:  # (D,) -> (V,)
        """Logits of a state that is normed already; a view that the next call overwrites."""
        self._all[self._tokens] = self._rows @ state
        return self._all

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self._tokens, self._all)) + self._rows.nbytes


class StateDrafter(LogitDrafter):
    """A drafter with heads over the state that predicted the root, divided by its root mean square and times `norm`
    (D,). Until a round has shown that state, after a prompt, it has no guess."""

    def __init__(self, target: Backend, norm: NDArray[np.floating]) -> None:  # (D,)
        hint = "Use a natively exported bundle, or another drafter."
        require(target.capabilities.hidden, target, "show its hidden states", hint)
        super().__init__(target.geometry.vocab_size)
        self._norm = norm.astype(np.float32)  # (D,)
        self._state = np.zeros_like(self._norm)
        self._seen = self._normed = False

    def begin(self, tokens: Sequence[int]) -> None:
        """Waits for the first state of the new text."""
        super().begin(tokens)
        self._seen = False

    def observe(self, round: Round) -> None:
        """Keep the state that predicted the new root."""
        super().observe(round)
        self._seen = round.hidden is not None
        if round.hidden is not None:
            accepted = round.verdict.accepted
            self._state[:] = round.hidden[accepted[-1] + 1 if accepted else 0]
            self._normed = False

    def _latest(self) -> Floats | None:  # (D,)
        """The state after the norm; None where none is known."""
        if not self._seen:
            return None
        if not self._normed:
            self._state /= np.sqrt(np.dot(self._state, self._state) / len(self._state) + STATE_EPS)
            self._state *= self._norm
            self._normed = True
        return self._state

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        state = self._latest()
        return None if state is None else (yield from self._guessed(state, context, drafted))

    def _guessed(
        self, state: Floats, context: DraftContext, drafted: Sequence[int]
    ) -> Passes[Floats | None]:  # (D,) -> (V,)
        """Logits after the drafted tokens; None where there is no head for that place."""
        raise NotImplementedError

    def nbytes(self) -> int:
        return super().nbytes() + self._norm.nbytes + self._state.nbytes
