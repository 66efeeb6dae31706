"""Pieces in torch that trained drafters are made of, and the checkpoints that they are saved as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.writing import storage_errors

__all__ = [
    "THETA",
    "ChainModule",
    "GatedMLP",
    "ShapedModule",
    "draw_matrices",
    "mapped_tokens",
    "rotated",
    "save_module",
]

THETA = 10_000.0
# Initial deviation of matrices, as Llama's and Qwen3's.
_DEVIATION = 0.02


def rotated(x: Tensor, places: Tensor) -> Tensor:  # (B, H, S, h), (B, S) or (S,)
    """Queries or keys turned by their places in a text, halves apart."""
    half = x.shape[-1] // 2
    frequencies = torch.pow(THETA, -torch.arange(half, device=x.device) / half)
    angles = places[..., None, :, None] * frequencies  # (B, 1, S, h / 2) or (1, S, h / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class ShapedModule(torch.nn.Module):
    """A drafter that is trained.

    Attributes:
        shape: a dataclass with its sizes.
    """

    shape: Any


class ChainModule(ShapedModule):
    """A drafter with a head of its own over the tokens that it can draft.

    Attributes:
        lm_head: (Vd, D).
    """

    lm_head: torch.nn.Linear


class GatedMLP(torch.nn.Module):
    """The MLP of Llama and Qwen3."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        """Gates one product by the other."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


def draw_matrices(module: torch.nn.Module) -> None:
    """Draws the initial values of all matrices of a module."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=_DEVIATION)


def mapped_tokens(tokens: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """The tensors by which a checkpoint says which tokens it drafts: what is added to each, and which they are.

    Args:
        tokens: the target's that its own are, ascending. (Vd,)
    """
    own = tokens.cpu()
    known = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, own, True)
    return {"d2t": own - torch.arange(len(own)), "t2d": known}


def save_module(
    folder: Path, module: torch.nn.Module, more: Mapping[str, Tensor], config: Mapping[str, object]
) -> None:
    """Writes a checkpoint that `edgeinfer export --drafter` and others read.

    Args:
        more: tensors beside the module's own.
        config: of config.json, besides what all trained drafters have alike.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    # Texts may be as long as the target's.
    common = {"max_position_embeddings": 2048, "rope_theta": THETA, "hidden_act": "silu"}
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state | dict(more), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(common | dict(config), indent=1), "utf-8")
