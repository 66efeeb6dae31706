"""Trains Medusa heads: one residual block for each place; knows nothing of batches and of how they draft."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.export.training.heads_task import HeadsTask, half

__all__ = ["MedusaTask"]


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
