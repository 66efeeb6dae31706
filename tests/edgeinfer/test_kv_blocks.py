"""Blocks of cached rows against the gguf package's own quantization, which is llama.cpp's to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeinfer.bundle.geometry import FLOAT16, KV, LLAMA_KV, find_kv_type, from_blocks, load, store, to_blocks

numbers = st.floats(-100, 100, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)


@pytest.mark.gguf
@settings(deadline=None)
@given(rows=arrays(np.float32, (1, 2, 64), elements=numbers), bits=st.sampled_from([8, 4]))
def test_blocks_are_llamas(rows: np.ndarray, bits: int) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    kind = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_0}[bits]
    stored = to_blocks(rows, bits)
    assert stored.shape == (1, 2, LLAMA_KV["q8_0" if bits == 8 else "q4_0"].width(64))
    # Halves between two integers: numpy rounds them to even, llama.cpp's plain C away from zero.
    wanted = gguf.quants.quantize(rows, kind)
    differing = stored.view(np.int8).astype(np.int16) - wanted.view(np.int8)
    assert np.abs(differing).max() <= 1 if bits == 8 else np.array_equal(stored, wanted)
    assert np.array_equal(from_blocks(stored, bits), gguf.quants.dequantize(stored, kind))


def test_the_types_and_their_meanings() -> None:
    assert list(LLAMA_KV) == ["float32", "float16", "q8_0", "q4_0"] and set(LLAMA_KV) & set(KV) == {"float32"}
    assert [kind.row_bytes(64) for kind in LLAMA_KV.values()] == [256, 128, 68, 36]
    rows = np.linspace(-2, 2, 128, dtype=np.float32).reshape(1, 2, 64)
    half = find_kv_type(FLOAT16)
    assert store(half, rows).dtype == np.float16
    for name, kind in LLAMA_KV.items():
        near = {"q4_0": 0.2, "q8_0": 0.01}.get(name, 1e-3)
        assert np.abs(load(kind, store(kind, rows)) - rows).max() < near
