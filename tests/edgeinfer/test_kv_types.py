"""Rows of quantized caches: what is stored, what is read back, and how much memory it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from edgeinfer.bundle import Geometry
from edgeinfer.bundle.kv_types import KV, LLAMA_KV, PAGED_KV, QUANTIZED_KV, find_kv_type, load, store
from edgeinfer.config import ONNX_KV_TYPES
from edgeinfer.errors import UsageError

HEADS, HEAD_DIM = 2, 6
Floats = NDArray[np.float32]
values = arrays(np.float32, (HEADS, 3, HEAD_DIM), elements=st.floats(-1e4, 1e4, width=32))
scales = arrays(np.float32, HEADS * HEAD_DIM, elements=st.floats(2**-10, 100, width=32))


@given(rows=values, of=scales, kv=st.sampled_from(QUANTIZED_KV))
def test_what_is_read_back_is_the_nearest_there_is(rows: Floats, of: Floats, kv: str) -> None:
    kind = KV[kv]
    stored = store(kind, rows, of)
    assert stored.dtype == kind.dtype and stored.shape == (HEADS, 3, kind.width(HEAD_DIM))
    assert stored[0, 0].nbytes == kind.row_bytes(HEAD_DIM)
    channel = of.reshape(HEADS, 1, HEAD_DIM)
    nearest = np.clip(rows, -(kind.largest + 1) * channel, kind.largest * channel)
    assert (np.abs(load(kind, stored, of) - nearest) <= channel * 0.5001).all()


@given(rows=values, of=scales, kv=st.sampled_from([*KV]))
def test_storing_again_changes_nothing(rows: Floats, of: Floats, kv: str) -> None:
    stored = store(KV[kv], rows, of)
    assert np.array_equal(store(KV[kv], load(KV[kv], stored, of), of), stored)


def test_two_int4_channels_to_a_byte() -> None:
    rows = np.array([[[0, -8, 7, 1.5, -20, 20]]], np.float32)
    stored = store(KV["int4"], rows, np.ones(6, np.float32))
    assert stored.tolist() == [[[0x08, 0xAF, 0xF0]]]


def test_float32_needs_no_scales_and_no_copy() -> None:
    rows = np.ones((1, 2, 4), np.float32)
    assert store(KV["float32"], rows, None) is rows and load(KV["float32"], rows, None) is rows


def test_every_type_that_can_be_asked_for_is_there() -> None:
    assert PAGED_KV == ONNX_KV_TYPES and set(KV) <= {*PAGED_KV}
    assert tuple(LLAMA_KV) == ("float32", "float16", "q8_0", "q4_0")
    assert [kind.row_bytes(64) for kind in KV.values()] == [256, 64, 32]
    with pytest.raises(UsageError, match=r"no KV type 'int3'.*float32, int8, int4"):
        find_kv_type("int3")


def test_bytes_of_a_token() -> None:
    geometry = Geometry(10, 16, num_layers=3, num_kv_heads=2, head_dim=8, max_positions=10)
    assert geometry.kv_bytes_per_token() == 2 * 3 * 2 * 8 * 4
    assert geometry.kv_bytes_per_token("int8") == 2 * 3 * 2 * 8
    assert geometry.kv_bytes_per_token("int4") == 2 * 3 * 2 * 4
