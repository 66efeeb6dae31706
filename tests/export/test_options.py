"""What an export may be asked for, and what of it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.export.options import ExportConfig


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 5},
        {"group_size": 16},
        {"head_bits": 5},
        {"layout": "upright"},
        {"exporter": "other"},
        {"name": " "},
        {"bits": True},
        {"method": "magic"},
        {"method": "gptq"},
        {"calibration_tokens": 1},
        {"budget_bits": 3.5, "target_size": 10**6},
        {"budget_bits": 0.5},
        {"budget_bits": float("nan")},
        {"target_size": 0},
        {"bits_for": (("head", 5),)},
        {"bits_for": (("", 4),)},
        {"exporter": "optimum", "budget_bits": 4.0},
    ],
)
def test_impossible_options_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ExportConfig(**options)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"format": "mlx"}, "format='mlx'"),
        ({"format": "onnx", "gguf_type": "Q8_0"}, "GGUF type"),
        ({"format": "onnx", "bits": 16}, "bits=16"),
        ({"format": "gguf", "gguf_type": "Q9_9"}, "Q9_9"),
        ({"format": "gguf", "exporter": "optimum"}, "exporter"),
        ({"format": "gguf", "layout": "portable"}, "layout"),
        ({"format": "gguf", "group_size": 32}, "group_size"),
        ({"format": "gguf", "symmetric": True}, "symmetric"),
        ({"format": "gguf", "keep_small": False}, "keep_small"),
    ],
)
def test_what_a_format_has_not_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        ExportConfig(**given)


def test_bits_stand_for_types_of_gguf() -> None:
    found = {bits: ExportConfig(format="gguf", bits=bits).gguf_kind for bits in (2, 4, 8, 16, 32)}
    assert found == {2: "Q2_K", 4: "Q4_0", 8: "Q8_0", 16: "F16", 32: "F32"}


def test_names_of_types_are_taken_in_any_case() -> None:
    assert ExportConfig(format="gguf", gguf_type="q4_k_m").gguf_kind == "Q4_K_M"
