"""A backend that lets go of its weights behind every pass, so that a model larger than the memory runs, slowly.

Knows which layers run together; knows nothing of how they run. A pass is cut into windows of consecutive layers, each a
pass of the backend inside: the hidden states of one enter the next, and the pages of its weights are dropped when it
has run. Embedding and LM head are windows of their own. Every row of the result is the same bits as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.wrapped import Window, WindowedBackend
from edgeinfer.runtime.weights.weight_pages import WeightPart

__all__ = ["StreamedBackend"]

# Layers that run together, (2 L,) true where theirs, and their weights.
_Layers = tuple[NDArray[np.bool_], WeightPart]


class StreamedBackend(WindowedBackend[OnnxBackend]):
    """Implements `contracts.Backend` around a backend that reads its weights in place.

    Args:
        inner: whose passes can skip layers and resume from hidden states; this closes it.
        window_layers: layers whose weights are resident together; the most is all of them.

    Raises:
        CapabilityError: its weights are packed into memory, or it cannot skip layers or resume.
    """

    def __init__(self, inner: OnnxBackend, window_layers: int) -> None:
        can = inner.capabilities
        if inner.pages is None or not (can.layer_skip and can.hidden):
            hint = "Load it with weights mapped, and export it in our own format."
            raise CapabilityError("The weights of this model cannot be dropped behind a pass.", hint)
        super().__init__(inner)
        self._pages = inner.pages
        layers = self.geometry.num_layers
        self._layers: list[_Layers] = []
        for first in range(0, layers, window_layers):
            mask = np.zeros(2 * layers, np.bool_)  # (2 L,)
            mask[2 * first : 2 * (first + window_layers)] = True
            self._layers.append((mask, self._pages.layers(first, min(first + window_layers, layers))))
        nothing = np.zeros(2 * layers, np.bool_)  # (2 L,)
        self._head = nothing, self._pages.head()
        # Alone, because the system may map far more of the table than the rows that are looked up.
        self._embedding = nothing, self._pages.embedding()
        self._pages.release()

    def _windows(self, batch: ForwardInput) -> Sequence[Window]:
        """Those in which something runs; at least one, which appends the rows."""
        mask = batch.layer_mask
        needed = [self._embedding] if batch.hidden is None else []
        needed += [each for each in self._layers if mask is None or (each[0] & mask).any()]
        if len(batch.rows) or not needed:
            needed.append(self._head)
        ahead = [*needed[1:], self._layers[0]]
        return [
            Window(layers, following.prefetch, partial(_release, weights))
            for (layers, weights), (_, following) in zip(needed, ahead, strict=True)
        ]

    def drop_pages(self) -> None:
        """Does nothing: between two passes no weights are resident but some rows of the embedding."""


def _release(weights: WeightPart, output: ForwardOutput) -> None:
    weights.release()
