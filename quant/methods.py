"""The quantizers by name and the one call that quantizes a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import QuantizedMatrix
from edgeinfer.core.errors import UsageError
from edgeinfer.quant import block_types, gptq, rtn, vectors
from edgeinfer.quant.blocks import Grid, Solver, joined, packed, restored
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import InputStatistics, runs_of

Floats = NDArray[np.float32]
Needs = Literal["nothing", "hessian"]


@dataclass(frozen=True)
class Method:
    name: str
    needs: Needs  # what it must know of the inputs: nothing, or the mean of x x^T
    # Sets it up for a grid, a number of columns and the statistics; `set_up` does for vectors, too.
    solver: Callable[[Grid, int, InputStatistics | None], Solver]

    def quantize(
        self,
        weight: Floats,  # (N, K)
        scheme: QuantScheme,
        statistics: InputStatistics | None = None,
    ) -> QuantizedMatrix:
        return packed(self.set_up(Grid.of(scheme), weight.shape[1], statistics), weight, scheme)

    def set_up(self, grid: Grid, k: int, statistics: InputStatistics | None) -> Solver:
        """The solver of a grid; that of vectors feeds errors forward for the methods that do."""
        if grid.kind and self.needs != "hessian":
            return block_types.solver(grid, k, statistics)
        runs = runs_of(k)
        if self.needs == "hessian" and statistics is not None and len(runs) > 1:
            parts = [(run, self.set_up(grid, run.stop - run.start, statistics.part(run))) for run in runs]
            return joined(parts)
        if grid.vectors:
            return vectors.solver(grid, k, statistics, hessian=self.needs == "hessian")
        return self.solver(grid, k, statistics)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("rtn", "nothing", rtn.solver),
        Method("gptq", "hessian", gptq.solver),
    )
}


def method_for(name: str, statistics: InputStatistics | None) -> Method:
    """The method that runs: `rtn` where the inputs that the requested one needs are unknown."""
    method = METHODS.get(name)
    if method is None:
        raise UsageError(f"No quantizer is called {name!r}.", f"Choose one of {', '.join(METHODS)}.")
    known = _known(statistics)
    lacking = known is None or known.hessian is None
    return METHODS["rtn"] if method.needs == "hessian" and lacking else method


def solver_for(method: str, grid: Grid, k: int, statistics: InputStatistics | None = None) -> Solver:
    """The method of `method_for`, set up for matrices of K columns with these inputs."""
    if statistics is not None:
        statistics.check(k)
    return method_for(method, statistics).set_up(grid, k, _known(statistics))


def quantize(
    weight: Floats,  # (N, K)
    scheme: QuantScheme,
    statistics: InputStatistics | None = None,
    method: str = "rtn",
) -> QuantizedMatrix:
    """Quantizes a matrix in the portable layout by the method of `method_for`."""
    return packed(solver_for(method, Grid.of(scheme), weight.shape[1], statistics), weight, scheme)


def approximate(
    weight: Floats,  # (N, K)
    grid: Grid,
    statistics: InputStatistics | None = None,
    method: str = "rtn",
) -> Floats:  # (N, K)
    """The values of a quantized matrix at any width, also widths that no backend runs; for comparisons."""
    return restored(solver_for(method, grid, weight.shape[1], statistics), weight, grid)


def _known(statistics: InputStatistics | None) -> InputStatistics | None:
    """The statistics, or None where no token was seen."""
    return None if statistics is None or statistics.count == 0 else statistics
