"""A DFlash drafter in torch, with the names of its published layout, and the checkpoint that it is saved as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.export.training.layers import (
    ModuleAttention,
    ModuleLayer,
    ModuleShape,
    ShapedModule,
    common_config,
    draw_matrices,
    save_module,
)
from edgeinfer.options import require

_EPS = 1e-6


@dataclass(frozen=True)
class BlockShape(ModuleShape):
    """Sizes of a drafter.

    Attributes:
        taps: layers of the target behind which it reads states.
        block: rows of a block, the last token's among them.
        mask: the token of the others.
        tied: whether the target's head is its embedding.
    """

    layers: int
    target_layers: int
    taps: tuple[int, ...]
    block: int
    mask: int
    tied: bool

    def __post_init__(self) -> None:
        require(self.target_layers >= 2, "the model's layers", self.target_layers, "2 or more")


class _Attention(ModuleAttention):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape, shape.width, _EPS)

    def forward(self, hidden: Tensor, given: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Rows of blocks attend to the text before theirs and to their own.

        hidden (B, R, D), given (B, C, D), places (B, C + R), seen (B, R, C + R) -> (B, R, D)
        """
        both = torch.cat([given, hidden], 1)
        queries, keys = self._queries(hidden, places[:, given.shape[1] :]), self._keys(both, places)
        mixed = F.scaled_dot_product_attention(queries, keys, self._values(both), attn_mask=seen[:, None])
        return self._joined(mixed)


class BlockDrafter(ShapedModule):
    """A drafter (Chen et al. 2026), whose parameters have the names of the published checkpoints."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = torch.nn.Linear(len(shape.taps) * shape.width, shape.width, bias=False)
        self.hidden_norm = torch.nn.RMSNorm(shape.width, _EPS)
        self.layers = torch.nn.ModuleList(ModuleLayer(shape, _Attention(shape), _EPS) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.width, _EPS)
        draw_matrices(self)

    def forward(self, tapped: Tensor, embedded: Tensor, anchors: Tensor, glimpsed: Tensor | None = None) -> Tensor:
        """The normed states of all masks of blocks behind texts.

        Args:
            tapped: the target's states of a text. (B, S, W)
            embedded: of the tokens of the blocks of each text. (B, n, block, D)
            anchors: the row of each block's first token, which sees those before it. (B, n)
            glimpsed: places of masks whose token is shown: places behind it see the state that foretold it, too.
                (B, n, block - 1)

        Returns:
            (B, n, block - 1, D)
        """
        block, (batch, count) = self.shape.block, anchors.shape
        given = self.hidden_norm(self.fc(tapped))
        rows = torch.arange(given.shape[1], device=given.device)
        own = (anchors[..., None] + torch.arange(block, device=given.device)).flatten(1)  # (B, n block)
        places = torch.cat([rows.expand(batch, -1), own], 1)
        before = rows < anchors.repeat_interleave(block, 1)[..., None]  # (B, n block, S)
        if glimpsed is not None:
            before = before | _shown(rows - anchors[..., None], glimpsed).flatten(1, 2)
        blocks = torch.arange(count, device=given.device).repeat_interleave(block)
        beside = (blocks[:, None] == blocks).expand(batch, -1, -1)
        seen, hidden = torch.cat([before, beside], -1), embedded.flatten(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, given, places, seen)
        normed: Tensor = self.norm(hidden).view(batch, count, block, -1)
        return normed[:, :, 1:]

    def save(self, folder: Path) -> None:
        """Writes the drafter as a checkpoint that `edgeinfer export --drafter` and others read."""
        save_module(folder, self, {}, _config(self.shape))


def _shown(behind: Tensor, glimpsed: Tensor) -> Tensor:
    """The states behind a block's first token that its rows see: of each glimpsed place, the one before it, and only
    rows behind that place.

    behind (B, n, S): how far a state lies behind the first token; glimpsed (B, n, block - 1) -> (B, n, block, S)
    """
    most = glimpsed.shape[-1] - 1
    shown = glimpsed.gather(-1, behind.clamp(0, most)) & (behind >= 0) & (behind <= most)
    places = torch.arange(glimpsed.shape[-1] + 1, device=behind.device)
    return shown[:, :, None] & (places[:, None] > behind[:, :, None] + 1)


def _config(shape: BlockShape) -> dict[str, object]:
    return common_config(shape, _EPS) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "num_target_layers": shape.target_layers,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "block_size": shape.block,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": list(shape.taps)},
    }
