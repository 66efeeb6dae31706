"""Random modules for multi-token prediction in the layouts of their models, and what transformers makes of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import randomise


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
    """What a module drafts, each row computed from scratch by transformers' code of the target and of its layers; both
    are in one checkpoint."""

    _offset = 1  # of the weights of the norms of what enters

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
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (self._offset + weight)


def add_next_layer(target: Path, layer: Path, seed: int = 0) -> None:
    """Adds the layer behind the last to a checkpoint of one file, in the layout of DeepSeek-V3 and GLM. Makes the
    folder `layer`, of a model of that layer alone, whose final norm is the module's."""
    file, random = target / "model.safetensors", torch.Generator().manual_seed(seed)
    config, stored = AutoConfig.from_pretrained(target), load_file(file)
    own = copy.deepcopy(config)
    own.num_hidden_layers, own.first_k_dense_replace, own.mlp_layer_types = 1, 0, ["sparse"]
    models: Any = AutoModelForCausalLM
    model = models.from_config(own)
    randomise(model, seed)
    model.save_pretrained(layer)
    root, size = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
    drawn = {f"{root}{name}": 1 + torch.randn(size, generator=random) / 4 for name in ("enorm.weight", "hnorm.weight")}
    drawn[f"{root}eh_proj.weight"] = torch.randn(size, 2 * size, generator=random) / size**0.5
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    drawn |= {root + name: stored[of].clone() for name, of in copies.items()}
    for name, tensor in load_file(layer / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            drawn[root + name.removeprefix("model.layers.0.")] = tensor
        elif name == "model.norm.weight":
            drawn[f"{root}shared_head.norm.weight"] = tensor
    save_file(stored | drawn, file, {"format": "pt"})


class NextLayerReference(ReferenceModule):
    """As `ReferenceModule`, of a module that `add_next_layer` added, which made the folder `layer`."""

    _offset = 0

    def __init__(self, target: Path, layer: Path) -> None:
        models: Any = AutoModelForCausalLM
        self._model = models.from_pretrained(target, dtype=torch.float32)
        self._layers = models.from_pretrained(layer, dtype=torch.float32).model
        tensors, root = load_file(target / "model.safetensors"), f"model.layers.{self._model.config.num_hidden_layers}."
        self._fc = tensors[f"{root}eh_proj.weight"]
        self._norms = [tensors[f"{root}{part}.weight"] for part in ("enorm", "hnorm")]
