"""Inputs and outputs of one pass of the ONNX backend: their memory, their padding, who attends to whom.

Knows nothing of sessions and of the cache.
"""

from __future__ import annotations

import math

import numpy as np

from edgeinfer.bundle import Geometry, graph
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Visibility, ancestors
from edgeinfer.runtime.backends.onnx.session import Binding

__all__ = ["HIDDEN", "Buffers", "Pass", "branch_bias", "tree_bias", "twin_padding"]

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN.
HIDDEN = np.float32(-1e9)


def tree_bias(tree: Ints, size: int, total: int) -> Floats:  # (S',) -> (1, 1, S, T), S >= S'
    """Hides from each row of a draft tree what is not its ancestor."""
    bias = np.zeros((1, 1, size, total), np.float32)
    real, start = len(tree), total - size
    bias[0, 0, :real, start : start + real][~ancestors(tree)] = HIDDEN
    return bias


def branch_bias(sees: Visibility, size: int, total: int) -> Floats:  # (1, 1, S, T), S >= rows of `sees`
    """Hides from each row what it does not see."""
    bias = np.zeros((1, 1, size, total), np.float32)
    real, seen = sees.sees.shape
    bias[0, 0, :real, :seen][~sees.sees] = HIDDEN
    return bias


def twin_padding(bias: Floats, real: int) -> None:  # (S, T)
    """Lets each row of padding see itself in place of the last real row, and else what that sees.

    So it is that row again, up to rounding, and its experts are the same: any others would have to be fetched for
    nothing.
    """
    size, total = bias.shape
    start = total - size
    bias[real:] = bias[real - 1]
    bias[real:, start + real - 1 :] = HIDDEN
    padding = np.arange(real, size)
    bias[padding, start + padding] = 0


class Buffers:
    """Memory for inputs and outputs of passes of up to `size` tokens and `rows` logit rows, shared by all shapes.

    Args:
        top_k: experts of a token; 0 in models without.
    """

    def __init__(self, geometry: Geometry, size: int, rows: int, top_k: int) -> None:
        self.size, self.rows, self.layers = size, rows, geometry.num_layers
        self.tokens = np.zeros((1, size), np.int64)
        self.positions = np.zeros((1, size), np.int64)
        self.logit_rows = np.zeros(rows, np.int64)
        self.hidden_in = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.hidden_out = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.logits = np.zeros((rows, geometry.vocab_size), np.float32)
        self.experts = np.zeros(geometry.num_layers * size * top_k, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))


class Pass:
    """Views into the shared buffers for passes of one shape, and their binding."""

    binding: Binding

    def __init__(self, buffers: Buffers, size: int, rows: int, resumes: bool, experts: int) -> None:
        self._tokens = buffers.tokens[:, :size]
        self.positions = buffers.positions[0, :size]
        self._positions = buffers.positions[:, :size]
        self._rows = buffers.logit_rows[:rows]
        self._hidden = buffers.hidden_in[:, : size if resumes else 1]
        self.logits = buffers.logits[:rows]  # (R, V)
        self.hidden_out = buffers.hidden_out[:, :size]  # (1, S, D)
        chosen = (buffers.layers, size, experts)
        self.experts = buffers.experts[: math.prod(chosen)].reshape(chosen) if experts else None  # (L, S, k)
        self.inputs = {
            graph.INPUT_IDS: self._tokens,
            graph.POSITION_IDS: self._positions,
            graph.LOGIT_ROWS: self._rows,
            graph.HIDDEN_IN: self._hidden,
            graph.USE_HIDDEN: np.array([resumes]),
        }

    def fill(self, tokens: Ints, positions: Ints, rows: Ints, hidden: Floats | None, *, apart: bool) -> None:
        """Writes the inputs of the next pass; padding repeats the last token, at the positions that follow if `apart`,
        else at its own."""
        size = len(tokens)
        self._tokens[0, :size] = tokens
        self._positions[0, :size] = positions
        self._rows[: len(rows)] = rows
        self._rows[len(rows) :] = 0
        for extra in range(self._tokens.shape[1] - size):
            self._tokens[0, size + extra] = tokens[-1]
            self._positions[0, size + extra] = positions[-1] + (1 + extra if apart else 0)
        if hidden is not None:
            self._hidden[0, :size] = hidden
            self._hidden[0, size:] = hidden[-1]
