"""A backend that lets go of its weights behind every pass, so that a model larger than the memory runs, slowly.

Knows which layers run together; knows nothing of how they run. A pass is cut into windows of consecutive layers, each a
pass of the backend inside: the hidden states of one enter the next, and the pages of its weights are dropped when it
has run. Embedding and LM head are windows of their own. Every row of the result is the same bits as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Capabilities, Geometry
from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.contracts import (
    CacheSnapshot,
    Edit,
    Floats,
    Ints,
    PassCancelledError,
    StepOutput,
    check_pass,
)
from edgeinfer.runtime.onnx_backend import OnnxBackend
from edgeinfer.runtime.weight_pages import WeightPart

__all__ = ["StreamedBackend"]


@dataclass(frozen=True)
class _Window:
    """Layers that run together, (2 L,) true where theirs, and their weights."""

    layers: NDArray[np.bool_]
    weights: WeightPart


class StreamedBackend:
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
        self._inner, self._pages = inner, inner.pages
        layers = self.geometry.num_layers
        self._windows = []
        for first in range(0, layers, window_layers):
            mask = np.zeros(2 * layers, np.bool_)  # (2 L,)
            mask[2 * first : 2 * (first + window_layers)] = True
            self._windows.append(_Window(mask, self._pages.layers(first, min(first + window_layers, layers))))
        nothing = np.zeros(2 * layers, np.bool_)  # (2 L,)
        self._head = _Window(nothing, self._pages.head())
        # Alone, because the system may map far more of the table than the rows that are looked up.
        self._embedding = _Window(nothing, self._pages.embedding())
        self._no_rows = np.zeros(0, np.int64)
        self._cancelled = False
        self._run_ns = 0
        self._pages.release()

    @property
    def name(self) -> str:
        """Name for people."""
        return self._inner.name

    @property
    def kernel(self) -> str:
        """What multiplies."""
        return self._inner.kernel

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""
        return self._inner.geometry

    @property
    def capabilities(self) -> Capabilities:
        """What may be asked of `forward`."""
        return self._inner.capabilities

    @property
    def capacity(self) -> int:
        """Tokens the cache may hold."""
        return self._inner.capacity

    @property
    def length(self) -> int:
        """Tokens the cache holds."""
        return self._inner.length

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside onnxruntime, which fetches the weights there."""
        return self._run_ns

    def forward(
        self,
        tokens: Ints,
        positions: Ints,
        rows: Ints,
        *,
        tree: Ints | None = None,
        layer_mask: NDArray[np.bool_] | None = None,
        hidden: Floats | None = None,
        planes: int = 2,
    ) -> StepOutput:
        """One pass, window by window; see `contracts.Backend.forward`."""
        check_pass(self, tokens, positions, rows, tree, layer_mask, hidden, planes)
        self._cancelled = False
        start, run_ns = self.length, 0
        windows = self._needed(layer_mask, embeds=hidden is None, head=len(rows) > 0)
        ahead = [*windows[1:], self._windows[0]]
        try:
            for window, following in zip(windows, ahead, strict=True):
                if self._cancelled:
                    raise PassCancelledError("The pass was cancelled.")
                # Each window writes the same rows of the cache, in its own layers.
                self._inner.truncate(start)
                following.weights.prefetch()
                mask = window.layers if layer_mask is None else window.layers & layer_mask
                wanted = rows if window is windows[-1] else self._no_rows
                output = self._inner.forward(
                    tokens, positions, wanted, tree=tree, layer_mask=mask, hidden=hidden, planes=planes
                )
                window.weights.release()
                hidden, run_ns = output.hidden, run_ns + self._inner.run_ns
        except BaseException:
            self._inner.truncate(start)
            raise
        self._run_ns = run_ns
        return output

    def _needed(self, layer_mask: NDArray[np.bool_] | None, *, embeds: bool, head: bool) -> list[_Window]:
        """The windows in which something runs; at least one, which appends the rows."""
        needed = [self._embedding] if embeds else []
        needed += [w for w in self._windows if layer_mask is None or (w.layers & layer_mask).any()]
        return [*needed, self._head] if head or not needed else needed

    def truncate(self, length: int) -> None:
        """Drops all rows from `length` on."""
        self._inner.truncate(length)

    def clear(self) -> None:
        """Drops all rows and their memory."""
        self._inner.clear()

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps these rows of the pass that began at `start`."""
        self._inner.keep(start, rows)

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """Copies the cache, or its rows start..stop-1."""
        return self._inner.snapshot(start, stop)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copied cache back."""
        self._inner.restore(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use."""
        self._inner.append(snapshot)

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use."""
        self._inner.rewrite(edit)

    def cancel(self) -> None:
        """Ends the running pass from another thread, between two windows or in one."""
        self._cancelled = True
        self._inner.cancel()

    def drop_pages(self) -> None:
        """Does nothing: between two passes no weights are resident but some rows of the embedding."""

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        return self._inner.nbytes()

    def close(self) -> None:
        """Closes the backend inside."""
        self._inner.close()
