"""The importance matrix of a GGUF file: the mean square of each column's inputs when a text is read.

The checkpoint is run layer by layer in numpy, so that memory holds one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.gguf.tensors import PlannedGgufTensor
from edgeinfer.quant.calibration import CalibrationOptions, ModelReader, calibrate
from edgeinfer.quant.statistics import InputStatistics
from edgeinfer.results import Progress

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# By names of tensors: (K,), or of experts (E * K,), one expert after the other.
Importance = dict[str, Floats]

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# A column that never got a value still has a weight: llama.cpp divides by sums of these.
_LEAST = 1e-6


def gather_importance(
    spec: DecoderSpec,
    reader: ModelReader,
    texts: Sequence[Ints],
    tensors: Iterable[PlannedGgufTensor],
    progress: Progress | None = None,
) -> Importance:
    """Collects the importance of every matrix of a file but the embedding and routers, which stay as they are.

    An embedding has none, also where it is the head as well. An expert that no token reached counts all its columns
    the same.

    Args:
        texts: token ids; texts do not see each other.
    """
    gathered = _Gathered(spec, reader, progress)
    options = CalibrationOptions(streams="float", hessian=False, weigh_experts=False)
    found = calibrate(spec, reader, texts, gathered, options)
    squares = gathered.squares
    importance = {}
    for tensor in tensors:
        if tensor.name == _HEAD:
            importance[tensor.name] = _positive(found.head.mean_square)
        elif tensor.name != _EMBEDDING and all(part.plan in squares for part in tensor.parts):
            importance[tensor.name] = np.concatenate([_positive(squares[part.plan]) for part in tensor.parts])
    return importance


class _Gathered:
    """Collects the statistics of each matrix's inputs; see `edgeinfer.quant.calibration.Visitor`."""

    def __init__(self, spec: DecoderSpec, reader: ModelReader, progress: Progress | None) -> None:
        self.squares: dict[str, Floats] = {}
        self._layers, self._progress = spec.num_layers, progress
        self._done = 0

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        """Nothing is moved between matrices."""

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """Rows as they are."""
        return rows

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:  # (R, C) -> (R, C)
        """A matrix as it is; None: nothing enters it."""
        self.squares[name] = np.ones(weight.shape[1], np.float32) if statistics is None else statistics.mean_square
        if self._progress is not None and name.endswith("attn.out"):
            self._done += 1
            self._progress("calibration", self._done, self._layers)
        return weight


def _positive(squares: Floats) -> Floats:  # (K,) -> (K,)
    floor = _LEAST * float(squares.mean(dtype=np.float64))
    return np.maximum(squares, np.float32(floor)) if floor > 0 else np.ones_like(squares)
