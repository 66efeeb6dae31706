"""Random modules for multi-token prediction in the layout of hybrid Qwens, and what transformers makes of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["ReferenceModule", "add_module"]


def _layer_model(config: Any) -> Any:
    """A model of the module's layer alone, whose final norm is the module's."""
    own = copy.deepcopy(config)
    own.num_hidden_layers, own.layer_types, own.mlp_only_layers, own.decoder_sparse_step = 1, ["full_attention"], [], 1
    models: Any = AutoModelForCausalLM
    return models.from_config(own)


def add_module(target: Path, seed: int = 0) -> None:
    """Adds a random module to a checkpoint of one file."""
    file, random = target / "model.safetensors", torch.Generator().manual_seed(seed)
    config = AutoConfig.from_pretrained(target)
    size = config.hidden_size
    layers = {n: t for n, t in _layer_model(config).model.state_dict().items() if not n.startswith("embed_tokens")}
    shapes = {name: tuple(tensor.shape) for name, tensor in layers.items()}
    shapes |= {"fc.weight": (size, 2 * size), "pre_fc_norm_embedding.weight": (size,)}
    shapes["pre_fc_norm_hidden.weight"] = (size,)
    drawn = {
        f"mtp.{name}": torch.randn(shape, generator=random) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)
        for name, shape in shapes.items()
    }
    save_file(load_file(file) | drawn, file, {"format": "pt"})


class ReferenceModule:
    """What a module drafts, every row computed anew by transformers' code of the target and of its layers.

    Args:
        target: the checkpoint of both.
    """

    def __init__(self, target: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        tensors = load_file(target / "model.safetensors")
        own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        self._layers = _layer_model(self._model.config).model
        self._fc = own.pop("fc.weight")
        self._norms = [own.pop(f"pre_fc_norm_{part}.weight") for part in ("embedding", "hidden")]
        missing = self._layers.load_state_dict(own, strict=False)
        assert missing.missing_keys == ["embed_tokens.weight"] and not missing.unexpected_keys

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:  # (V,)
        """Behind a text and drafted tokens."""
        states = self._model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        rows, own = list(states[: len(tokens) - 1]), [*tokens[1:], *drafted]
        while True:
            embedded = self._model.model.embed_tokens(torch.tensor(own[: len(rows)]))
            parts = zip((embedded, torch.stack(rows)), self._norms, strict=True)
            joined = torch.cat([self._norm(part, weight) for part, weight in parts], -1)
            given = self._layers(inputs_embeds=torch.nn.functional.linear(joined, self._fc)[None])
            out = given.last_hidden_state[0]
            if len(rows) == len(own):
                break
            rows.append(out[-1])
        logits: Tensor = self._model.lm_head(out[-1])
        return logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)
