"""Trains a Hydra++ module for a target: heads over a prefix layer, each of which knows the tokens before its own.

Head i of a row reads the prefix of the text up to that row, the token after it and i further ones, and learns the
target's prediction there: the teacher loss alone, which Ankner et al. 2024 found best, among the tokens that the module
can draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.spec import MOST_DRAFT_HEADS, MOST_HEAD_LAYERS
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.modules import (
    ChainModule,
    ChainOptions,
    ChainShape,
    ChainTask,
    ModuleAttention,
    ModuleLayer,
    Taught,
    draw_matrices,
)
from edgeinfer.export.training.text import TokenFile

_USUAL_EPS = 1e-5


@dataclass(frozen=True)
class HydraPlusOptions(ChainOptions["HydraPlusTask"]):
    kind = "hydra-plus"

    count: int = 4  # heads, and tokens of a draft; 4 in the paper
    layers: int = 4  # of each head; 4 in the paper

    @property
    def places(self) -> int:
        return self.count

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.count <= MOST_DRAFT_HEADS, "count", self.count, f"from 1 to {MOST_DRAFT_HEADS}")
        require(1 <= self.layers <= MOST_HEAD_LAYERS, "layers", self.layers, f"from 1 to {MOST_HEAD_LAYERS}")

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> HydraPlusTask:
        eps = float(getattr(target.config.get_text_config(), "rms_norm_eps", _USUAL_EPS))
        shape = HydraShape(**self._sizes(target), places=self.count, layers=self.layers, eps=eps)
        return HydraPlusTask(target, sources, self, shape)


@dataclass(frozen=True)
class HydraShape(ChainShape):
    """Sizes of a module; the inherited ones are the prefix layer's."""

    places: int  # heads, one for each place of a draft
    layers: int  # of each head
    eps: float  # of the norms


class HydraPlusTask(ChainTask):
    """A module over a frozen target, whose last norm must be a plain RMS norm."""

    name = "Hydra++"
    module: HydraModule
    shape: HydraShape

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], options: HydraPlusOptions, shape: HydraShape
    ) -> None:
        super().__init__(target, sources, options, {}, shape.places, shape)
        self._state_norm = _final_norm(target, shape.width)
        self.module = self._draw(lambda: HydraModule(shape, self._first_head()))

    def save(self, folder: Path) -> None:
        shape = self.shape
        heads = {"num_heads": shape.places, "num_layers": shape.layers}
        config: dict[str, object] = {"architectures": ["HydraPlusPlusModel"], "hydra_config": heads}
        self._write(folder, shape.eps, config, {"state_norm.weight": self._state_norm.cpu()})

    def _read_states(self, output: Any) -> Tensor:  # (1, S, D)
        # transformers gives the last one after the final norm.
        states: Tensor = output.hidden_states[-1].float()
        return states

    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        rows, module = self._rows(batch), self.module
        prefix = module.norm(module.layers[0](taught.states[:, :rows]))
        normed = module.embed_norm(F.embedding(batch, self._embedding))
        after = [normed[:, 1 + place : 1 + place + rows] for place in range(self._places)]
        return [head(torch.cat([prefix, *after[: 1 + place]], -1)) for place, head in enumerate(module.heads)]


@torch.no_grad()
def _final_norm(target: Target, width: int) -> Tensor:  # (D,)
    """The weight of a target's final norm, found by norming ones."""
    norm, ones = getattr(target.model.model, "norm", None), torch.ones(width, device=target.device)
    weight: Tensor | None = None if norm is None else norm(ones).float()
    if norm is None or weight is None or not weight.any() or not torch.equal(norm(-ones).float(), -weight):
        message = f"{target.folder} norms its last states in a way of its own, which a Hydra++ module cannot read."
        raise UsageError(message, "Train another drafter: edgeinfer distill eagle.")
    return weight


class HydraModule(ChainModule):
    """A prefix layer over the target's states, and a head for each place of a draft (Ankner et al. 2024). Before
    training every head gives the prefix layer's result; `head` is the initial LM head (Vd, D)."""

    def __init__(self, shape: HydraShape, head: Tensor) -> None:
        super().__init__()
        self.embed_norm = torch.nn.RMSNorm(shape.width, shape.eps)
        self.layers = torch.nn.ModuleList([ModuleLayer(shape, _Attention(shape), shape.eps)])
        self.norm = torch.nn.RMSNorm(shape.width, shape.eps)
        self.heads = torch.nn.ModuleList(_Head(shape, 1 + place) for place in range(shape.places))
        self.lm_head = torch.nn.Linear(shape.width, shape.drafted, bias=False)
        draw_matrices(self)
        for block in self.modules():
            if isinstance(block, _Block):
                block.reset()
        with torch.no_grad():
            self.lm_head.weight.copy_(head)


class _Attention(ModuleAttention):
    def __init__(self, shape: HydraShape) -> None:
        super().__init__(shape, shape.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        places = torch.arange(x.shape[1], device=x.device)
        queries, keys, values = self._queries(x, places), self._keys(x, places), self._values(x)
        return self._joined(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))


class _Block(torch.nn.Module):
    """x + SiLU(W x + b), with a projection of x where it is wider than the result."""

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs * width, width)
        if inputs > 1:
            self.res_connection = torch.nn.Linear(inputs * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs * D) -> (..., D)
        kept = self.res_connection(x) if hasattr(self, "res_connection") else x
        activated: Tensor = kept + F.silu(self.linear(x))
        return activated

    def reset(self) -> None:
        """Makes the result the first D inputs."""
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
        if hasattr(self, "res_connection"):
            with torch.no_grad():
                width = self.res_connection.weight.shape[0]
                self.res_connection.weight[:, :width] = torch.eye(width)


class _Head(torch.nn.Module):
    def __init__(self, shape: HydraShape, tokens: int) -> None:
        super().__init__()
        self._further = shape.layers - 1
        self.first = _Block(shape.width, 1 + tokens)
        # The same block several times, as in the published code.
        self.further = _Block(shape.width) if self._further else torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (..., (1 + tokens) D) -> (..., D)
        value: Tensor = self.first(x)
        for _ in range(self._further):
            value = self.further(value)
        return value
