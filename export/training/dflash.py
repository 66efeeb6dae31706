"""Trains a DFlash drafter for a target: blocks of masks behind random places of its texts (Chen et al. 2026).

A block begins with a token of the text, and its masks stand for those behind it. The loss is the divergence from the
target's probabilities at each place, which count less the further they are from the block's first token: an early
fault makes all behind it worthless.

With glancing, a block is drafted once, and again with a run of its tokens and of the target's states in view, the
longer the more was wrong, and learns from that (Falcon's coupled sequential glancing distillation, Gao et al. 2024).
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
from edgeinfer.errors import UsageError
from edgeinfer.export.drafters.dflash import spread_layers
from edgeinfer.export.training.block_drafter import BlockDrafter, BlockShape
from edgeinfer.export.training.losses import in_pieces
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.module_training import ModuleTask, ModuleTraining, sizes_like, train_module
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.samples import Replier
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.options import require
from edgeinfer.results import Progress

# The weight of place k is exp(-(k - 1) / gamma) (arXiv 2602.06036, equation 4). Gamma as a share of a block's rows: 4
# of 8, as NVIDIA's Model-Optimizer has it (dflash_loss_decay_factor).
_FADING = 0.5
# Layers of the target from which on it is read as published drafters read theirs; others have few to choose from.
_USUAL_LAYERS = 8
# Layers that published drafters read.
_TAPS = 5
# A target's own logits, and those that are computed here of its states, differ by rounding alone.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class DflashOptions(DraftTrainOptions):
    """How a drafter is trained.

    Attributes:
        layers: of the drafter.
        block: tokens of a block, of which all but the first are drafted.
        anchors: blocks that are learnt from in a window.
        glancing: share of the wrong tokens of a block that are shown at first; it falls to 0 until the last step.
            Falcon has 0.4.
    """

    layers: int = 1
    block: int = 8
    anchors: int = 24
    glancing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.layers >= 1, "layers", self.layers, "1 or more")
        require(2 <= self.block <= MOST_BLOCK, "block", self.block, f"from 2 to {MOST_BLOCK}")
        require(self.anchors >= 1, "anchors", self.anchors, "1 or more")
        require(0 <= self.glancing <= 1, "glancing", self.glancing, "from 0 to 1")
        require(self.length >= 2 * self.block, "length", self.length, f"{2 * self.block} or more")

    def shape(self, target: Target, mask: int) -> BlockShape:
        """The sizes of a drafter for a target, whose own layers it resembles."""
        config = target.config.get_text_config()
        layers = config.num_hidden_layers
        shallow = tuple(sorted({0, (layers - 2) // 2, layers - 2}))
        return BlockShape(
            **sizes_like(target),
            layers=self.layers,
            target_layers=layers,
            taps=shallow if layers < _USUAL_LAYERS else tuple(spread_layers(layers, _TAPS)),
            block=self.block,
            mask=mask,
            tied=bool(config.tie_word_embeddings),
        )


class DflashTask(ModuleTask):
    """A drafter over a frozen target; arguments as its base, and its options.

    Raises:
        UsageError: there is too little text, or the target computes its logits in a way of its own.
    """

    name = "DFlash"
    module: BlockDrafter

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, options: DflashOptions
    ) -> None:
        super().__init__(target, sources, batches, {"anchors": options.anchors, "glancing": options.glancing})
        self._anchors, self._glancing = options.anchors, options.glancing
        self._head = target.model.get_output_embeddings().weight.detach()  # (V, D)
        shape = options.shape(target, _rarest(sources, len(self._head)))
        self.module = self._draw(lambda: BlockDrafter(shape))
        with torch.no_grad():
            # Logits of about one, so that nothing is thought certain at first.
            self.module.norm.weight.fill_(1 / float(self._head.float().square().sum(-1).mean().sqrt()))
        self._embedding = target.model.get_input_embeddings().weight.detach()  # (V, D)
        _require_known(target, sources[0])
        places = torch.arange(options.block - 1, device=target.device)
        self._weights = torch.exp(-places / (_FADING * options.block))  # (block - 1,)

    def loss(self, step: int) -> Tensor:
        """Mean divergence from the target over the places of random blocks, later ones counting less."""
        batch = self._batch(step)
        last = batch.shape[1] - self.module.shape.block
        anchors = torch.randint(1, last + 1, (len(batch), self._anchors)).to(batch.device)
        states = self._states(batch)
        taught = self._taught(states, anchors)
        glimpsed = self._glimpsed(batch, states, anchors, self._glancing * (1 - step / self.steps))
        guessed = self._guessed(batch, states, anchors, glimpsed)
        # What is shown is not learnt.
        weights = self._weights.expand(guessed.shape[:-1]) * ~glimpsed

        def piece(own: Tensor, given: Tensor, weight: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = torch.log_softmax(self._target.logits(given), -1)  # (n, V)
            lost = F.kl_div(torch.log_softmax(own @ self._head.T, -1), wanted, reduction="none", log_target=True)
            return (lost.sum(-1) * weight).sum()

        rows = guessed.flatten(0, 2), taught.flatten(0, 2), weights.flatten()
        return in_pieces(piece, len(self._head), *rows) / weights.mean()

    @torch.no_grad()
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often the likeliest token is the target's at each place of a block that was right so far."""
        block = self.module.shape.block
        right, reached = np.zeros(block - 1), np.zeros(block - 1)
        for batch in self._kept(validation):
            anchors = torch.arange(1, batch.shape[1] - block + 1, block // 2, device=batch.device)[None]  # (1, n)
            states = self._states(batch)
            guessed, taught = self._guessed(batch, states, anchors), self._taught(states, anchors)
            going = torch.ones_like(anchors, dtype=torch.bool)
            for place in range(block - 1):
                said = self._target.logits(taught[:, :, place]).argmax(-1)
                same = going & ((guessed[:, :, place] @ self._head.T).argmax(-1) == said)
                right[place] += float(same.sum())
                reached[place] += float(going.sum())
                # The text went on as the target would have.
                going = same & (said == batch[:, anchors[0] + 1 + place])
        return tuple((right / np.maximum(reached, 1)).tolist())

    def save(self, folder: Path) -> None:
        """As `ModuleTask.save`."""
        self.module.save(folder)

    @torch.no_grad()
    def _states(self, batch: Tensor) -> list[Tensor]:  # (B, S) -> (B, S, D) each
        """The target's states of texts, by layer."""
        output = self._target.model(batch, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        return [each.float() for each in output.hidden_states]

    def _taught(self, states: Sequence[Tensor], anchors: Tensor) -> Tensor:  # (B, n) -> (B, n, block - 1, D)
        """What the target's head reads at the places of blocks."""
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        return states[-1][rows, anchors[..., None] + torch.arange(self.module.shape.block - 1, device=anchors.device)]

    def _guessed(
        self, batch: Tensor, states: Sequence[Tensor], anchors: Tensor, glimpsed: Tensor | None = None
    ) -> Tensor:
        """What the drafter's head reads there.

        batch (B, S), anchors (B, n), glimpsed (B, n, block - 1) -> (B, n, block - 1, D)
        """
        shape = self.module.shape
        rows = torch.arange(len(batch), device=batch.device)[:, None, None]
        blocks = batch[rows, anchors[..., None] + torch.arange(shape.block, device=batch.device)]
        blocks[..., 1:] = blocks[..., 1:].where(glimpsed, shape.mask) if glimpsed is not None else shape.mask
        tapped = torch.cat([states[tap + 1] for tap in shape.taps], -1)
        guessed: Tensor = self.module(tapped, F.embedding(blocks, self._embedding), anchors, glimpsed)
        return guessed

    @torch.no_grad()
    def _glimpsed(self, batch: Tensor, states: Sequence[Tensor], anchors: Tensor, share: float) -> Tensor:
        """The places of each block that are shown: none, or a run that is as long as this share of what the drafter has
        wrong there now. (B, n, block - 1)"""
        places = self.module.shape.block - 1
        if share <= 0:
            return torch.zeros((*anchors.shape, places), dtype=torch.bool, device=batch.device)
        guessed, taught = self._guessed(batch, states, anchors), self._taught(states, anchors)
        wrong = torch.zeros(anchors.shape, device=batch.device)
        for place in range(places):
            said = self._target.logits(taught[:, :, place]).argmax(-1)
            wrong += (guessed[:, :, place] @ self._head.T).argmax(-1) != said
        return _runs(wrong, share, places)


def _runs(wrong: Tensor, share: float, places: int) -> Tensor:  # (B, n) -> (B, n, places)
    """Runs of places, each as long as a share of what is wrong; at least the last place is left to be drafted."""
    count = (share * wrong).round().clamp(max=places - 1)[..., None]
    start = (torch.rand(count.shape).to(count.device) * (places - count)).floor()
    at = torch.arange(places, device=wrong.device)
    return (at >= start) & (at < start + count)


@torch.no_grad()
def _require_known(target: Target, tokens: TokenFile) -> None:
    """Refuses a target whose logits are not what its head makes of its last states."""
    few = torch.from_numpy(tokens.windows(8, 1)).to(target.device)
    output = target.model(few, output_hidden_states=True, use_cache=False)
    if not torch.allclose(target.logits(output.hidden_states[-1]), output.logits.float(), atol=_ROUNDING):
        message = f"{target.folder} computes its logits in a way of its own, which a DFlash drafter cannot learn from."
        raise UsageError(message, "Train another drafter: edgeinfer distill drafter.")


def _rarest(sources: tuple[TokenFile, ...], vocabulary: int) -> int:
    """The token of the masks: the last of those that the texts have least of."""
    counts = sum(np.bincount(tokens.ids, minlength=vocabulary) for tokens in sources)
    return vocabulary - 1 - int(np.asarray(counts)[:vocabulary][::-1].argmin())


def train_dflash(
    target: Target,
    text: TextSource,
    options: DflashOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> ModuleTraining:
    """Trains a drafter in a working folder, or resumes the training that was interrupted there; as `train_module`."""

    def make(sources: tuple[TokenFile, ...]) -> DflashTask:
        return DflashTask(target, sources, Batches.of(options), options)

    return train_module("dflash", make, target, text, options, work, replier, progress)
