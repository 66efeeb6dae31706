"""What backends that run another one in some way share: what they leave to it, and passes cut into windows of layers.

Knows nothing of what they add.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Capabilities, Geometry
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.cache import KVCache
from edgeinfer.runtime.backends.contract import (
    Backend,
    ForwardInput,
    ForwardOutput,
    PassCancelledError,
    check_pass,
)

__all__ = ["Window", "WindowedBackend", "WrappedBackend"]

B = TypeVar("B", bound=Backend)
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Window:
    """Layers of a pass that run together.

    Attributes:
        layers: attention and MLP of each layer, true where they are in the window. (2 L,)
        before: called before it runs.
        after: called with what came of it.
    """

    layers: NDArray[np.bool_]
    before: Callable[[], None]
    after: Callable[[ForwardOutput], None]


class WrappedBackend(Generic[B]):
    """Implements `contracts.Backend` but for `forward`, which takes a turn of its own.

    Args:
        inner: that runs the passes; this closes it.
    """

    def __init__(self, inner: B) -> None:
        self._inner = inner

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
    def cache(self) -> KVCache:
        """That of the backend inside."""
        return self._inner.cache

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside the execution engine."""
        return self._inner.run_ns

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        return self._inner.forward(batch)

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        self._inner.cancel()

    def drop_pages(self) -> None:
        """Lets go of pages of the weights' file."""
        self._inner.drop_pages()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        return self._inner.nbytes()

    def close(self) -> None:
        """Closes the backend inside."""
        self._inner.close()


class WindowedBackend(WrappedBackend[B]):
    """A backend whose passes are cut into windows of consecutive layers, each a pass of the backend inside: the hidden
    states of one enter the next. Every row of the result is the same bits as without."""

    def __init__(self, inner: B) -> None:
        super().__init__(inner)
        self._cancelled = False
        self._run_ns = 0

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside the execution engine, which fetches the weights there."""
        return self._run_ns

    @abstractmethod
    def _windows(self, batch: ForwardInput) -> Sequence[Window]:
        """The windows of a pass, at least one, which together run its layers in order."""

    def cancel(self) -> None:
        """Ends the running pass from another thread, between two windows or in one."""
        self._cancelled = True
        self._inner.cancel()

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        check_pass(self, batch)
        self._cancelled = False
        start, run_ns = self.cache.length, 0
        windows, hidden = self._windows(batch), batch.hidden
        used: Ints | None = None  # (L, S, k)
        try:
            for window in windows:
                if self._cancelled:
                    raise PassCancelledError("The pass was cancelled.")
                # Each window writes the same rows of the cache, in its own layers.
                self.cache.trim(start)
                window.before()
                mask = window.layers if batch.layer_mask is None else window.layers & batch.layer_mask
                wanted = batch.rows if window is windows[-1] else _NO_ROWS
                output = self._inner.forward(replace(batch, rows=wanted, layer_mask=mask, hidden=hidden))
                used = _merged(used, output.experts)
                window.after(output)
                hidden, run_ns = output.hidden, run_ns + self._inner.run_ns
        except BaseException:
            self.cache.trim(start)
            raise
        self._run_ns = run_ns
        return replace(output, experts=used)


def _merged(before: Ints | None, window: Ints | None) -> Ints | None:  # (L, S, k) each
    """The experts that the windows of a pass used so far: -1 but in the layers that ran in one of them."""
    if before is None or window is None:
        return None if window is None else window.copy()
    merged: Ints = np.maximum(before, window, out=before)
    return merged
