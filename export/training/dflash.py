"""Trains a DFlash drafter for a target: blocks of masks after random places of its texts (Chen et al. 2026).

A block begins with a token of the text, and its masks stand for the tokens after it. The loss is the divergence from
the target's probabilities at each place, which count less the further they are from the block's first token: an early
mistake makes everything after it worthless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.spec import MOST_BLOCK
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.export.drafters.dflash import spread_layers
from edgeinfer.export.training.distill import KindOptions
from edgeinfer.export.training.losses import in_pieces
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.modules import (
    ModuleAttention,
    ModuleLayer,
    ModuleShape,
    ModuleTask,
    by_place,
    common_config,
    draw_matrices,
    save_module,
    sizes_like,
)
from edgeinfer.export.training.text import TokenFile

_EPS = 1e-6
# The weight of place k is exp(-(k - 1) / gamma) (arXiv 2602.06036, equation 4). Gamma as a share of a block's rows: 4
# of 8, as NVIDIA's Model-Optimizer has it (dflash_loss_decay_factor).
_FADING = 0.5
# Least layers of a target that is read where published drafters read theirs; shallower ones have few to choose from.
_USUAL_LAYERS = 8
# Layers that published drafters read.
_TAPS = 5
# A target's own logits, and those that are computed here from its states, differ by rounding alone.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class DflashOptions(KindOptions["DflashTask"]):
    kind = "dflash"

    layers: int = 1  # of the drafter
    block: int = 8  # tokens of a block, of which all but the first are drafted
    anchors: int = 24  # blocks of a window to learn from

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.layers >= 1, "layers", self.layers, "1 or more")
        require(2 <= self.block <= MOST_BLOCK, "block", self.block, f"from 2 to {MOST_BLOCK}")
        require(self.anchors >= 1, "anchors", self.anchors, "1 or more")
        require(self.length >= 2 * self.block, "length", self.length, f"{2 * self.block} or more")

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> DflashTask:
        config = target.config.get_text_config()
        layers = config.num_hidden_layers
        shallow = tuple(sorted({0, (layers - 2) // 2, layers - 2}))
        shape = BlockShape(
            **sizes_like(target),
            layers=self.layers,
            target_layers=layers,
            taps=shallow if layers < _USUAL_LAYERS else tuple(spread_layers(layers, _TAPS)),
            block=self.block,
            mask=_rarest(sources, len(target.model.get_output_embeddings().weight)),
            tied=bool(config.tie_word_embeddings),
        )
        return DflashTask(target, sources, self, shape)


@dataclass(frozen=True)
class BlockShape(ModuleShape):
    layers: int
    target_layers: int
    taps: tuple[int, ...]  # layers of the target after which it reads states
    block: int  # rows of a block, the last token's included
    mask: int  # the token of the others
    tied: bool  # whether the target's head is its embedding

    def __post_init__(self) -> None:
        require(self.target_layers >= 2, "the model's layers", self.target_layers, "2 or more")


class DflashTask(ModuleTask):
    """A drafter over a frozen target, whose logits must be what its head makes of its last states."""

    name = "DFlash"
    module: BlockDrafter
    shape: BlockShape

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], options: DflashOptions, shape: BlockShape
    ) -> None:
        super().__init__(target, sources, options, {"anchors": options.anchors})
        self._anchors, self.shape = options.anchors, shape
        self._head = target.model.get_output_embeddings().weight.detach()  # (V, D)
        self.module = self._draw(lambda: BlockDrafter(shape))
        with torch.no_grad():
            # Logits of about one, so that nothing seems certain at first.
            self.module.norm.weight.fill_(1 / float(self._head.float().square().sum(-1).mean().sqrt()))
        self._embedding = target.model.get_input_embeddings().weight.detach()  # (V, D)
        _require_known(target, sources[0])
        places = torch.arange(shape.block - 1, device=target.device)
        self._weights = torch.exp(-places / (_FADING * shape.block))  # (block - 1,)

    def loss(self, step: int) -> Tensor:
        """Mean divergence from the target over the places of random blocks, later places counting less."""
        batch = self._batch(step)
        last = batch.shape[1] - self.shape.block
        anchors = torch.randint(1, last + 1, (len(batch), self._anchors)).to(batch.device)
        states = self._states(batch)
        guessed, taught = self._guessed(batch, states, anchors), self._taught(states, anchors)
        weights = self._weights.expand(guessed.shape[:-1])

        def piece(own: Tensor, given: Tensor, weight: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = torch.log_softmax(self._target.logits(given), -1)  # (n, V)
            lost = F.kl_div(torch.log_softmax(own @ self._head.T, -1), wanted, reduction="none", log_target=True)
            return (lost.sum(-1) * weight).sum()

        rows = guessed.flatten(0, 2), taught.flatten(0, 2), weights.flatten()
        return in_pieces(piece, len(self._head), *rows) / weights.mean()

    @torch.no_grad()
    def figures(self, validation: TokenFile) -> dict[str, float]:
        block = self.shape.block
        right, reached = np.zeros(block - 1), np.zeros(block - 1)
        for batch in self._windows(validation):
            anchors = torch.arange(1, batch.shape[1] - block + 1, block // 2, device=batch.device)[None]  # (1, n)
            states = self._states(batch)
            guessed, taught = self._guessed(batch, states, anchors), self._taught(states, anchors)
            going = torch.ones_like(anchors, dtype=torch.bool)
            for place in range(block - 1):
                said = self._target.logits(taught[:, :, place]).argmax(-1)
                same = going & ((guessed[:, :, place] @ self._head.T).argmax(-1) == said)
                right[place] += float(same.sum())
                reached[place] += float(going.sum())
                # The text continues as the target would.
                going = same & (said == batch[:, anchors[0] + 1 + place])
        return by_place(right, reached)

    def save(self, folder: Path) -> None:
        shape = self.shape
        config = common_config(shape, _EPS) | {
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
        save_module(folder, self.module, {}, config)

    @torch.no_grad()
    def _states(self, batch: Tensor) -> list[Tensor]:  # (B, S) -> (B, S, D) each
        """The target's states of texts, by layer."""
        output = self._target.model(batch, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        return [each.float() for each in output.hidden_states]

    def _taught(self, states: Sequence[Tensor], anchors: Tensor) -> Tensor:  # (B, n) -> (B, n, block - 1, D)
        """Inputs of the target's head at the places of blocks."""
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        return states[-1][rows, anchors[..., None] + torch.arange(self.shape.block - 1, device=anchors.device)]

    def _guessed(self, batch: Tensor, states: Sequence[Tensor], anchors: Tensor) -> Tensor:
        """Inputs of the drafter's head there. (B, S), (B, n) -> (B, n, block - 1, D)"""
        rows = torch.arange(len(batch), device=batch.device)[:, None, None]
        blocks = batch[rows, anchors[..., None] + torch.arange(self.shape.block, device=batch.device)]
        blocks[..., 1:] = self.shape.mask
        tapped = torch.cat([states[tap + 1] for tap in self.shape.taps], -1)
        guessed: Tensor = self.module(tapped, F.embedding(blocks, self._embedding), anchors)
        return guessed


@torch.no_grad()
def _require_known(target: Target, tokens: TokenFile) -> None:
    few = torch.from_numpy(tokens.windows(8, 1)).to(target.device)
    output = target.model(few, output_hidden_states=True, use_cache=False)
    if not torch.allclose(target.logits(output.hidden_states[-1]), output.logits.float(), atol=_ROUNDING):
        message = f"{target.folder} computes its logits in a way of its own, which a DFlash drafter cannot learn from."
        raise UsageError(message, "Train another drafter: edgeinfer distill drafter.")


def _rarest(sources: tuple[TokenFile, ...], vocabulary: int) -> int:
    """The token of the masks: the last of the rarest ones."""
    counts = sum(np.bincount(tokens.ids, minlength=vocabulary) for tokens in sources)
    return vocabulary - 1 - int(np.asarray(counts)[:vocabulary][::-1].argmin())


class BlockDrafter(torch.nn.Module):
    """A drafter (Chen et al. 2026), whose parameters have the names of the published checkpoints."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self._block = shape.block
        self.fc = torch.nn.Linear(len(shape.taps) * shape.width, shape.width, bias=False)
        self.hidden_norm = torch.nn.RMSNorm(shape.width, _EPS)
        self.layers = torch.nn.ModuleList(ModuleLayer(shape, _Attention(shape), _EPS) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.width, _EPS)
        draw_matrices(self)

    def forward(self, tapped: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """The normed states of all masks of blocks in texts.

        Args:
            tapped: the target's states of a text. (B, S, W)
            embedded: tokens of the blocks of each text. (B, n, block, D)
            anchors: the row of each block's first token; the block sees the rows before it. (B, n)

        Returns:
            (B, n, block - 1, D)
        """
        block, (batch, count) = self._block, anchors.shape
        given = self.hidden_norm(self.fc(tapped))
        rows = torch.arange(given.shape[1], device=given.device)
        own = (anchors[..., None] + torch.arange(block, device=given.device)).flatten(1)  # (B, n block)
        places = torch.cat([rows.expand(batch, -1), own], 1)
        before = rows < anchors.repeat_interleave(block, 1)[..., None]  # (B, n block, S)
        blocks = torch.arange(count, device=given.device).repeat_interleave(block)
        same_block = (blocks[:, None] == blocks).expand(batch, -1, -1)
        seen, hidden = torch.cat([before, same_block], -1), embedded.flatten(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, given, places, seen)
        normed: Tensor = self.norm(hidden).view(batch, count, block, -1)
        return normed[:, :, 1:]


class _Attention(ModuleAttention):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape, shape.width, _EPS)

    def forward(self, hidden: Tensor, given: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Rows of blocks attend to the text before their block and to the block. hidden (B, R, D), given (B, C, D),
        places (B, C + R), seen (B, R, C + R) -> (B, R, D)"""
        both = torch.cat([given, hidden], 1)
        queries, keys = self._queries(hidden, places[:, given.shape[1] :]), self._keys(both, places)
        mixed = F.scaled_dot_product_attention(queries, keys, self._values(both), attn_mask=seen[:, None])
        return self._joined(mixed)
