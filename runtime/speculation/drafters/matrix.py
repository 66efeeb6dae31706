"""A matrix times a vector on one thread; knows nothing of what either means.

numpy's BLAS shares out larger products among threads of its own, which then fight with those of the execution engine
for the same processors: where another program runs beside, a product of 0.07 ms took 16 ms on two cores, the time slice
of a thread that it waited for. Products of few elements it leaves alone, so a matrix is held as a stack of such.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats

__all__ = ["Matrix"]

# OpenBLAS takes further threads from 9216 elements on.
_ALONE = 9000


class Matrix:
    """A matrix in float32, and the buffer of its products.

    Args:
        values: of any float type. (N, K)
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
