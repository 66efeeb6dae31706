"""Configurations of decoders with recurrent layers: what they leave out, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures.lfm import LFM2, LFM3
from edgeinfer.export.source.hf_config import HFConfig

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


@pytest.mark.parametrize(
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


def test_lfm3_needs_its_layers_named() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        LFM3.read(HFConfig(LEAST), True)
