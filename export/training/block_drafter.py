"""A DFlash drafter in torch, with the names of its published layout, and the checkpoint that it is saved as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.export.training.layers import GatedMLP, ShapedModule, draw_matrices, rotated, save_module
from edgeinfer.export.training.options import require

__all__ = ["BlockDrafter", "BlockShape"]

_EPS = 1e-6


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a drafter.

    Attributes:
        width: D, hidden size of the target and of the drafter.
        inner: of the MLPs.
        vocabulary: V, of the target.
        taps: layers of the target behind which it reads states.
        block: rows of a block, the last token's among them.
        mask: the token of the others.
        tied: whether the target's head is its embedding.
    """

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    target_layers: int
    taps: tuple[int, ...]
    block: int
    mask: int
    tied: bool

    def __post_init__(self) -> None:
        require(self.target_layers >= 2, "the model's layers", self.target_layers, "2 or more")


class _Attention(torch.nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._head_dim, self._shared = shape.head_dim, shape.heads // shape.kv_heads
        self.q_proj = torch.nn.Linear(shape.width, queries, bias=False)
        self.k_proj = torch.nn.Linear(shape.width, keys, bias=False)
        self.v_proj = torch.nn.Linear(shape.width, keys, bias=False)
        self.o_proj = torch.nn.Linear(queries, shape.width, bias=False)
        self.q_norm = torch.nn.RMSNorm(shape.head_dim, _EPS)
        self.k_norm = torch.nn.RMSNorm(shape.head_dim, _EPS)

    def forward(self, given: Tensor, hidden: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Rows of blocks attend to the text before theirs and to their own.

        given (B, C, D), hidden (B, R, D), places (B, C + R), seen (B, R, C + R) -> (B, R, D)
        """
        both = torch.cat([given, hidden], 1)
        queries = self.q_norm(self._split(self.q_proj(hidden)))
        keys, values = self.k_norm(self._split(self.k_proj(both))), self._split(self.v_proj(both))
        queries, keys = rotated(queries, places[:, given.shape[1] :]), rotated(keys, places)
        keys, values = (each.repeat_interleave(self._shared, 1) for each in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None])
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:  # (B, S, H h) -> (B, H, S, h)
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)


class _Layer(torch.nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(shape.width, _EPS)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = torch.nn.RMSNorm(shape.width, _EPS)
        self.mlp = GatedMLP(shape.width, shape.inner)

    def forward(self, given: Tensor, hidden: Tensor, places: Tensor, seen: Tensor) -> Tensor:  # as _Attention
        hidden = hidden + self.self_attn(given, self.input_layernorm(hidden), places, seen)
        further: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return further


class BlockDrafter(ShapedModule):
    """A drafter (Chen et al. 2026), whose parameters have the names of the published checkpoints."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = torch.nn.Linear(len(shape.taps) * shape.width, shape.width, bias=False)
        self.hidden_norm = torch.nn.RMSNorm(shape.width, _EPS)
        self.layers = torch.nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.width, _EPS)
        draw_matrices(self)

    def forward(self, tapped: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """The normed states of all masks of blocks behind texts.

        Args:
            tapped: the target's states of a text. (B, S, W)
            embedded: of the tokens of the blocks of each text. (B, n, block, D)
            anchors: the row of each block's first token, which sees those before it. (B, n)

        Returns:
            (B, n, block - 1, D)
        """
        block, (batch, count) = self.shape.block, anchors.shape
        given = self.hidden_norm(self.fc(tapped))
        rows = torch.arange(given.shape[1], device=given.device)
        own = (anchors[..., None] + torch.arange(block, device=given.device)).flatten(1)  # (B, n block)
        places = torch.cat([rows.expand(batch, -1), own], 1)
        before = rows < anchors.repeat_interleave(block, 1)[..., None]  # (B, n block, S)
        blocks = torch.arange(count, device=given.device).repeat_interleave(block)
        beside = (blocks[:, None] == blocks).expand(batch, -1, -1)
        seen, hidden = torch.cat([before, beside], -1), embedded.flatten(1, 2)
        for layer in self.layers:
            hidden = layer(given, hidden, places, seen)
        normed: Tensor = self.norm(hidden).view(batch, count, block, -1)
        return normed[:, :, 1:]

    def save(self, folder: Path) -> None:
        """Writes the drafter as a checkpoint that `edgeinfer export --drafter` and others read.

        Raises:
            StorageError: the folder cannot be written, or the disk is full.
        """
        save_module(folder, self, {}, _config(self.shape))


def _config(shape: BlockShape) -> dict[str, object]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "num_target_layers": shape.target_layers,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "attention_bias": False,
        "rms_norm_eps": _EPS,
        "tie_word_embeddings": shape.tied,
        "block_size": shape.block,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": list(shape.taps)},
    }
