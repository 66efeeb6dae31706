"""Trains prompt tokens (PPD): embeddings after a text at which the frozen model predicts later tokens.

Behind the text of a window stand many copies of the prompt tokens, each as if it
followed another place of it: it sees the text up to there, and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from edgeinfer.bundle.additions import Heads
from edgeinfer.export.training.draft_heads import HeadsShape, final_states
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile

# Places of a window that copies follow: one in so many.
_EVERY = 4
_FADING = 0.8
_WINDOWS = 24


class PromptTask:
    """P embeddings, all else frozen. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns.
    """

    name = "prompt tokens"
    kind = "prompt"

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HeadsShape) -> None:
        for tokens in sources:
            tokens.require(batches.length, "The text")
        self.shape = shape
        self._target, self._sources, self._batches = target, sources, batches
        embedding = target.model.model.embed_tokens.weight.detach()
        # They set out as the mean token, a little apart from each other.
        noise = torch.from_numpy(np.random.default_rng(batches.seed).standard_normal((shape.count, embedding.shape[1])))
        spread = embedding.std(0)
        start = embedding.mean(0) + spread * noise.to(embedding) / 2
        self._prompts = torch.nn.Parameter(start.clone())  # (P, D)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | asdict(self.shape)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The embeddings."""
        return {"embeddings": self._prompts}

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence of the prediction at each prompt token from the target's at its place."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)
        places = self._places(batch.shape[1], step % _EVERY)
        taught = final_states(self._target.model, batch)
        said = self._said(batch, places)  # (B, M, P, D)
        rows = self._target.model.lm_head.weight
        total, weights = torch.zeros((), device=batch.device), 0.0
        for probe in range(self.shape.count):
            weight = _FADING**probe
            wanted = taught[:, places + 1 + probe]
            total = total + weight * divergence(said[:, :, probe].flatten(0, 1), rows, wanted.flatten(0, 1), rows)
            weights += weight
        return total / weights

    def _places(self, length: int, first: int) -> torch.Tensor:  # (M,)
        """Places of a window that copies of the prompt tokens follow."""
        return torch.arange(first, length - 1 - self.shape.count, _EVERY)

    def _said(self, batch: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # (B, S), (M,) -> (B, M, P, D)
        model, count = self._target.model, self.shape.count
        rows, length = batch.shape
        copies = len(places) * count
        text = model.model.embed_tokens(batch)
        prompts = self._prompts.repeat(len(places), 1).expand(rows, copies, -1)
        behind = places.repeat_interleave(count)  # (C,), place that a copy's row follows
        probe = torch.arange(count).repeat(len(places))  # (C,)
        whole = length + copies
        sees = torch.zeros(whole, whole, dtype=torch.bool)
        sees[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
        sees[length:, :length] = torch.arange(length)[None] <= behind[:, None]
        own = (behind[:, None] == behind[None]) & (probe[:, None] >= probe[None])
        sees[length:, length:] = own
        mask = torch.zeros(1, 1, whole, whole).masked_fill(~sees, torch.finfo(torch.float32).min).to(text.device)
        positions = torch.cat([torch.arange(length), behind + 1 + probe])[None].to(text.device)
        states = model.model(
            inputs_embeds=torch.cat([text, prompts], 1), attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        said: torch.Tensor = states[:, length:].unflatten(1, (len(places), count))
        return said

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """The trained embeddings as a bundle keeps them."""
        return Heads(self.kind, {"embeddings": self._prompts.detach().cpu().numpy().astype(np.float32)}, notes)

    @torch.no_grad()
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often the most probable token at each prompt token is the target's, on held-out text."""
        right, seen = torch.zeros(self.shape.count, dtype=torch.float64), 0
        rows = self._target.model.lm_head.weight
        for window in validation.windows(self._batches.length, _WINDOWS):
            batch = torch.from_numpy(window)[None].to(self._target.device)
            places = self._places(batch.shape[1], 0)
            wanted = (final_states(self._target.model, batch) @ rows.T).argmax(-1)  # (1, S)
            said = (self._said(batch, places) @ rows.T).argmax(-1)  # (1, M, P)
            for probe in range(self.shape.count):
                right[probe] += float((said[:, :, probe] == wanted[:, places + 1 + probe]).sum())
            seen += len(places)
        return tuple((right / max(1, seen)).tolist())
