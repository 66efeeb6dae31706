"""Pieces in torch that trained drafters are made of, and the checkpoints that they are saved as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.writing import storage_errors

THETA = 10_000.0
# Initial deviation of matrices, as Llama's and Qwen3's.
_DEVIATION = 0.02


@dataclass(frozen=True)
class ModuleShape:
    """Sizes that all modules have.

    Attributes:
        width: D, hidden size of the target and of the module.
        inner: of the MLPs.
        heads, kv_heads, head_dim: of the attention.
        vocabulary: V, of the target.
    """

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


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


class ModuleAttention(torch.nn.Module):
    """What Llama's attention is made of, or Qwen3's, with normed queries and keys; which rows see which, others say.

    Args:
        entering: E, what it reads of a row.
        eps: of the norms of queries and keys; None has none.
    """

    def __init__(self, shape: ModuleShape, entering: int, eps: float | None = None) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._head_dim, self._shared = shape.head_dim, shape.heads // shape.kv_heads
        self.q_proj = torch.nn.Linear(entering, queries, bias=False)
        self.k_proj = torch.nn.Linear(entering, keys, bias=False)
        self.v_proj = torch.nn.Linear(entering, keys, bias=False)
        self.o_proj = torch.nn.Linear(queries, shape.width, bias=False)
        self.q_norm = torch.nn.Identity() if eps is None else torch.nn.RMSNorm(shape.head_dim, eps)
        self.k_norm = torch.nn.Identity() if eps is None else torch.nn.RMSNorm(shape.head_dim, eps)

    def _queries(self, x: Tensor, places: Tensor) -> Tensor:  # (B, S, E), (B, S) or (S,) -> (B, H, S, h)
        return rotated(self.q_norm(self._split(self.q_proj(x))), places)

    def _keys(self, x: Tensor, places: Tensor) -> Tensor:  # (B, S, E), (B, S) or (S,) -> (B, H, S, h)
        return rotated(self.k_norm(self._split(self.k_proj(x))), places).repeat_interleave(self._shared, 1)

    def _values(self, x: Tensor) -> Tensor:  # (B, S, E) -> (B, H, S, h)
        return self._split(self.v_proj(x)).repeat_interleave(self._shared, 1)

    def _joined(self, mixed: Tensor) -> Tensor:  # (B, H, S, h) -> (B, S, D)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:  # (B, S, H h) -> (B, H, S, h)
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)


class ModuleLayer(torch.nn.Module):
    """A layer of Llama or Qwen3 around an attention."""

    def __init__(self, shape: ModuleShape, attention: ModuleAttention, eps: float) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(shape.width, eps)
        self.self_attn = attention
        self.post_attention_layernorm = torch.nn.RMSNorm(shape.width, eps)
        self.mlp = _GatedMLP(shape.width, shape.inner)

    def forward(self, hidden: Tensor, *seen: Tensor) -> Tensor:  # (B, S, D)
        """Adds attention and MLP to states; `seen` goes to the attention."""
        return self._fed(hidden + self.self_attn(self.input_layernorm(hidden), *seen))

    def _fed(self, hidden: Tensor) -> Tensor:  # (B, S, D)
        further: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return further


class _GatedMLP(torch.nn.Module):
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


def common_config(shape: ModuleShape, eps: float) -> dict[str, object]:
    """The fields of config.json that all modules have."""
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": eps,
        # Texts may be as long as the target's.
        "max_position_embeddings": 2048,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }


def save_module(
    folder: Path, module: torch.nn.Module, more: Mapping[str, Tensor], config: Mapping[str, object]
) -> None:
    """Writes a checkpoint that `edgeinfer export --drafter` and others read."""
    state = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state | dict(more), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(config), indent=1), "utf-8")
