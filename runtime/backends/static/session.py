"""One static graph with its session and the arrays it is bound to; knows nothing of passes and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.static_graph import StaticGraph
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.backends.static.passes import Bools

__all__ = ["StaticSession"]

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN. Half floats, which
# some devices compute in, reach 65504.
_HIDDEN = np.float32(-3e4)


class StaticSession:
    """Runs one graph; what it computes stays in its arrays until the next run.

    Attributes:
        logits: (R, V).
    """

    def __init__(self, session: OrtSession, graph: StaticGraph, spec: DecoderSpec) -> None:
        self.graph = graph
        self._session = session
        past = {name for layer in range(spec.num_layers) for name in io.past_names(layer)}
        self._inputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.inputs(spec) if v.name not in past}
        self._outputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.outputs(spec)}
        self._inputs[io.NEW_PLACES][0, :, :, 1] = np.arange(spec.num_kv_heads)[:, None]
        self.logits: Floats = self._outputs[io.LOGITS]
        self._binding = session.binding()
        for name, array in self._inputs.items():
            self._bind_input(name, array)
        for name, array in self._outputs.items():
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for a in (*self._inputs.values(), *self._outputs.values()))

    def bind_cache(self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
        """Reads the past from these arrays from now on, (1, H, C, h) of each layer."""
        for layer, arrays in enumerate(zip(keys, values, strict=True)):
            for name, array in zip(io.past_names(layer), arrays, strict=True):
                self._bind_input(name, array)

    def run(
        self,
        tokens: Ints,  # (n,), n <= S
        tables: tuple[Floats, Floats],  # 2 x (n, r / 2)
        seen: tuple[Bools, Bools],  # 2 x (n, T)
        start: int,
        logit_row: int,
    ) -> int:
        """Runs over new tokens that will lie from row `start` on; padding repeats the last, and is seen by no token.

        Args:
            tables: rotary rows, cosine and sine.
            seen: rows of the cache that each token sees, in layers of full attention and of a window.
            logit_row: that goes through the head of the graph for prompts.

        Returns:
            Nanoseconds inside onnxruntime.
        """
        size, inputs = len(tokens), self._inputs
        ids = inputs[io.INPUT_IDS][0]
        ids[:size], ids[size:] = tokens, tokens[-1]
        for name, table in zip((io.COS_ROWS, io.SIN_ROWS), tables, strict=True):
            inputs[name][:size], inputs[name][size:] = table, table[-1]
        for name, visible in zip((io.ATTENTION_BIAS, io.WINDOW_BIAS), seen, strict=True):
            if name in inputs:
                bias = inputs[name][0, 0]
                bias[:] = _HIDDEN
                bias[:size, : visible.shape[1]][visible] = 0
                bias[size:] = bias[size - 1]
        places = start + np.arange(self.graph.rows)
        # A full cache has no row left for padding, which repeats the last token and what is computed of it.
        places[size:][places[size:] >= self.graph.context] = start + size - 1
        inputs[io.NEW_PLACES][..., 2] = places
        if self.graph.prompts:
            inputs[io.LOGIT_ROWS][0] = logit_row
        self._session.run(self._binding)
        return self._session.run_ns

    def new(self, layer: int) -> tuple[Floats, Floats]:  # 2 x (H, S, h)
        """Keys and values of the last run."""
        key, value = io.new_names(layer)
        return self._outputs[key][0], self._outputs[value][0]

    def cancel(self) -> None:
        """Ends the running run; safe from any thread."""
        self._session.cancel()

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
