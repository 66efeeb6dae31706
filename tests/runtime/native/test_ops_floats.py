"""LinearFloat in sessions of ONNX Runtime: right to numpy, and the same bits in every path and any pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from tests.runtime.native.graphs import attributes, constants, make_model, open_session, run
from tests.runtime.native.matrices import make_matrix
from tests.tables import each_row

NAMES = ("x", "weight", "bias", "norm", "residual", "layer_mask")
EPSILON = 1e-5


class Case(NamedTuple):
    """Sizes of a product and what stands around it."""

    n: int
    k: int
    m: int
    extras: tuple[str, ...] = ()
    threads: int = 1


CASES = (
    Case(1, 1, 1),
    Case(16, 15, 2, ("bias",)),
    Case(63, 33, 4, ("residual",)),
    Case(64, 256, 1, ("norm", "residual")),
    Case(131, 100, 8, ("bias", "norm", "residual")),
    # Large enough to be split among threads, in normalising too.
    Case(300, 1030, 40, ("norm",), threads=2),
)


def arrays_of(case: Case) -> dict[str, NDArray[np.float32]]:
    """Random values for all inputs, the weight by outputs."""
    rng = np.random.default_rng(case.n)
    sizes = {"bias": (case.n,), "norm": (case.k,), "residual": (case.m, case.n)}
    shapes = {"x": (case.m, case.k), "weight": (case.n, case.k), **{name: sizes[name] for name in case.extras}}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def product(
    kernel: NativeKernel, case: Case, arrays: dict[str, Any], by_output: bool, part: int = 0
) -> NDArray[np.float32]:
    """The operator's output."""
    weight = arrays["weight"] if by_output else arrays["weight"].T
    known = {name: arrays[name] for name in ("bias", "norm") if name in arrays} | {"weight": weight}
    given: dict[str, Any] = {name: arrays[name] for name in ("x", "residual", "layer_mask") if name in arrays}
    values: dict[str, Any] = {
        "N": case.n,
        "K": case.k,
        "by_output": int(by_output),
        "norm_epsilon": EPSILON,
        "part": part,
    }
    return run(open_session(kernel, make_model("LinearFloat", NAMES, given, known, **values), case.threads), **given)


def expected(arrays: dict[str, NDArray[np.float32]]) -> NDArray[np.float64]:
    """The result in double precision."""
    x = arrays["x"].astype(np.float64)
    if "norm" in arrays:
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON) * arrays["norm"]
    return x @ arrays["weight"].T.astype(np.float64) + arrays.get("bias", 0) + arrays.get("residual", 0)


@each_row("by_output", [False, True])
def test_rows_have_their_bits_in_every_path_and_company(
    kernel: NativeKernel, binding: Binding, by_output: bool
) -> None:
    for case in CASES:
        arrays = arrays_of(case)
        whole = product(kernel, case, arrays, by_output)
        wanted = expected(arrays)
        assert np.abs(whole - wanted).max() <= 2e-6 * case.k**0.5 * max(1.0, float(np.abs(wanted).max())), case
        for first, last in ((0, 1), (case.m // 2, case.m), (case.m - 1, case.m)):
            part = {name: array[first:last] if name in ("x", "residual") else array for name, array in arrays.items()}
            np.testing.assert_array_equal(product(kernel, case, part, by_output), whole[first:last])
        try:
            for isa in binding.isas():
                binding.select(isa)
                np.testing.assert_array_equal(product(kernel, case, arrays, by_output), whole, err_msg=isa)
        finally:
            binding.select(kernel.isa)


def test_heads_have_matrices_and_inputs_of_their_own(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(3)
    for heads, rows, k in ((3, 64, 33), (5, 24, 40), (7, 3, 96)):
        weight, x = rng.standard_normal((heads * rows, k), np.float32), rng.standard_normal((9, heads * k), np.float32)
        for by_output in (False, True):
            values: dict[str, Any] = {"N": heads * rows, "K": k, "by_output": int(by_output)}
            known = {"weight": weight if by_output else weight.T}

            def product_of(given: NDArray[np.float32], threads: int, **more: Any) -> NDArray[np.float32]:
                model = make_model("LinearFloat", NAMES, {"x": given}, known, **values, **more)  # noqa: B023
                return run(open_session(kernel, model, threads), x=given)

            got = product_of(x, 2, heads=heads)
            assert np.array_equal(product_of(x[4:5], 1, heads=heads), got[4:5])
            for head in range(heads):
                columns = slice(head * rows, (head + 1) * rows)
                own = np.ascontiguousarray(x[:, head * k : (head + 1) * k])
                np.testing.assert_array_equal(got[:, columns], product_of(own, 1)[:, columns])


def test_a_masked_part_passes_on_its_residual_or_zeros(kernel: NativeKernel) -> None:
    case = Case(20, 9, 3)
    arrays = arrays_of(case)
    mask = {"layer_mask": np.array([True, False])}
    residual = np.random.default_rng(1).standard_normal((3, 20), np.float32)
    whole = product(kernel, case, arrays, True)
    np.testing.assert_array_equal(product(kernel, case, arrays | mask, True, part=0), whole)
    np.testing.assert_array_equal(product(kernel, case, arrays | mask, True, part=1), np.zeros((3, 20)))
    with_residual = arrays | mask | {"residual": residual}
    np.testing.assert_array_equal(product(kernel, case, with_residual, True, part=1), residual)
    for part in (-1, 2):
        with pytest.raises(Exception, match=f"layer_mask has no part {part}"):
            product(kernel, case, arrays | mask, True, part=part)

    # The same of LinearLowBit, gate and up together being half as wide.
    matrix = make_matrix(np.random.default_rng(2), 40, 9, bits=4, block=32, paired=True)
    names = ("x", "data", "low", "scales", "zeros", "bias", "norm", "residual", "planes", "layer_mask")
    given = {"x": arrays["x"], "residual": residual} | mask
    values = attributes(matrix.packed) | {"swiglu": 1, "part": 1}
    model = make_model("LinearLowBit", names, given, constants(matrix.packed), **values)
    np.testing.assert_array_equal(run(open_session(kernel, model), **given), residual)


def test_refuses_what_does_not_fit(kernel: NativeKernel) -> None:
    arrays = arrays_of(Case(8, 4, 2))
    with pytest.raises(Exception, match="weight has 32 elements instead of 40"):
        product(kernel, Case(8, 5, 2), arrays, True)
    with pytest.raises(Exception, match="the last dimension of X must be K = 4"):
        product(kernel, Case(8, 4, 2), {**arrays, "x": np.ones((2, 3), np.float32)}, True)
    with pytest.raises(Exception, match="N and K must be between"):
        product(kernel, Case(0, 4, 2), arrays, True)
