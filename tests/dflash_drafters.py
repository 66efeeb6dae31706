"""Random DFlash drafters in the published layout, and what the published code computes of them, in torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

# What a drafter has as its target has it.
_OWN = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_COPIED = ("hidden_size", "vocab_size", "hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings")


def make_drafter(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    block: int = 6,
    taps: Sequence[int] | None = (0, 2, 4),
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A checkpoint of a random drafter that reads the states of the layers `taps` of the target, or of those that the
    rule says, with further fields of config.json, or of its `dflash_config` where only DFlash has them."""
    config = json.loads((target / "config.json").read_text())
    size, heads, kv_heads, wide, inner = config["hidden_size"], 4, 2, 32, 96
    random = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=random) / columns**0.5
        return drawn

    def norm(width: int = size) -> Tensor:
        return 1 + torch.randn(width, generator=random) / 4

    tensors = {"fc.weight": draw(size, size * (layers if taps is None else len(taps)))}
    tensors |= {"hidden_norm.weight": norm(), "norm.weight": norm()}
    for layer in range(layers):
        own = {
            "self_attn.q_proj.weight": draw(heads * wide, size),
            "self_attn.k_proj.weight": draw(kv_heads * wide, size),
            "self_attn.v_proj.weight": draw(kv_heads * wide, size),
            "self_attn.o_proj.weight": draw(size, heads * wide),
            "self_attn.q_norm.weight": norm(wide),
            "self_attn.k_norm.weight": norm(wide),
            "mlp.gate_proj.weight": draw(inner, size),
            "mlp.up_proj.weight": draw(inner, size),
            "mlp.down_proj.weight": draw(size, inner),
            "input_layernorm.weight": norm(),
            "post_attention_layernorm.weight": norm(),
        }
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
    named = {} if taps is None else {"target_layer_ids": list(taps)}
    fields: dict[str, Any] = (
        {"rms_norm_eps": 1e-5}
        | {name: config[name] for name in _COPIED if name in config}
        | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": wide,
            "intermediate_size": inner,
            "num_target_layers": config["num_hidden_layers"],
            "layer_types": ["full_attention"] * layers,
            "use_sliding_window": False,
            "attention_bias": False,
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "block_size": block,
            "dflash_config": {"mask_token_id": 3} | named | {n: v for n, v in settings.items() if n in _OWN},
        }
        | {name: value for name, value in settings.items() if name not in _OWN}
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class ReferenceDrafter:
    """What a drafter fills a block with: each row from scratch, of the states that the target's own code gives."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = load_file(folder / "model.safetensors")

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:  # (B - 1, V)
        """Logits of the positions after a text whose last token is the root."""
        config, own = self._config, self._config["dflash_config"]
        layers, depth = self._model.config.num_hidden_layers, config["num_hidden_layers"]
        ids = own.get("target_layer_ids", [1, layers - 3] if depth == 2 else [layers // 2])
        states = self._model(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        tapped = torch.cat([states[layer + 1] for layer in ids], -1)[0]
        given = self._norm(linear(tapped, self._tensors["fc.weight"]), "hidden_norm.weight")
        block = [tokens[-1], *[own["mask_token_id"]] * (config["block_size"] - 1)]
        hidden = self._model.get_input_embeddings().weight[block] * own.get("input_embedding_scale", 1.0)
        for layer in range(depth):
            name = f"layers.{layer}."
            normed = self._norm(hidden, f"{name}input_layernorm.weight")
            slides = config["layer_types"][layer] == "sliding_attention"
            window = config["sliding_window"] if slides else 0
            hidden = hidden + self._attention(given, normed, f"{name}self_attn.", window)
            normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
            gate, up, down = (self._tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            hidden = hidden + linear(silu(linear(normed, gate)) * linear(normed, up), down)
        logits: Tensor = self._model.lm_head(self._norm(hidden, "norm.weight")) * own.get("output_multiplier", 1.0)
        cap = own.get("final_logit_softcapping")
        return (cap * torch.tanh(logits / cap) if cap else logits)[1:]

    def _attention(self, given: Tensor, normed: Tensor, name: str, window: int) -> Tensor:
        both, wide = torch.cat([given, normed]), self._config["head_dim"]
        products = [
            linear(rows, self._tensors[f"{name}{part}_proj.weight"])
            for part, rows in zip("qkv", (normed, both, both), strict=True)
        ]
        queries, keys, values = (each.reshape(len(each), -1, wide).transpose(0, 1) for each in products)
        queries, keys = self._norm(queries, f"{name}q_norm.weight"), self._norm(keys, f"{name}k_norm.weight")
        queries, keys = self._turned(queries, len(given)), self._turned(keys, 0)
        shared = self._config["num_attention_heads"] // self._config["num_key_value_heads"]
        keys, values = (x.repeat_interleave(shared, 0) for x in (keys, values))
        # Layers with windows are causal.
        behind = torch.arange(len(given), len(both))[:, None] - torch.arange(len(both))
        seen = (behind >= 0) & (behind < window) if window else torch.ones_like(behind, dtype=torch.bool)
        mixed = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=seen)[0]
        return linear(mixed.transpose(0, 1).flatten(1), self._tensors[f"{name}o_proj.weight"])

    def _turned(self, x: Tensor, first: int) -> Tensor:  # (heads, S, h), rotated from a position on
        half = x.shape[-1] // 2
        theta = self._config.get("rope_theta", 10000.0)
        places = torch.arange(first, first + x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
        one, other = x.chunk(2, -1)
        cos, sin = places.cos(), places.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return scaled * self._tensors[name]
