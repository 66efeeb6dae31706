"""Configurations of Mamba-2's families: what contradicts itself is refused in one line, what runs elsewhere by name."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import BundleError, CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.source.hf_config import HFConfig
from tests.factories import COMMON
from tests.tables import each_row

SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "rms_norm_eps": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "Bamba": SCAN,
    "FalconH1": SCAN | {"mamba_d_ssm": 128},
    "GraniteMoeHybrid": SCAN | {"shared_intermediate_size": 96, "num_local_experts": 0},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "layer_norm_epsilon": 1e-5},
    "NemotronH": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "layer_norm_epsilon": 1e-5}
    | {"hybrid_override_pattern": "M*-", "mlp_hidden_act": "relu2"},
}


def read(name: str, **changes: Any) -> DecoderSpec:
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
        read(name, **changes)
    assert "\n" not in str(caught.value)


def test_layers_of_attention_alone_are_a_plain_decoder() -> None:
    spec = read("GraniteMoeHybrid", layer_types=["attention"] * 3, position_embedding_type="rope")
    assert not spec.mixers and spec.mamba2 is None and not spec.geometry.states


@each_row("unbounded", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]])
def test_time_steps_without_a_bound_are_left_as_they_are(unbounded: Any) -> None:
    spec = read("Bamba", time_step_limit=unbounded).mamba2
    assert spec is not None and (spec.least_step, spec.most_step) == (0.0, 0.0)


@each_row("published", [{"hybrid_override_pattern": "M*-"}, {"layers_block_type": ["mamba"] * 3, "auto_map": {}}])
def test_steps_of_nemotron_h_go_by_the_code_that_a_checkpoint_names(published: dict[str, Any]) -> None:
    steps = {"time_step_limit": [0.0, float("inf")], "time_step_min": 0.01}
    brought = read("NemotronH", **published, **steps).mamba2
    assert brought is not None and (brought.least_step, brought.most_step) == (0.0, 0.0)
    own = read("NemotronH", hybrid_override_pattern=None, layers_block_type=["mamba"] * 3, **steps).mamba2
    assert own is not None and own.least_step == 0.01 and own.most_step > 1e9
