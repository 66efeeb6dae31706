"""Random Hydra++ modules, and what the published code computes of them, in torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

_COPIED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "head_dim"),
    *("rms_norm_eps", "hidden_act", "max_position_embeddings"),
)


def make_hydra(
    folder: Path, target: Path, *, heads: int = 3, layers: int = 3, drafted: int = 120, seed: int = 0
) -> Path:
    """A checkpoint of a random module that can draft so many tokens; `layers` are of each head."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    own = {name: value for name, value in model.config.to_dict().items() if name in _COPIED}
    config = own | {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 10_000.0}
    random, size, vocabulary = torch.Generator().manual_seed(seed), own["hidden_size"], own["vocab_size"]

    def draw(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=random) / shape[-1] ** 0.5
        return drawn

    def norm() -> Tensor:
        return 1 + torch.randn(size, generator=random) / 4

    layer = LlamaModel(LlamaConfig(**config)).layers[0].state_dict()
    tensors = {f"layers.0.{name}": norm() if value.ndim == 1 else draw(*value.shape) for name, value in layer.items()}
    tensors |= {"norm.weight": norm(), "embed_norm.weight": norm(), "lm_head.weight": draw(drafted, size)}
    tensors["state_norm.weight"] = model.model.norm(torch.ones(size)).detach()
    for head in range(heads):
        for part in ("first.linear", "first.res_connection", "further.linear"):
            inputs = size if part == "further.linear" else (2 + head) * size
            tensors |= {f"heads.{head}.{part}.weight": draw(size, inputs), f"heads.{head}.{part}.bias": draw(size)}
    chosen = torch.randperm(vocabulary, generator=random)[:drafted].sort().values
    tensors["d2t"] = chosen - torch.arange(drafted)
    folder.mkdir(parents=True)
    further = {"draft_vocab_size": drafted, "hydra_config": {"num_heads": heads, "num_layers": layers}}
    (folder / "config.json").write_text(json.dumps(config | further | {"tie_word_embeddings": False}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class ReferenceHydra:
    """What a module drafts: transformers' layer over the states that the target's own code gives, then its heads."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        config = json.loads((folder / "config.json").read_text())
        self._layers, self._eps = config["hydra_config"]["num_layers"], config["rms_norm_eps"]
        self._tensors = load_file(folder / "model.safetensors")
        self._prefix = LlamaModel(LlamaConfig(**config)).train(False)
        own = {name: value for name, value in self._tensors.items() if name.startswith(("layers.", "norm."))}
        assert self._prefix.load_state_dict(own, strict=False).missing_keys == ["embed_tokens.weight"]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:  # (V,)
        """Behind a text and drafted tokens; those that the module cannot draft are minus infinity."""
        states = self._model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1]
        prefix = self._prefix(inputs_embeds=states[:, :-1]).last_hidden_state[0, -1]
        table: Tensor = self._model.model.embed_tokens.weight
        head = f"heads.{len(drafted)}"
        embedded = embedding(torch.tensor([tokens[-1], *drafted]), table)
        scale = torch.rsqrt(embedded.square().mean(-1, keepdim=True) + self._eps)
        value = torch.cat([prefix, (embedded * scale * self._tensors["embed_norm.weight"]).flatten()])
        value = self._linear(value, f"{head}.first.res_connection") + silu(self._linear(value, f"{head}.first.linear"))
        for _ in range(self._layers - 1):
            value = value + silu(self._linear(value, f"{head}.further.linear"))
        logits = linear(value, self._tensors["lm_head.weight"])
        places = torch.arange(len(logits)) + self._tensors["d2t"]
        return torch.full((len(table),), -torch.inf).index_copy(0, places, logits)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])
