"""Types of caches: which there are, and how much memory their rows take."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.bundle.geometry import KV, LLAMA_KV, PAGED_KV, Geometry, find_kv_type, load, store
from edgeinfer.config import ONNX_KV_TYPES
from edgeinfer.errors import UsageError


def test_float32_needs_no_copy() -> None:
    rows = np.ones((1, 2, 4), np.float32)
    assert store(KV["float32"], rows) is rows and load(KV["float32"], rows) is rows


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
