"""EmbeddingLowBit in sessions of ONNX Runtime: the rows that the packed matrix stands for, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from tests.runtime.native.graphs import attributes, constants, make_model, open_session, run
from tests.runtime.native.matrices import Floats, RandomMatrix, formats, make_matrix
from tests.tables import each_row

NAMES = ("ids", "data", "low", "scales", "zeros")


def look_up(kernel: NativeKernel, matrix: RandomMatrix, ids: NDArray[np.int64], threads: int = 1) -> Floats:
    """The operator's output."""
    model = make_model("EmbeddingLowBit", NAMES, {"ids": ids}, constants(matrix.packed), **attributes(matrix.packed))
    return run(open_session(kernel, model, threads), ids=ids)


@given(
    seed=st.integers(0, 2**32 - 1),
    form=formats,
    half=st.integers(1, 40),
    k=st.integers(1, 300),
    paired=st.booleans(),
    inline=st.booleans(),
    shape=st.lists(st.integers(0, 4), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_gives_the_rows_of_the_matrix(
    kernel: NativeKernel,
    seed: int,
    form: tuple[int, int, bool],
    half: int,
    k: int,
    paired: bool,
    inline: bool,
    shape: list[int],
) -> None:
    rng = np.random.default_rng(seed)
    bits, block, zeros = form
    n, k = 2 * half if paired else 2 * half - 1, -(-k // block) * block if bits < 0 else k
    matrix = make_matrix(rng, n, k, bits=bits, block=block, zeros=zeros, paired=paired, inline=inline)
    ids = rng.integers(0, n, shape)
    np.testing.assert_array_equal(look_up(kernel, matrix, ids), matrix.dense[ids])


def test_many_rows_are_split_among_threads(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(1)
    matrix = make_matrix(rng, 500, 700, bits=8, block=128)
    ids = rng.integers(0, 500, (1, 90))
    np.testing.assert_array_equal(look_up(kernel, matrix, ids, threads=3), matrix.dense[ids])


def test_a_row_by_hand_is_the_operators(binding: Binding) -> None:
    matrix = make_matrix(np.random.default_rng(2), 50, 70, bits=8, block=32, zeros=True)
    for index in (0, 31, 32, 49):
        np.testing.assert_array_equal(binding.row(matrix.packed, index), matrix.dense[index])


@each_row("wrong", [-1, 50, 2**40])
def test_an_id_outside_the_matrix_is_refused(kernel: NativeKernel, wrong: int) -> None:
    matrix = make_matrix(np.random.default_rng(3), 50, 64)
    with pytest.raises(Exception, match=f"EmbeddingLowBit: id {wrong} is outside a matrix of 50 rows"):
        look_up(kernel, matrix, np.array([0, wrong]))


@each_row("name", ["data", "low", "scales", "zeros"])
def test_a_blob_of_the_wrong_size_is_refused_at_load(kernel: NativeKernel, name: str) -> None:
    matrix = make_matrix(np.random.default_rng(4), 50, 64, bits=8, zeros=True)
    known: dict[str, NDArray[Any]] = constants(matrix.packed)
    known[name] = np.append(known[name], known[name][:1])
    model = make_model("EmbeddingLowBit", NAMES, {"ids": np.array([0])}, known, **attributes(matrix.packed))
    with pytest.raises(Exception, match=f"EmbeddingLowBit: {name} has .* elements instead of"):
        open_session(kernel, model)
