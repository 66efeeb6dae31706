"""edgeinfer.Attention gives what transformers does: norms, rotations, windows, soft caps and sinks of its layers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.runtime.native.library import NativeKernel
from tests.runtime.native.attention_oracle import Shape, Weights, make_layout
from tests.runtime.native.attention_runs import Node, Runner, Store

ROWS, HIDDEN = 90, 96


@dataclass(frozen=True)
class Family:
    """A layer of transformers, and what the operator is told of it."""

    name: str  # of the module; the class is that with Attention behind it
    shape: Shape
    config: dict[str, Any] = field(default_factory=dict)
    class_name: str = ""


HEADS = Shape(heads=6, kv_heads=2, key_size=16, value_size=16, rotary=16)
FAMILIES = (
    Family("llama", HEADS),
    Family("qwen3", replace(HEADS, epsilon=1e-5), {"rms_norm_eps": 1e-5}),
    Family("olmo2", replace(HEADS, epsilon=1e-4), {"rms_norm_eps": 1e-4}),
    Family(
        "phi", replace(HEADS, rotary=8), {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    Family(
        "glm4",
        replace(HEADS, rotary=8, interleaved=True),
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    Family("smollm3", replace(HEADS, rotary=0), {"no_rope_layers": [0]}, "SmolLM3"),
    Family(
        "gemma2",
        replace(HEADS, window=20, softcap=2.0, scale=0.5),
        {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    Family("gpt_oss", replace(HEADS, window=33), {"sliding_window": 33}, "GptOss"),
)


def make_layer(family: Family) -> torch.nn.Module:
    """One with random weights and nothing behind the heads."""
    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    title = family.class_name or family.name.capitalize()
    shape = family.shape
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config = getattr(module, f"{title}Config")(**sizes, head_dim=shape.key_size, num_hidden_layers=1, **family.config)
    config.head_dim, config._attn_implementation = shape.key_size, "eager"
    layer: torch.nn.Module = getattr(module, f"{title}Attention")(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    setattr(layer, "dense" if family.name == "phi" else "o_proj", torch.nn.Identity())
    return layer


def layer_gives(layer: torch.nn.Module, shape: Shape, hidden: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
    """What transformers makes of rows (1, S, hidden) of a chain."""
    at = torch.arange(ROWS)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (shape.window or ROWS))
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    halves = 1 if type(layer).__name__ == "GptOssAttention" else 2
    tables = tuple(torch.from_numpy(np.concatenate([table] * halves, axis=1))[None] for table in (cos, sin))
    result: torch.Tensor = layer(hidden, position_embeddings=tables, attention_mask=mask)[0]
    return result.reshape(ROWS, -1)


@pytest.mark.slow
def test_attention_is_that_of_transformers(kernel: NativeKernel) -> None:
    torch.manual_seed(1)
    angles = np.random.default_rng(1).uniform(0, 6, (ROWS, 8))
    for family in FAMILIES:
        layer, shape = make_layer(family), family.shape
        half = shape.rotary // 2
        cos, sin = (function(angles[:, :half]).astype(np.float32) for function in (np.cos, np.sin))
        hidden = torch.randn(1, ROWS, HIDDEN)
        with torch.no_grad():
            wanted = layer_gives(layer, shape, hidden, cos, sin).numpy()
            qkv = torch.cat([getattr(layer, f"{name}_proj")(hidden)[0] for name in "qkv"], dim=1).numpy()
        given = {name: getattr(layer, name, None) for name in ("q_norm", "k_norm", "sinks")}
        arrays = {name: getattr(p, "weight", p).detach().numpy() for name, p in given.items() if p is not None}
        runner = Runner(kernel, shape, Weights(cos, sin, **arrays) if half else Weights(**arrays))
        store = Store.of(make_layout(shape, "float32", "float32"), 1, ROWS)
        got = runner(store, [Node(0, tuple(range(s + 1)), qkv[s], s) for s in range(ROWS)])
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max(), family.name
