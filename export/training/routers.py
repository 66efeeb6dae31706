"""Trains routers that tell from a prompt which layers its reply needs, and an adapter that makes up for those left out.

This is FiRST (Jain et al. 2025, arXiv 2410.12513) with its two stages; of the second one the loss is ours.

The model is frozen and runs the prompt whole. Router i reads the mean over the prompt of the states that enter layer i;
its gate, the layer's share in every row of the reply, is 0 or 1 forwards and soft backwards. The loss is the reply's
divergence from the whole model, plus a penalty for each layer that is kept beyond the share that is wanted. Then the
routers are frozen, and low-rank changes (LoRA) of all matrices learn to bring the same divergence down.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from edgeinfer.bundle.additions import Heads
from edgeinfer.bundle.peft import CONFIG, WEIGHTS
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.export.training.draft_heads import final_states
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile
from edgeinfer.options import require

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
        self.target, self._sources, self._batches, self._keep = target, sources, batches, keep
        layers, size = target.config.num_hidden_layers, target.config.hidden_size
        device = target.device
        self._weight = torch.nn.Parameter(torch.zeros(layers, size, device=device))
        self._bias = torch.nn.Parameter(torch.full((layers,), _SURE, device=device))
        self._scale = torch.ones(layers, device=device)
        self._scale = self._lengths(torch.from_numpy(sources[0].windows(batches.length, _SCALED)).to(device))

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self.target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | {"keep": self._keep}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters of all routers."""
        return {"weight": self._weight, "bias": self._bias}

    def loss(self, step: int) -> torch.Tensor:
        """The reply's divergence from the whole model, and the penalties."""
        batch = self.batch(step)
        lost, _, hard, _ = self.run(batch, self.taught(batch))
        # Soft gates of three quarters each would leave no layer out.
        kept = hard.mean()
        return lost + _PENALTY * kept + _BEYOND * torch.relu(kept - self._keep)

    def batch(self, step: int) -> torch.Tensor:  # (B, S)
        """The windows of a step."""
        return self._batches.draw(self._sources[step % len(self._sources)], step, 0, self.target.device)

    @torch.no_grad()
    def _lengths(self, batch: torch.Tensor) -> torch.Tensor:  # (B, S) -> (L,)
        """Lengths of the prompts' mean states before each layer, by which routers scale them to learn alike."""
        return self.run(batch, self.taught(batch))[3]

    def taught(self, batch: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B, S / 2, D)
        """The whole model's last states of the replies of a batch."""
        return final_states(self.target.model, batch)[:, batch.shape[1] // 2 :]

    def run(
        self, batch: torch.Tensor, taught: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Divergence of the replies of a batch (B, S), the gates, soft and hard (B, L), and lengths of states (L,)."""
        model, prompt = self.target.model.model, batch.shape[1] // 2
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
            if self._weight.requires_grad:
                chosen = chosen + gate - gate.detach()
            made = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            made = made[0] if isinstance(made, tuple) else made
            reply = states[:, prompt:] + chosen[:, None, None] * (made[:, prompt:] - states[:, prompt:])
            states = torch.cat([made[:, :prompt], reply], 1)
            soft.append(gate)
            hard.append(chosen)
        rows = self.target.model.lm_head.weight
        said = model.norm(states[:, prompt:])
        lost = divergence(said.flatten(0, 1), rows, taught.flatten(0, 1), rows)
        return lost, torch.stack(soft, 1), torch.stack(hard, 1), torch.stack(lengths)

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """The trained routers as a bundle keeps them."""
        weight = (self._weight / self._scale[:, None]).detach().cpu().numpy()
        return Heads(self.kind, {"weight": weight, "bias": self._bias.detach().cpu().numpy()}, notes)

    @torch.no_grad()
    def figures(self, validation: TokenFile, adapter: SkipAdapterTask | None = None) -> tuple[float, float]:
        """Mean divergence of replies in nats, and the share of layers kept, on held-out text; of the adapted model's,
        where there is an adapter."""
        lost, kept = list[float](), list[float]()
        for window in validation.windows(self._batches.length, _WINDOWS):
            batch = torch.from_numpy(window)[None].to(self.target.device)
            taught = self.taught(batch)
            with contextlib.nullcontext() if adapter is None else adapter.adapted():
                divergent, _, hard, _ = self.run(batch, taught)
            lost.append(float(divergent))
            kept.append(float(hard.mean()))
        return sum(lost) / len(lost), sum(kept) / len(kept)


class SkipAdapterTask:
    """Low-rank changes of a model whose replies skip what trained routers leave out. Implements `trainer.Task`.

    Args:
        routers: trained; they stay as they are, and read the changed model's states.
        rank: r, of each change; what it adds is weighed by 2.
    """

    name = "adapter"

    def __init__(self, routers: RoutersTask, rank: int) -> None:
        self._routers, self._rank, self._target = routers, rank, routers.target
        self._modules: dict[str, torch.nn.Linear] = {
            f"model.layers.{number}.{name}": module
            for number, layer in enumerate(self._target.model.model.layers)
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        for parameter in routers.parameters().values():
            parameter.requires_grad_(False)
        draw, device = torch.Generator().manual_seed(0), self._target.device
        self._factors: dict[str, torch.nn.Parameter] = {}
        for name, module in self._modules.items():
            first = torch.randn(rank, module.in_features, generator=draw) / module.in_features**0.5
            self._factors[f"{name}.lora_A.weight"] = torch.nn.Parameter(first.to(device))
            # Nothing is changed at first.
            self._factors[f"{name}.lora_B.weight"] = torch.nn.Parameter(
                torch.zeros(module.out_features, rank).to(device)
            )

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        return dict(self._routers.configuration) | {"adapter_rank": self._rank}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The factors of all changes, by their names in PEFT's files."""
        return self._factors

    def loss(self, step: int) -> torch.Tensor:
        """The reply's divergence from the whole model as it was."""
        batch = self._routers.batch(step)
        taught = self._routers.taught(batch)
        with self.adapted():
            return self._routers.run(batch, taught)[0]

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """The model computes with its changes."""
        hooks = []
        for name, module in self._modules.items():
            first, second = (self._factors[f"{name}.lora_{factor}.weight"] for factor in "AB")

            def change(_: Any, given: Any, made: Any, first: Any = first, second: Any = second) -> Any:
                return made + 2 * (given[0] @ first.T) @ second.T

            hooks.append(module.register_forward_hook(change))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def save(self, folder: Path) -> None:
        """Writes the changes as an adapter in PEFT's layout."""
        modules = sorted({name.split(".", 3)[3] for name in self._modules})
        config = {"peft_type": "LORA", "r": self._rank, "lora_alpha": 2 * self._rank, "target_modules": modules}
        tensors = {f"base_model.model.{name}": factor.detach().cpu() for name, factor in self._factors.items()}
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / WEIGHTS)
            (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
