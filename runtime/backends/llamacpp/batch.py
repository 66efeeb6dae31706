"""The batch that a llama.cpp context is fed, and how many rows a pass had best have.

A kernel of repacked weights multiplies four rows for about the price of one, and each row that is left over for the
price of one: c(2) and c(3) exceed c(4), c(6) and c(7) exceed c(8). Sixteen are cheaper still, by the row, so that c(13)
exceeds c(16) too. Other kernels cost more with every row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.llamacpp.memory import is_head_packed, looks_up, packed_bytes
from edgeinfer.runtime.backends.llamacpp.placement import EXPERTS

Ints = NDArray[np.int64]
_TOGETHER, _MOST_TOGETHER = 4, 16
# Rows left over, and the share of repacked weights from which on filling them up to four pays.
_PAYS = {3: 0.25, 2: 0.75}


@dataclass(frozen=True)
class RowSteps:
    """What of a model takes rows in fours.

    Attributes:
        layers: share of repacked bytes in what a pass reads.
        head: the same of the head alone, which computes the rows that logits are wanted of: 1 or 0.
    """

    layers: float
    head: float

    @classmethod
    def of(cls, gguf: GgufFile, weights: str) -> RowSteps:
        """Of a file whose weights are kept this way; of mixtures nothing, as padding fetches experts of its own."""
        if any(EXPERTS.fullmatch(tensor.name) for tensor in gguf.tensors):
            return cls(0.0, 0.0)
        read = gguf.tensor_bytes
        if "output.weight" in gguf.by_name and looks_up(gguf, weights):
            read -= gguf.by_name["token_embd.weight"].nbytes
        return cls(packed_bytes(gguf, weights) / max(read, 1), float(is_head_packed(gguf, weights)))

    def padding(self, size: int, outputs: int) -> tuple[int, int]:
        """Rows to add to a pass over so many tokens, and of how many of these logits had best be computed too."""
        rows = _missing(size, self.layers)
        return rows, min(rows, _missing(outputs, self.head))


def _missing(rows: int, share: float) -> int:
    left = rows % _TOGETHER
    if left == 1 and rows % _MOST_TOGETHER == _MOST_TOGETHER - 3 and share >= _PAYS[2]:
        return 3
    return _TOGETHER - left if share >= _PAYS.get(left, 2.0) else 0


class Batch:
    """The arrays of a llama_batch, as numpy's: filled without a step of Python for each token."""

    def __init__(self, lib: Any, size: int, sequences: int) -> None:
        self._spare = sequences
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._sequences = np.zeros((size, max(1, sequences)), np.int32)
        rows = self._sequences.ctypes.data + np.arange(size, dtype=np.uintp) * self._sequences.strides[0]
        self._rows = np.ascontiguousarray(rows, np.uintp)
        self._wanted = np.zeros(size, np.int8)
        self._branched = 0  # rows that belong to others than sequence 0
        fields = dict(lib.llama_batch._fields_)
        arrays: dict[str, NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._counts,
            "seq_id": self._rows,
            "logits": self._wanted,
        }
        self.struct = lib.llama_batch(
            **{name: ctypes.cast(array.ctypes.data, fields[name]) for name, array in arrays.items()}
        )

    def fill(self, tokens: Ints, start: int, rows: Ints) -> None:
        """A chain of sequence 0 from this position on, with logits of these rows."""
        size = len(tokens)
        self._tokens[:size] = tokens
        self._positions[:size] = np.arange(start, start + size)
        self._want(size, rows)
        if self._branched:
            self._counts[: self._branched] = 1
            self._sequences[: self._branched, 0] = 0
            self._branched = 0

    def fill_tree(self, tokens: Ints, positions: Ints, rows: Ints, branches: Sequence[Sequence[int]]) -> None:
        """Rows that each belong to the sequences named for it, ascending."""
        size = len(tokens)
        self._tokens[:size] = tokens
        self._positions[:size] = positions
        self._want(size, rows)
        for row, sequences in enumerate(branches):
            self._counts[row] = len(sequences)
            self._sequences[row, : len(sequences)] = sequences
        self._branched = max(self._branched, size)

    def pad(self, size: int, padding: int, outputs: int) -> None:
        """Adds padding rows, in a sequence of their own."""
        if padding:
            rows = slice(size, size + padding)
            self._tokens[rows] = self._tokens[size - 1]
            self._positions[rows] = np.arange(padding)
            self._counts[rows] = 1
            self._sequences[rows, 0] = self._spare
            self._wanted[rows] = np.arange(padding) < outputs
            self._branched = max(self._branched, size + padding)

    def _want(self, size: int, rows: Ints) -> None:
        self._wanted[:size] = 0
        self._wanted[rows] = 1
