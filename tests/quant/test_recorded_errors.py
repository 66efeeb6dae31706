"""What each quantizer loses on one matrix, as recorded: a change that rounds otherwise shows, even a legal one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.quant import rtn
from edgeinfer.quant.awq import scale_search
from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.methods import approximate
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import output_error
from tests.quant.samples import correlated_inputs, random_matrix, statistics_of
from tests.recorded import check_recorded

GRIDS = (Grid(2, 32, False), Grid(3, 128, False), Grid(4, 32, True), Grid(8, 64, False))
# Shares of the output's energy, by quantizer and what it knows of the inputs, for each grid. BLAS kernels for Haswell
# and for CPUs without AVX give the same five digits. A quantizer that was changed on purpose gets new figures here, and
# the old ones into docs/log.
RECORDED = {
    ("rtn", "nothing"): (0.10777, 0.033115, 0.0058700, 2.2774e-05),
    ("rtn", "hessian"): (0.068522, 0.024662, 0.0042421, 1.8648e-05),
    ("awq", "diagonal"): (0.085416, 0.026093, 0.0043082, 2.4769e-05),
    ("awq", "hessian"): (0.077024, 0.022725, 0.0042598, 2.2639e-05),
    ("gptq", "hessian"): (0.010576, 0.0030288, 0.00050986, 2.1130e-06),
}
# Least, greatest and mean square of AWQ's channel scales.
SCALES = (0.39306414, 1.8375185, 1.1868269)


def test_quantizers_lose_what_they_lost() -> None:
    # 168 columns end in the middle of a block of every size.
    weight, x = random_matrix(30, 168, 7), correlated_inputs(600, 168, 7)
    known = {"nothing": None, "diagonal": statistics_of(x, hessian=False), "hessian": statistics_of(x)}
    full = statistics_of(x)
    energy = output_error(weight, np.zeros_like(weight), full)
    for (method, needs), recorded in RECORDED.items():
        kept = [approximate(weight, grid, known[needs], method) for grid in GRIDS]
        lost = [output_error(weight, matrix, full) / energy for matrix in kept]
        assert lost == pytest.approx(recorded, rel=1e-3), (method, needs)


def test_matrices_of_every_kind_are_approximated_as_they_were() -> None:
    """Zeros, constants, huge and tiny values, and fewer columns than a block."""
    plain, x = random_matrix(40, 72, 3), correlated_inputs(300, 72, 3)
    plain[3], plain[4], plain[5], plain[6, 10:50] = 0, 0.25, plain[5] * 1e9, plain[6, 10:50] * 1e-20
    kinds: dict[str, NDArray[np.float32]] = {
        "odd": plain,
        "positive": np.abs(plain[7:]) + np.float32(0.5),
        "wide": random_matrix(3, 5, 4),
    }
    found = {}
    for name, weight in kinds.items():
        for method, grid in product(("rtn", "awq", "gptq"), (*GRIDS, Grid(4, 64, True), Grid(2, 128, True))):
            inputs = statistics_of(np.ascontiguousarray(x[:, : weight.shape[1]]))
            matrix = approximate(weight, grid, inputs, method)
            rows = np.square((matrix - weight).astype(np.float64)).sum(1)
            scale = np.square(weight.astype(np.float64)).sum(1)
            found[f"{name} {method} {grid.bits} {grid.size} {grid.symmetric}"] = [
                np.mean(rows / np.maximum(scale, 1e-30)),
                np.median(rows),
            ]
    check_recorded("quantized", found, rel=2e-2)


def test_matrices_are_quantized_in_pieces_of_a_few_megabytes() -> None:
    found = {f"{k} {size}": rtn.solver(Grid(4, size, False), k).rows for k in (5, 896, 4864) for size in (32, 128)}
    check_recorded("quant-pieces", found)


def test_channel_scales_are_what_they_were() -> None:
    weight, x = random_matrix(30, 168, 7), correlated_inputs(600, 168, 7)
    scale = scale_search([weight[:20], weight[20:]], statistics_of(x), QuantScheme(4, 32))
    assert (scale.min(), scale.max(), np.square(scale).mean()) == pytest.approx(SCALES, rel=1e-3)
