"""Trains routers that tell from a prompt which layers its reply needs (FiRST).

The model is frozen and runs the prompt whole. Router i reads the mean over the prompt of the states that enter layer i;
its gate, the layer's share in every row of the reply, is 0 or 1 forwards and soft backwards. The loss is the reply's
divergence from the whole model, plus a penalty for each layer that is kept beyond the share that is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edgeinfer.bundle.heads import Heads
from edgeinfer.export.training.draft_heads import final_states
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.options import require
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile

__all__ = ["RoutersTask"]

# Routers set out sure that their layers are needed, by so much.
_SURE = 2.0
# What a kept layer costs whatever the share, and one beyond the share.
_PENALTY, _BEYOND = 0.01, 4.0
_WINDOWS = 24
# Windows that tell how long states are.
_SCALED = 4


class RoutersTask:
    """A router for each layer. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns. The first half of a window is the prompt.
        keep: share of the layers that replies should run with on average.
    """

    name = "routers"
    kind = "routers"

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, keep: float = 0.75) -> None:
        require(0 < keep <= 1, "keep", keep, "above 0 and at most 1")
        for tokens in sources:
            tokens.require(batches.length, "The text")
        self._target, self._sources, self._batches, self._keep = target, sources, batches, keep
        layers, size = target.config.num_hidden_layers, target.config.hidden_size
        device = target.device
        self._weight = torch.nn.Parameter(torch.zeros(layers, size, device=device))
        self._bias = torch.nn.Parameter(torch.full((layers,), _SURE, device=device))
        self._scale = torch.ones(layers, device=device)
        self._scale = self._lengths(torch.from_numpy(sources[0].windows(batches.length, _SCALED)).to(device))

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | {"keep": self._keep}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters of all routers."""
        return {"weight": self._weight, "bias": self._bias}

    def loss(self, step: int) -> torch.Tensor:
        """The reply's divergence from the whole model, and the penalties."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)
        lost, _, hard, _ = self._run(batch)
        # Soft gates of three quarters each would leave no layer out.
        kept = hard.mean()
        return lost + _PENALTY * kept + _BEYOND * torch.relu(kept - self._keep)

    @torch.no_grad()
    def _lengths(self, batch: torch.Tensor) -> torch.Tensor:  # (B, S) -> (L,)
        """Lengths of the prompts' mean states before each layer, by which routers scale them to learn alike."""
        return self._run(batch)[3]

    def _run(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Divergence of the replies of a batch (B, S), the gates, soft and hard (B, L), and lengths of states (L,)."""
        model, prompt = self._target.model.model, batch.shape[1] // 2
        taught = final_states(self._target.model, batch)[:, prompt:]
        states = model.embed_tokens(batch)
        positions = torch.arange(batch.shape[1], device=batch.device)[None]
        rotation = model.rotary_emb(states, positions)
        length = batch.shape[1]
        mask = torch.full((length, length), torch.finfo(states.dtype).min, device=batch.device).triu(1)[None, None]
        soft, hard, lengths = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for number, layer in enumerate(model.layers):
            mean = states[:, :prompt].mean(1)  # (B, D)
            lengths.append(mean.detach().norm(dim=-1).mean())
            gate = torch.sigmoid(mean @ self._weight[number] / self._scale[number] + self._bias[number])  # (B,)
            chosen = (gate > 0.5).to(gate) + gate - gate.detach()
            made = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            made = made[0] if isinstance(made, tuple) else made
            reply = states[:, prompt:] + chosen[:, None, None] * (made[:, prompt:] - states[:, prompt:])
            states = torch.cat([made[:, :prompt], reply], 1)
            soft.append(gate)
            hard.append(chosen)
        rows = self._target.model.lm_head.weight
        said = model.norm(states[:, prompt:])
        lost = divergence(said.flatten(0, 1), rows, taught.flatten(0, 1), rows)
        return lost, torch.stack(soft, 1), torch.stack(hard, 1), torch.stack(lengths)

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """The trained routers as a bundle keeps them."""
        weight = (self._weight / self._scale[:, None]).detach().cpu().numpy()
        return Heads(self.kind, {"weight": weight, "bias": self._bias.detach().cpu().numpy()}, notes)

    @torch.no_grad()
    def figures(self, validation: TokenFile) -> tuple[float, float]:
        """Mean divergence of replies in nats, and the share of layers kept, on held-out text."""
        lost, kept = list[float](), list[float]()
        for window in validation.windows(self._batches.length, _WINDOWS):
            divergent, _, hard, _ = self._run(torch.from_numpy(window)[None].to(self._target.device))
            lost.append(float(divergent))
            kept.append(float(hard.mean()))
        return sum(lost) / len(lost), sum(kept) / len(kept)
