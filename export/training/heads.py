"""Trains Medusa heads, one residual block for each place, and Hydra heads, which also see the tokens before theirs."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.export.training.heads_task import HeadsTask, half

__all__ = ["HydraTask", "MedusaTask"]


class MedusaTask(HeadsTask):
    """Head i is x + SiLU(W x + b), from which training sets out as x. Implements `trainer.Task`."""

    kind = "medusa"

    def _make(self, size: int) -> torch.nn.Module:
        blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(self.shape.count))
        for parameter in blocks.parameters():
            torch.nn.init.zeros_(parameter)
        return blocks

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._modules, torch.nn.ModuleList)
        return states + F.silu(self._modules[head](states))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        values = dict(self._modules.named_parameters())
        heads = range(self.shape.count)
        return {
            "weight": half(torch.stack([values[f"{head}.weight"] for head in heads])),
            "bias": half(torch.stack([values[f"{head}.bias"] for head in heads])),
        }


_TINY = 1e-6


class _Block(torch.nn.Module):
    """P z + SiLU(W z + b), which sets out as the state alone."""

    def __init__(self, size: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, size, inputs * size))
        self.bias = torch.nn.Parameter(torch.zeros(size))
        with torch.no_grad():
            self.weight[0, :, :size] = torch.eye(size)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (..., inputs * D) -> (..., D)
        """The block's output."""
        projected: torch.Tensor = F.linear(z, self.weight[0]) + F.silu(F.linear(z, self.weight[1], self.bias))
        return projected


class HydraTask(HeadsTask):
    """Head i reads the state, the root and i tokens behind it; tokens that are not guessed enter as zeros.

    Implements `trainer.Task`.
    """

    kind = "hydra"

    def _make(self, size: int) -> torch.nn.Module:
        embedding = self._target.model.model.embed_tokens.weight.detach()  # (V, D)
        kept = embedding[self._tokens]
        # Of the scale of states, whatever the model's own is.
        kept = kept / (kept.square().mean(-1, keepdim=True) + _TINY).sqrt()
        # Rounded as they will be stored.
        self._known = torch.zeros_like(embedding)
        self._known[self._tokens] = kept.half().float()
        return torch.nn.ModuleList(_Block(size, 2 + head) for head in range(self.shape.count))

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._modules, torch.nn.ModuleList)
        count = states.shape[1]
        seen = [self._known[following[:, place : place + count]] for place in range(1 + head)]
        guessed: torch.Tensor = self._modules[head](torch.cat([states, *seen], -1))
        return guessed

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"embeddings": half(self._known[self._tokens])}
        for name, value in self._modules.named_parameters():
            head, part = name.split(".")
            arrays[f"{part}.{head}"] = half(value)
        return arrays
