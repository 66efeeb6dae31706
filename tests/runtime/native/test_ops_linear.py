"""LinearLowBit in sessions of ONNX Runtime: right to numpy, and to the bit what the portable path gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.system.memory import process_memory
from tests.runtime.native.graphs import attributes, constants, make_model, open_session, run
from tests.runtime.native.matrices import FORMATS, Floats, RandomMatrix, formats, linear, make_matrix, swiglu
from tests.tables import each_row

NAMES = ("x", "data", "low", "scales", "zeros", "bias", "norm", "residual", "planes")
EPSILON = 1e-5


def session_of(
    kernel: NativeKernel, matrix: RandomMatrix, given: dict[str, NDArray[Any]], threads: int = 1, **more: Any
) -> Callable[[dict[str, NDArray[Any]]], Floats]:
    """Runs the operator; bias and norm are constants, the rest is given."""
    known = constants(matrix.packed) | {name: more.pop(name) for name in ("bias", "norm") if name in more}
    values = attributes(matrix.packed) | {"norm_epsilon": EPSILON} | more
    session = open_session(kernel, make_model("LinearLowBit", NAMES, given, known, **values), threads)
    return lambda given: run(session, **given)


def close(got: Floats, wanted: Floats, tolerance: float = 1e-5) -> bool:
    """Whether they differ by what summing in another order does."""
    return got.shape == wanted.shape and bool(np.abs(got - wanted).max() <= tolerance * max(1, np.abs(wanted).max()))


@given(
    seed=st.integers(0, 2**32 - 1),
    form=formats,
    half=st.integers(1, 40),
    k=st.integers(1, 300),
    m=st.integers(1, 33),
    paired=st.booleans(),
    gated=st.booleans(),
    inline=st.booleans(),
    extras=st.sets(st.sampled_from(["bias", "norm", "residual"])),
    threads=st.sampled_from([1, 2]),
)
@settings(max_examples=80, deadline=None)
def test_agrees_with_numpy_and_with_the_portable_path(
    kernel: NativeKernel,
    binding: Binding,
    seed: int,
    form: tuple[int, int, bool],
    half: int,
    k: int,
    m: int,
    paired: bool,
    gated: bool,
    inline: bool,
    extras: set[str],
    threads: int,
) -> None:
    rng = np.random.default_rng(seed)
    bits, block, zeros = form
    n, k = 2 * half if paired else 2 * half - 1, -(-k // block) * block if bits < 0 else k
    matrix = make_matrix(rng, n, k, bits=bits, block=block, zeros=zeros, paired=paired, inline=inline)
    fused = paired and gated
    x = rng.standard_normal((m, k), np.float32)
    sizes = {"bias": (n,), "norm": (k,), "residual": (m, n // 2 if fused else n)}
    arrays = {name: rng.standard_normal(sizes[name], np.float32) for name in sorted(extras)}
    given = {"x": x} | {name: arrays[name] for name in arrays if name == "residual"}
    fixed = {name: arrays[name] for name in arrays if name != "residual"}
    got = session_of(kernel, matrix, given, threads, swiglu=int(fused), **fixed)(given)

    normed = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(EPSILON)) * arrays.get("norm", 1)
    wanted = linear(normed if "norm" in extras else x, matrix.dense, block) + arrays.get("bias", np.float32(0))
    wanted = (swiglu(wanted) if fused else wanted) + arrays.get("residual", np.float32(0))
    # A normalised value a rounding apart may be quantized to the neighbouring integer.
    assert close(got, wanted, 3e-2 if "norm" in extras else 1e-5)
    norm, bias, added = (arrays.get(name) for name in ("norm", "bias", "residual"))
    same = binding.multiply(
        "portable", matrix.packed, x, norm=norm, epsilon=EPSILON, bias=bias, residual=added, swiglu=fused
    )
    np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize(("heads", "rows", "k"), [(3, 64, 128), (5, 24, 40), (2, 70, 33), (7, 3, 96)])
def test_heads_have_matrices_and_inputs_of_their_own(kernel: NativeKernel, heads: int, rows: int, k: int) -> None:
    rng = np.random.default_rng(rows)
    for bits, block, zeros in FORMATS:
        matrix = make_matrix(rng, heads * rows, k, bits=bits, block=block, zeros=zeros)
        x = rng.standard_normal((9, heads * k), np.float32)
        got = session_of(kernel, matrix, {"x": x}, 2, heads=heads)({"x": x})
        assert np.array_equal(session_of(kernel, matrix, {"x": x[4:5]}, heads=heads)({"x": x[4:5]}), got[4:5])
        whole = session_of(kernel, matrix, {"x": x[:, :k]})
        for head in range(heads):
            columns = slice(head * rows, (head + 1) * rows)
            own = np.ascontiguousarray(x[:, head * k : (head + 1) * k])
            np.testing.assert_array_equal(got[:, columns], whole({"x": own})[:, columns])


@pytest.mark.parametrize("gated", ["inner", "outer"])
@pytest.mark.parametrize("form", FORMATS)
def test_runs_inside_if(kernel: NativeKernel, gated: str, form: tuple[int, int, bool]) -> None:
    rng = np.random.default_rng(1)
    bits, block, zeros = form
    matrix = make_matrix(rng, 70, 200, bits=bits, block=block, zeros=zeros)
    x, bias = rng.standard_normal((3, 200), np.float32), rng.standard_normal(70, np.float32)
    known = constants(matrix.packed) | {"bias": bias}
    model = make_model("LinearLowBit", NAMES, {"x": x}, known, gated=gated, **attributes(matrix.packed))
    session = open_session(kernel, model)
    assert close(run(session, x=x, runs=np.array([True])), linear(x, matrix.dense, block) + bias)
    np.testing.assert_array_equal(run(session, x=x, runs=np.array([False])), x)


@cache
def large() -> RandomMatrix:
    """Large enough to be split among threads."""
    return make_matrix(np.random.default_rng(2), 1500, 700, bits=4, block=64)


@each_row("threads", [1, 2, 5])
def test_a_row_does_not_depend_on_its_company(kernel: NativeKernel, binding: Binding, threads: int) -> None:
    matrix = large()
    x = np.random.default_rng(3).standard_normal((150, 700), np.float32)
    call = session_of(kernel, matrix, {"x": x}, threads)
    together = call({"x": x})
    np.testing.assert_array_equal(together, binding.multiply("portable", matrix.packed, x))
    for start, stop in ((0, 1), (1, 3), (3, 11), (11, 44), (44, 150)):
        np.testing.assert_array_equal(call({"x": x[start:stop]}), together[start:stop])


def test_leading_dimensions_are_kept(kernel: NativeKernel) -> None:
    matrix = make_matrix(np.random.default_rng(4), 40, 64)
    x = np.random.default_rng(5).standard_normal((2, 1, 3, 64), np.float32)
    call = session_of(kernel, matrix, {"x": x})
    y = call({"x": x})
    assert y.shape == (2, 1, 3, 40)
    assert close(y.reshape(6, 40), linear(x.reshape(6, 64), matrix.dense, 32))


def test_no_rows_give_no_rows(kernel: NativeKernel) -> None:
    matrix = make_matrix(np.random.default_rng(4), 40, 64)
    x = np.zeros((0, 64), np.float32)
    assert session_of(kernel, matrix, {"x": x})({"x": x}).shape == (0, 40)


@each_row("zeros", [False, True])
def test_planes_choose_the_bytes_read(kernel: NativeKernel, zeros: bool) -> None:
    rng = np.random.default_rng(6)
    matrix = make_matrix(rng, 65, 130, bits=8, block=64, zeros=zeros)
    x = rng.standard_normal((4, 130), np.float32)
    given = {"x": x, "planes": np.array([2], np.int32)}
    call = session_of(kernel, matrix, given)
    assert close(call(given), linear(x, matrix.dense, 64))
    assert close(call(given | {"planes": np.array([1], np.int32)}), linear(x, matrix.high, 64))
    assert not close(linear(x, matrix.high, 64), linear(x, matrix.dense, 64), 1e-3)
    with pytest.raises(Exception, match="planes must be 1 or 2, not 3"):
        call(given | {"planes": np.array([3], np.int32)})


def test_weights_are_used_where_the_file_is_mapped(kernel: NativeKernel, tmp_path: Path) -> None:
    n, k = 16384, 4096
    plane, cells = n * k // 2, n * k // 128
    known: dict[str, NDArray[Any]] = {
        "data": np.full(plane, 0x99, np.uint8),
        "scales": np.full(cells, 0x3F80, np.uint16),
    }
    x = np.ones((1, k), np.float32)
    model = make_model("LinearLowBit", NAMES, {"x": x}, known, N=n, K=k, bits=4, block_size=128)
    with (tmp_path / "weights.bin").open("wb") as file:
        for tensor in model.graph.initializer:
            start = file.tell()
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            places = {"location": "weights.bin", "offset": start, "length": file.tell() - start}
            for key, value in places.items():
                tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    del model, known
    before = process_memory().anonymous
    session = open_session(kernel, tmp_path / "model.onnx")
    y = run(session, x=x)
    # Every weight is 9 - 8; a copy of the file would be 34 MB.
    np.testing.assert_allclose(y, k, rtol=1e-6)
    if sys.platform == "linux":
        assert process_memory().anonymous - before < 10_000_000


def test_what_is_not_finite_reaches_only_its_row(kernel: NativeKernel) -> None:
    matrix = make_matrix(np.random.default_rng(7), 40, 64)
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.inf
    y = session_of(kernel, matrix, {"x": x})({"x": x})
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@each_row(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits must be 2, 3, 4 or 8"),
        ({"block_size": 16}, "block_size must be 32, 64 or 128"),
        ({"N": 0}, "N and K must be"),
        ({"N": 73}, "data has .* elements instead of"),
        ({"K": 2**40}, "N and K must be"),
        ({"bits": 2}, "data has .* elements instead of"),
        ({"bits": 8}, "8 bits have a low plane"),
        ({"paired": 2}, "paired must be 0 or 1"),
        ({"paired": 1, "N": 71}, "needs an even N"),
        ({"swiglu": 1}, "swiglu needs a paired matrix"),
        ({"inline_scales": 1}, "either inline scales or the input scales"),
        ({"vectors": 1}, "vectors need 2 bits and a K of whole blocks"),
        ({"vectors": 1, "bits": 2, "K": 96}, "data has .* elements instead of"),
    ],
)
def test_attributes_that_do_not_fit_are_refused_at_load(
    kernel: NativeKernel, changes: dict[str, int], message: str
) -> None:
    matrix = make_matrix(np.random.default_rng(8), 60, 100)
    with pytest.raises(Exception, match=f"LinearLowBit: .*{message}"):
        session_of(kernel, matrix, {"x": np.zeros((1, 100), np.float32)}, **changes)


@pytest.mark.parametrize("name", ["data", "scales", "zeros", "bias", "norm"])
@pytest.mark.parametrize("gated", ["", "outer"])
def test_a_blob_of_the_wrong_size_is_refused(kernel: NativeKernel, name: str, gated: str) -> None:
    rng = np.random.default_rng(9)
    matrix = make_matrix(rng, 60, 100, zeros=True)
    known = constants(matrix.packed) | {"bias": np.zeros(60, np.float32), "norm": np.zeros(100, np.float32)}
    known[name] = known[name][:-1]
    x = np.zeros((1, 100), np.float32)
    values = attributes(matrix.packed) | {"norm_epsilon": EPSILON}
    model = make_model("LinearLowBit", NAMES, {"x": x}, known, gated=gated, **values)
    with pytest.raises(Exception, match=f"LinearLowBit: {name} has .* elements instead of"):
        run(open_session(kernel, model), x=x, **({"runs": np.array([True])} if gated else {}))


def test_inputs_that_do_not_fit_are_refused(kernel: NativeKernel) -> None:
    matrix = make_matrix(np.random.default_rng(10), 60, 100)
    x = np.zeros((2, 100), np.float32)
    given = {"x": x, "residual": np.zeros((2, 60), np.float32)}
    call = session_of(kernel, matrix, given)
    with pytest.raises(Exception, match="last dimension of X must be K = 100"):
        call(given | {"x": x[:, :99]})
    with pytest.raises(Exception, match="residual has 60 elements instead of 120"):
        call(given | {"residual": np.zeros((1, 60), np.float32)})
    with pytest.raises(Exception, match="norm needs the attribute norm_epsilon"):
        known = constants(matrix.packed) | {"norm": np.ones(100, np.float32)}
        open_session(kernel, make_model("LinearLowBit", NAMES, {"x": x}, known, **attributes(matrix.packed)))
    with pytest.raises(Exception, match="planes needs a matrix of 8 bits"):
        session_of(kernel, matrix, {"x": x, "planes": np.array([1], np.int32)})
    with pytest.raises(Exception, match="the attribute block_size is missing"):
        values = {name: value for name, value in attributes(matrix.packed).items() if name != "block_size"}
        open_session(kernel, make_model("LinearLowBit", NAMES, {"x": x}, constants(matrix.packed), **values))
