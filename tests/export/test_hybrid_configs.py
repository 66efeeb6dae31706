"""Configurations of decoders with recurrent layers: what they leave out, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgeinfer.errors import BundleError, CheckpointError
from edgeinfer.export.architectures.lfm import LFM2, LFM3
from edgeinfer.export.architectures.qwen import QWEN3_5
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.hf_config import HFConfig
from tests.factories import make_checkpoint
from tests.tables import each_row

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


@each_row(
    ("values", "named"),
    [
        ({"full_attn_idxs": 2}, "full_attn_idxs"),
        ({"layer_types": ["conv", "conv"]}, "layer_types"),
        ({"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types"),
        ({"layer_types": ["conv", [], "conv"]}, "layer_types"),
        ({"layer_types": "conv"}, "layer_types"),
        ({"layer_types": ["conv"] * 3, "conv_L_cache": "3"}, "conv_L_cache"),
    ],
)
def test_contradictions_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        LFM2.read(HFConfig(LEAST | values), True)
    assert "\n" not in str(caught.value)


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
    ("values", "named"),
    [
        ({"layer_types": ["linear_attention", "conv", "full_attention"]}, "layer_types"),
        ({"linear_num_value_heads": None}, "linear_num_value_heads"),
        ({"linear_num_value_heads": 3}, "value_heads must be a multiple"),
        ({"linear_key_head_dim": 1 << 40}, "from 1 to 4096"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_contradictions_of_a_qwen_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, BundleError), match=named) as caught:
        QWEN3_5.read(HFConfig(LEAST | DELTA | values), True)
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
