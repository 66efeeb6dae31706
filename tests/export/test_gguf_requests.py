"""What is asked of llama.cpp's quantizer, checked before it sees it: it ends the process on some of this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import BundleError, UsageError
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.options import fitting
from tests.gguf_builder import Builder, small_model

DOWN = "blk.0.ffn_down.weight"  # 8 rows of 16 columns


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of two layers whose matrices are floats."""
    return small_model().write(tmp_path / "float.gguf")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Q9", {}, "Q4_K_M"),
        ("IQ2_XS", {}, "importance"),
        ("Q4_0", {"prune_layers": [3]}, "no layer 3"),
        ("Q4_0", {"prune_layers": [-1]}, "no layer -1"),
        ("COPY", {"prune_layers": [0, 1]}, "all 2"),
        ("F16", {"tensor_types": {DOWN: "Q8_0"}}, "type F16"),
        ("Q4_0", {"tensor_types": {DOWN: "Q8_1"}}, "Q8_1"),
        ("Q4_0", {"tensor_types": {"blk.9.ffn_down.weight": "Q8_0"}}, "no tensor"),
        ("Q4_0", {"tensor_types": {"token_embd.weight": "IQ1_S"}}, "without importance"),
        ("Q4_0", {"importance": {DOWN: np.ones(64, np.float32)}}, "have shape"),
        ("Q4_0", {"importance": {DOWN: np.full(16, np.nan, np.float32)}}, "finite"),
        ("Q4_0", {"importance": {"output_norm.weight": np.ones(8, np.float32)}}, "not a matrix"),
    ],
)
def test_what_is_impossible_is_refused_before_llama_cpp_sees_it(
    source: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        quantize_gguf(source, source.parent / "q.gguf", kind, **options)
    assert list(source.parent.iterdir()) == [source]


def test_files_that_hold_no_model_are_refused(source: Path) -> None:
    for made in (Builder({}, []), small_model(general__architecture=None)):
        with pytest.raises(BundleError):
            quantize_gguf(made.write(source.parent / "no-model.gguf"), source.parent / "q.gguf", "Q4_0")
    with pytest.raises(BundleError):
        quantize_gguf(source.parent / "nothing.gguf", source.parent / "q.gguf", "Q4_0")
    with pytest.raises(UsageError, match="the input file itself"):
        quantize_gguf(source, source, "Q4_0")


def test_types_fall_back_as_llama_cpp_decides() -> None:
    assert [fitting(kind, 96) for kind in ("Q4_K", "Q6_K", "IQ3_S", "Q2_K", "Q8_0")] == [
        *("Q5_0", "Q8_0", "IQ4_NL", "Q4_0", "Q8_0")
    ]
    assert fitting("Q4_K", 256) == "Q4_K" and fitting("Q4_0", 40) == fitting("Q4_K", 40) == "F16"
