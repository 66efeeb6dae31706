"""Reading config.json in the words of transformers 4 and 5."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError
from safetensors.numpy import load_file, save_file

from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import BundleError, CheckpointError, EdgeInferError, UnsupportedArchitectureError
from edgeinfer.export.architectures import ARCHITECTURES, find_architecture
from edgeinfer.export.architectures.lfm import LFM2, LFM3
from edgeinfer.export.architectures.qwen import QWEN3_5
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.gguf.writer import GGUF_ARCHITECTURES, WITHOUT_GGUF
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source import hf_config
from edgeinfer.export.source.hf_config import HFConfig, completed, read_config
from tests.export.families.table import FAMILIES, Family
from tests.factories import COMMON, make_checkpoint, make_config
from tests.tables import each_row
from tests.tools.config_defaults import known_defaults, text_config_class

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


def test_other_names_of_the_same() -> None:
    """MiniMax M2's rotated channels, InternLM3's biases."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim", "max_position_embeddings"), 64)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}

    def spec(name: str, **more: Any) -> Any:
        given = config(architectures=[name], rms_norm_eps=1e-6, hidden_act="silu", **sizes, **more)
        return find_architecture(given).read(given, False)

    rope = {"rope_type": "default", "rope_theta": 1e4}
    half = spec("MiniMaxM2ForCausalLM", rope_parameters=rope | {"partial_rotary_factor": 0.5})
    assert spec("MiniMaxM2ForCausalLM", rope_parameters=rope, rotary_dim=32) == half
    biased = spec("LlamaForCausalLM", rope_parameters=rope, attention_bias=True, mlp_bias=True)
    assert spec("InternLM3ForCausalLM", rope_parameters=rope, qkv_bias=True, bias=True) == biased


def test_every_family_has_gguf_files_or_a_reason() -> None:
    kinds = {family.model_types[0] for family in ARCHITECTURES}
    assert kinds == GGUF_ARCHITECTURES.keys() | WITHOUT_GGUF.keys()
    assert not GGUF_ARCHITECTURES.keys() & WITHOUT_GGUF.keys()


@pytest.mark.slow
def test_the_file_says_what_transformers_says() -> None:
    assert known_defaults() == hf_config._known_defaults(), "run: python -m tests.tools.config_defaults"


def read(values: dict[str, Any]) -> DecoderSpec | None:
    """The decoder; None where it is refused."""
    config = HFConfig(values)
    try:
        return find_architecture(config).read(config, False)
    except (EdgeInferError, BundleError):
        return None


def written(config: Any) -> dict[str, Any]:
    """As transformers writes it."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


# What the classes make of other fields where it is not there.
_RESOLVED = ("layer_types", "mlp_layer_types", "rope_parameters", "head_dim", "num_key_value_heads")


def changes(family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations of a family that leave a field out or have null there."""
    kind = text_config_class(f"{family.name}ForCausalLM")
    fields = sorted({*hf_config._known_defaults()["families"][kind.model_type]["defaults"], *_RESOLVED})
    for settings in family.settings:
        whole = written(make_config(family.name, **settings))
        for name in (name for name in fields if name in whole):
            yield f"{family.name} without {name}", {key: value for key, value in whole.items() if key != name}
            yield f"{family.name} with {name}=null", whole | {name: None}
    yield f"{family.name} without anything", {"architectures": whole["architectures"]}


def differing(family: Family) -> Iterator[str]:
    """Where another decoder is read than transformers' class describes, or none."""
    kind = text_config_class(f"{family.name}ForCausalLM")
    for what, values in changes(family):
        try:
            meant = written(kind.from_dict(dict(values)))
        except (ArithmeticError, AttributeError, ValueError, TypeError, KeyError, StrictDataclassError):
            continue  # transformers cannot do without it either
        expected, found = read(meant), read(completed(values, kind.model_type))
        if expected is not None and found != expected:
            parts = [] if found is None else [n for n, value in vars(found).items() if value != getattr(expected, n)]
            yield f"{what}: {', '.join(parts) or 'refused'}"


@pytest.mark.slow
def test_each_field_may_be_left_out() -> None:
    assert [line for family in FAMILIES for line in differing(family)] == []


def test_what_a_published_gemma_3_does_not_say(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_config(tmp_path)
    spec = find_architecture(config).read(config, True)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert (spec.norm_eps, spec.max_positions, spec.rope.theta, spec.rope.factor) == (1e-6, 131072, 1e6, 8.0)
    assert spec.windows[:6] == (1024,) * 5 + (0,) and spec.more_ropes[0].theta == 1e4


LEAST = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
}


def test_older_configurations_list_the_layers_of_attention() -> None:
    spec = LFM2.read(HFConfig(LEAST | {"full_attn_idxs": [2], "block_ff_dim": 768, "block_multiple_of": 256}), True)
    assert spec.mixers == ("conv", "conv", "attention") and spec.rope.theta == 1e6
    assert spec.intermediate_size == 512 and spec.conv is not None and spec.conv.width == 3
    assert [kept.heads * kept.key_size for kept in spec.geometry.kept] == [0, 0, 32]
    assert LFM2.read(HFConfig(LEAST), True).mixers == ()


DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def test_every_fourth_layer_of_a_qwen_attends_where_it_does_not_say() -> None:
    spec = QWEN3_5.read(HFConfig(LEAST | DELTA | {"num_hidden_layers": 5}), True)
    assert spec.mixers == ("delta", "delta", "delta", "attention", "delta") and spec.rope.dim == 4
    assert [state.heads for state in spec.geometry.states] == [4, 4, 4, 0, 4]
    every = QWEN3_5.read(HFConfig(LEAST | DELTA | {"full_attention_interval": 1}), True)
    assert every.mixers == () and every.geometry.states == ()


@each_row(
    ("family", "values", "named"),
    [
        (LFM2, {"full_attn_idxs": 2}, "full_attn_idxs"),
        (LFM2, {"layer_types": ["conv", "conv"]}, "layer_types"),
        (LFM2, {"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types"),
        (LFM2, {"layer_types": ["conv", [], "conv"]}, "layer_types"),
        (LFM2, {"layer_types": "conv"}, "layer_types"),
        (LFM2, {"layer_types": ["conv"] * 3, "conv_L_cache": "3"}, "conv_L_cache"),
        (QWEN3_5, DELTA | {"layer_types": ["linear_attention", "conv", "full_attention"]}, "layer_types"),
        (QWEN3_5, DELTA | {"linear_num_value_heads": None}, "linear_num_value_heads"),
        (QWEN3_5, DELTA | {"linear_num_value_heads": 3}, "value_heads must be a multiple"),
        (QWEN3_5, DELTA | {"linear_key_head_dim": 1 << 40}, "from 1 to 4096"),
        (QWEN3_5, DELTA | {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_5, DELTA | {"attention_bias": True}, "attention_bias"),
    ],
)
def test_contradictions_are_refused_by_name(family: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, BundleError), match=named) as caught:
        family.read(HFConfig(LEAST | values), True)
    assert "\n" not in str(caught.value)


def test_what_sees_and_what_predicts_further_is_left_out(tmp_path: Path) -> None:
    """Published checkpoints hold the language model among others, with its own names and configuration."""
    folder = tmp_path / "checkpoint"
    layers: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    make_checkpoint(folder, "Qwen3_5", **layers, **DELTA)
    whole = export_checkpoint(folder, tmp_path / "whole", ExportConfig(bits=32))
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    file = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model."): t for name, t in load_file(file).items()}
    more = {name: np.zeros((2, 2), np.float32) for name in ("mtp.fc.weight", "model.visual.patch_embed.proj.weight")}
    save_file(tensors | more, file)
    seeing = export_checkpoint(folder, tmp_path / "seeing", ExportConfig(bits=32))
    assert (seeing / "weights.bin").read_bytes() == (whole / "weights.bin").read_bytes()


def test_layers_of_an_lfm3_that_does_not_say() -> None:
    spec = LFM3.read(HFConfig(LEAST | {"num_hidden_layers": 6, "sliding_window": 8}), True)
    assert spec.mixers == ("conv", "conv", "attention", "conv", "attention", "conv")
    assert spec.windows == (0, 0, 0, 0, 8, 0)


SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "rms_norm_eps": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "Bamba": SCAN,
    "FalconH1": SCAN | {"mamba_d_ssm": 128},
    "GraniteMoeHybrid": SCAN | {"shared_intermediate_size": 96, "num_local_experts": 0},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "layer_norm_epsilon": 1e-5},
    "NemotronH": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "layer_norm_epsilon": 1e-5}
    | {"hybrid_override_pattern": "M*-", "mlp_hidden_act": "relu2"},
}


def read_kind(name: str, **changes: Any) -> DecoderSpec:
    config = HFConfig(COMMON | KINDS[name] | changes | {"architectures": [f"{name}ForCausalLM"]})
    family = find_architecture(config)
    spec = family.read(config, False)
    assert family.tensors(config, spec)
    return spec


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("Bamba", {"attn_layer_indices": [1, 7]}, "attn_layer_indices"),
        ("Bamba", {"mamba_d_head": 8}, "8 heads of 8 channels"),
        ("Bamba", {"time_step_limit": [0.1]}, "two numbers"),
        ("Bamba", {"time_step_limit": [2.0, 1.0]}, "must not exceed"),
        ("Bamba", {"time_step_limit": {"a": 1}}, "two numbers"),
        ("Bamba", {"mamba_n_groups": 3}, "multiple of its groups"),
        ("Bamba", {"hidden_act": "relu2"}, "activation relu2"),
        ("FalconH1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers"),
        ("FalconH1", {"mlp_multipliers": ["a", 1.0]}, "mlp_multipliers"),
        ("FalconH1", {"projectors_bias": True}, "one product alone"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba", "rwkv", "mamba"]}, "'rwkv'"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba"]}, "are not 3 of"),
        ("Mamba2", {"num_heads": 7}, "expand times hidden_size"),
        ("NemotronH", {"hybrid_override_pattern": "ME-", "moe_latent_size": 32}, "latent state"),
        ("NemotronH", {"hybrid_override_pattern": "M?-"}, "'[?]'"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(name: str, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises((BundleError, CheckpointError, UnsupportedArchitectureError), match=fault) as caught:
        read_kind(name, **changes)
    assert "\n" not in str(caught.value)


def test_layers_of_attention_alone_are_a_plain_decoder() -> None:
    spec = read_kind("GraniteMoeHybrid", layer_types=["attention"] * 3, position_embedding_type="rope")
    assert not spec.mixers and spec.mamba2 is None and not spec.geometry.states


@each_row("unbounded", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]])
def test_time_steps_without_a_bound_are_left_as_they_are(unbounded: Any) -> None:
    spec = read_kind("Bamba", time_step_limit=unbounded).mamba2
    assert spec is not None and (spec.least_step, spec.most_step) == (0.0, 0.0)


@each_row("published", [{"hybrid_override_pattern": "M*-"}, {"layers_block_type": ["mamba"] * 3, "auto_map": {}}])
def test_steps_of_nemotron_h_go_by_the_code_that_a_checkpoint_names(published: dict[str, Any]) -> None:
    steps = {"time_step_limit": [0.0, float("inf")], "time_step_min": 0.01}
    brought = read_kind("NemotronH", **published, **steps).mamba2
    assert brought is not None and (brought.least_step, brought.most_step) == (0.0, 0.0)
    own = read_kind("NemotronH", hybrid_override_pattern=None, layers_block_type=["mamba"] * 3, **steps).mamba2
    assert own is not None and own.least_step == 0.01 and own.most_step > 1e9
