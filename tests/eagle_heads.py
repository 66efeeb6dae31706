"""Random EAGLE heads in their published layouts, and what the published code computes of them, in torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM


def make_head(folder: Path, target: Path, form: str, *, seed: int = 0, drafted: int = 0, **settings: Any) -> Path:
    """A checkpoint of a random head for a Llama checkpoint: "eagle3", "eagle3-layers" with the other names of its
    layer, or "eagle1", with `drafted` tokens of its own vocabulary (0 is the target's) and further fields of
    config.json."""
    config = json.loads((target / "config.json").read_text())
    size, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    wide = config.get("head_dim") or size // heads
    kv, vocabulary = config["num_key_value_heads"] * wide, config["vocab_size"]
    random, third = torch.Generator().manual_seed(seed), form != "eagle1"
    root, reads = "midlayer." if form == "eagle3" else "layers.0.", 2 * size if third else size

    def draw(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=random) / columns**0.5
        return drawn

    def norm(width: int = size) -> Tensor:
        return 1 + torch.randn(width, generator=random) / 4

    tensors = {
        f"{root}self_attn.q_proj.weight": draw(heads * wide, reads),
        f"{root}self_attn.k_proj.weight": draw(kv, reads),
        f"{root}self_attn.v_proj.weight": draw(kv, reads),
        f"{root}self_attn.o_proj.weight": draw(size, heads * wide),
        f"{root}mlp.gate_proj.weight": draw(inner, size),
        f"{root}mlp.up_proj.weight": draw(inner, size),
        f"{root}mlp.down_proj.weight": draw(size, inner),
        f"{root}post_attention_layernorm.weight": norm(),
    }
    own = {name: config[name] for name in _COPIED if name in config} | {"num_hidden_layers": 1}
    if third:
        tensors |= {f"{root}hidden_norm.weight": norm(), f"{root}input_layernorm.weight": norm(), "norm.weight": norm()}
        tensors |= {"fc.weight": draw(size, 3 * size), "lm_head.weight": draw(drafted or vocabulary, size)}
        own |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted or vocabulary}
        if settings.get("norm_before_fc"):
            tensors["input_norm.weight"] = norm(3 * size)
        if drafted:
            chosen = torch.randperm(vocabulary, generator=random)[:drafted].sort().values
            tensors["d2t"] = chosen - torch.arange(drafted)
            tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, chosen, True)
    else:
        tensors |= {"fc.weight": draw(size, 2 * size), "fc.bias": torch.randn(size, generator=random) / 8}
        own |= {"architectures": ["LlamaForCausalLM"], "bias": True}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(own | settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


_COPIED = (
    *("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    *("head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "hidden_act"),
    *("max_position_embeddings", "tie_word_embeddings"),
)


class ReferenceHead:
    """What a head drafts, each row computed from scratch from the states that the target's own code gives."""

    def __init__(self, folder: Path, target: Path) -> None:
        from safetensors.torch import load_file

        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self._third = "norm.weight" in tensors
        self._tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:  # (V,)
        """Behind a text and drafted tokens; those that the head cannot draft are minus infinity."""
        found = self._model(torch.tensor([list(tokens)]), output_hidden_states=True)
        states = found.hidden_states
        if self._third:
            taps = self._config.get("eagle_aux_hidden_state_layer_ids")
            layers = self._model.config.num_hidden_layers
            tapped = torch.cat([states[tap] for tap in taps or (2, layers // 2, layers - 3)], -1)[0]
            if self._config.get("norm_before_fc"):
                tapped = self._norm(tapped, "input_norm.weight")
            given = linear(tapped, self._tensors["fc.weight"])
        else:
            given = states[-1][0]  # transformers gives the last one normed
        rows, own = list(given[: len(tokens) - 1]), [*tokens[1:], *drafted]
        while True:
            out = self._layer(torch.stack(rows), torch.tensor(own[: len(rows)]))
            if len(rows) == len(own):
                break
            rows.append(out[-1])
        last = out[-1]
        if not self._third:
            return linear(last, self._model.lm_head.weight)
        logits = linear(self._norm(last, "norm.weight"), self._tensors["lm_head.weight"])
        if "d2t" not in self._tensors:
            return logits
        places = torch.arange(len(logits)) + self._tensors["d2t"]
        return torch.full((self._model.config.vocab_size,), -torch.inf).index_copy(0, places, logits)

    def _layer(self, states: Tensor, tokens: Tensor) -> Tensor:  # (S, D), (S,) -> (S, D)
        embedded, name = self._model.model.embed_tokens(tokens), "layers.0."
        if self._third:
            normed = self._norm(states, f"{name}hidden_norm.weight")
            entering = torch.cat([self._norm(embedded, f"{name}input_layernorm.weight"), normed], -1)
            residual = normed if self._config.get("norm_before_residual") else states
        else:
            joined = torch.cat([embedded, states], -1)
            entering = residual = linear(joined, self._tensors["fc.weight"], self._tensors["fc.bias"])
        hidden = residual + self._attention(entering, f"{name}self_attn.")
        normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
        gate, up, down = (self._tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return hidden + linear(silu(linear(normed, gate)) * linear(normed, up), down)

    def _attention(self, entering: Tensor, name: str) -> Tensor:
        config = self._model.config
        wide = self._model.model.layers[0].self_attn.head_dim
        products = [linear(entering, self._tensors[f"{name}{part}_proj.weight"]) for part in "qkv"]
        queries, keys, values = (each.reshape(len(entering), -1, wide).transpose(0, 1) for each in products)
        cos, sin = self._model.model.rotary_emb(entering[None], torch.arange(len(entering))[None])
        queries, keys = (x * cos[0] + _halves_turned(x) * sin[0] for x in (queries, keys))
        shared = config.num_attention_heads // config.num_key_value_heads
        keys, values = (x.repeat_interleave(shared, 0) for x in (keys, values))
        mixed = scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)[0]
        return linear(mixed.transpose(0, 1).flatten(1), self._tensors[f"{name}o_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return scaled * self._tensors[name]


def _halves_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
