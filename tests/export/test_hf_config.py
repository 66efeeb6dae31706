"""Reading config.json in the words of transformers 4 and 5."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures import ARCHITECTURES, find_architecture
from edgeinfer.export.gguf.writer import GGUF_ARCHITECTURES, WITHOUT_GGUF
from edgeinfer.export.source.hf_config import HFConfig
from tests.tables import each_row

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def config(**values: Any) -> HFConfig:
    return HFConfig(SIZES | values)


@each_row(
    ("old", "new", "spec"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, RopeSpec("default", 5e5, 16)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
            RopeSpec("linear", 1e4, 16, factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3,
            RopeSpec("llama3", 5e5, 16, 8.0, 1.0, 4.0, 32),
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
            RopeSpec("default", 1e4, 8),
        ),
    ],
)
def test_old_and_new_rotary_settings_mean_the_same(old: dict[str, Any], new: dict[str, Any], spec: RopeSpec) -> None:
    assert config(**old).rope(16) == spec
    assert config(rope_parameters=new).rope(16) == spec


def test_longrope_derives_its_attention_factor() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = config(rope_theta=1e4, rope_scaling=scaling, original_max_position_embeddings=64).rope(16)
    assert (rope.type, rope.original_max_positions) == ("longrope", 64)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


@each_row("values", [{"rope_scaling": {"rope_type": "axial"}}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}])
def test_unknown_rotary_types_name_the_other_route(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="--exporter optimum"):
        config(**values).rope(16)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="mish"):
        config(hidden_act="mish").activation()


def test_windows_by_layer() -> None:
    windows = {"sliding_window": 32, "use_sliding_window": True}
    assert config(**windows, max_window_layers=2).windows_by_layer() == (0, 0, 32, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert config(**windows, layer_types=kinds).windows_by_layer() == (32, 0, 32, 0)
    assert config(sliding_window=32, use_sliding_window=False).windows_by_layer() == ()
    assert config(sliding_window=32).uniform_windows() == (32,) * 4
    assert config(sliding_window=None).uniform_windows() == ()
    assert config(sliding_window=4096).uniform_windows() == ()
    with pytest.raises(CheckpointError, match="layer_types"):
        config(**windows, layer_types=["sliding_attention"]).windows_by_layer()


@each_row(
    ("name", "value"),
    [("hidden_size", None), ("hidden_size", "64"), ("hidden_size", 0), ("hidden_size", True), ("hidden_size", 62)],
)
def test_malformed_fields_are_named(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=name):
        config(**{name: value}).head_dim()


def test_text_has_one_position_where_a_picture_has_three() -> None:
    sections = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6}
    assert config(**sections).rope(128) == config(rope_theta=1e6).rope(128)


def test_architectures_are_found_by_class_then_by_type() -> None:
    assert find_architecture(config(architectures=["Qwen3ForCausalLM"])).model_types[0] == "qwen3"
    assert find_architecture(config(model_type="phi3")).model_types == ("phi3",)
    with pytest.raises(UnsupportedArchitectureError, match="class MambaForCausalLM are not supported"):
        find_architecture(config(architectures=["MambaForCausalLM"], model_type="llama"))
    with pytest.raises(UnsupportedArchitectureError):
        find_architecture(config())


@each_row(
    ("name", "kind", "says", "hint"),
    [
        ("JambaForCausalLM", "jamba", "supported (recurrent layers of the first Mamba).", "-m OWNER/NAME:Q4_K_M"),
        ("Glm4vForConditionalGeneration", "glm4v", "supported.", "-m OWNER/NAME:Q4_K_M"),
        ("Zamba2ForCausalLM", "zamba2", "share their weights), and llama.cpp does not have them", "models --catalog"),
        (None, "xlstm", "class xlstm are not supported (recurrent layers of xLSTM).", "models --catalog"),
    ],
)
def test_refusals_say_why_and_whether_gguf_files_run(name: str | None, kind: str, says: str, hint: str) -> None:
    named = {} if name is None else {"architectures": [name]}
    with pytest.raises(UnsupportedArchitectureError) as refused:
        find_architecture(config(model_type=kind, **named))
    assert says in refused.value.message and hint in refused.value.hint


def test_every_family_has_gguf_files_or_a_reason() -> None:
    kinds = {family.model_types[0] for family in ARCHITECTURES}
    assert kinds == GGUF_ARCHITECTURES.keys() | WITHOUT_GGUF.keys()
    assert not GGUF_ARCHITECTURES.keys() & WITHOUT_GGUF.keys()
