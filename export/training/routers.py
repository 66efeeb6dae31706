"""Trains routers that choose from a prompt which layers its reply needs (FiRST, Jain et al. 2025, arXiv 2410.12513).

The model is frozen and runs the prompt whole. Router i reads the mean over the prompt of the states that enter layer i;
its gate, the layer's share in every row of the reply, is 0 or 1 forwards and soft backwards. The loss is the reply's
divergence from the whole model, plus a penalty for each layer that is kept beyond the wanted share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edgeinfer.bundle.additions import Heads
from edgeinfer.core.options import require
from edgeinfer.export.training.distill import DistillTask, KindOptions
from edgeinfer.export.training.heads import final_states
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.text import TokenFile

# Initial bias: routers start sure that their layers are needed.
_SURE = 2.0
# Costs of a kept layer whatever the share, and of one beyond the share.
_PENALTY, _BEYOND = 0.01, 4.0
# Windows for measuring the lengths of states.
_SCALED = 4


@dataclass(frozen=True)
class RoutersOptions(KindOptions["RoutersTask"]):
    kind = "routers"
    weight_decay = 0.0
    most_warmup = 20

    steps: int | None = 600
    length: int = 128
    learning_rate: float = 2e-2
    keep: float = 0.75  # share of the layers that replies should run with on average

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.keep <= 1, "keep", self.keep, "above 0 and at most 1")

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> RoutersTask:
        return RoutersTask(target, sources, self)


class RoutersTask(DistillTask):
    """A router for each layer. The first half of a window is the prompt."""

    name = "routers"

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], options: RoutersOptions) -> None:
        super().__init__(target, sources, options, {"keep": options.keep})
        self._keep = options.keep
        layers, size, device = target.config.num_hidden_layers, target.config.hidden_size, target.device
        self._weight = torch.nn.Parameter(torch.zeros(layers, size, device=device))
        self._bias = torch.nn.Parameter(torch.full((layers,), _SURE, device=device))
        self._scale = torch.ones(layers, device=device)
        # Lengths of the prompts' mean states before each layer: scaled by them, routers learn alike.
        with torch.no_grad():
            self._scale = self.run(torch.from_numpy(sources[0].windows(options.length, _SCALED)).to(device))[3]

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return {"weight": self._weight, "bias": self._bias}

    def loss(self, step: int) -> torch.Tensor:
        """The reply's divergence from the whole model, and the penalties."""
        lost, _, hard, _ = self.run(self._batch(step))
        # Soft gates of three quarters each would leave no layer out.
        kept = hard.mean()
        return lost + _PENALTY * kept + _BEYOND * torch.relu(kept - self._keep)

    def run(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Divergence of the replies of a batch (B, S), the gates, soft and hard (B, L), and lengths of states (L,)."""
        model, prompt = self._target.model.model, batch.shape[1] // 2
        taught = final_states(self._target.model, batch)[:, prompt:]  # (B, S / 2, D)
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
            chosen = (gate > 0.5).to(gate)
            chosen = chosen + gate - gate.detach()
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
        weight = (self._weight / self._scale[:, None]).detach().cpu().numpy()
        return Heads("routers", {"weight": weight, "bias": self._bias.detach().cpu().numpy()}, notes)

    @torch.no_grad()
    def figures(self, validation: TokenFile) -> dict[str, float]:
        """Mean divergence of replies in nats, and the share of layers kept."""
        ran = [self.run(batch) for batch in self._windows(validation)]
        lost, kept = ([float(each) for each in values] for values in ((r[0] for r in ran), (r[2].mean() for r in ran)))
        return {"divergence in nats": sum(lost) / len(lost), "layers kept": sum(kept) / len(kept)}
