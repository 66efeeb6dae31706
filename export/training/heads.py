"""Trains heads that draft from a target's last states: Medusa's residual blocks, and Hydra's, which also read tokens.
The state at token t predicts the root, t + 1; head i, counted from 0, predicts the token at t + 2 + i, as the target
would predict it after the tokens before that place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.export.training.distill import DistillTask, KindOptions
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.text import TokenFile, frequent_tokens

# A later place is reached less often, and counts so much less (Medusa).
_FADING = 0.8
# Tokens that Hydra's heads predict by default.
_HYDRA_TOKENS = 1024


@dataclass(frozen=True)
class HeadsOptions(KindOptions["HeadsTask"]):
    weight_decay = 0.0
    most_warmup = 20

    steps: int | None = 600
    length: int = 128
    count: int = 3  # heads, which predict one place each
    # That can be predicted, the most frequent ones; None is all of them for Medusa, 1024 for Hydra.
    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.count <= 8, "count", self.count, "between 1 and 8")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")
        if self.samples is None and self.steps is not None:  # Medusa's self-distillation
            object.__setattr__(self, "samples", self.steps * self.rows * self.length // 10)


@dataclass(frozen=True)
class MedusaOptions(HeadsOptions):
    kind = "medusa"

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> MedusaTask:
        return MedusaTask(target, sources, self)


@dataclass(frozen=True)
class HydraOptions(HeadsOptions):
    kind = "hydra"

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> HydraTask:
        return HydraTask(target, sources, self)


@torch.no_grad()
def final_states(model: Any, ids: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B, S, D)
    """States after the final norm, as the model's head sees them."""
    states: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def _unit(states: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., D)
    """States divided by their root mean square."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + STATE_EPS)


def _half(tensor: torch.Tensor) -> NDArray[np.float16]:
    stored: NDArray[np.float16] = tensor.detach().cpu().numpy().astype(np.float16)
    return stored


def _ids(tokens: torch.Tensor) -> NDArray[np.int32]:  # (K,)
    stored: NDArray[np.int32] = tokens.cpu().numpy().astype(np.int32)
    return stored


class HeadsTask(DistillTask):
    """Heads over the states of a frozen target."""

    kind: str
    most_tokens: int | None = None  # that are predicted by default; None is all

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], options: HeadsOptions) -> None:
        super().__init__(target, sources, options, {"count": options.count, "tokens": options.tokens})
        if options.length < options.count + 2:
            message = f"Windows of {options.length} tokens are too short for {options.count} heads."
            raise UsageError(message, "Use longer windows.")
        self.name, self.count = f"{self.kind} heads", options.count
        model = target.model
        vocabulary = len(model.lm_head.weight)
        chosen = frequent_tokens(sources, min(vocabulary, options.tokens or self.most_tokens or vocabulary))
        self._tokens = torch.from_numpy(chosen).to(target.device)  # (K,)
        self._rows = model.lm_head.weight.detach()[self._tokens]  # (K, D)
        self._norm = model.model.norm
        self._all = len(chosen) == vocabulary
        self.module: torch.nn.ModuleList = self._make(self._rows.shape[1]).to(target.device)

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence of every head from the target's prediction at its place, later places counting less."""
        batch = self._batch(step)
        read, said = self._states(batch)  # (B, S, D) each
        places, total, weights = batch.shape[1] - 1 - self.count, torch.zeros((), device=batch.device), 0.0
        for head in range(self.count):
            guessed = self._guess(head, read[:, :places], batch[:, 1:])  # (B, n, D)
            taught = said[:, 1 + head : 1 + head + places]
            weight = _FADING**head
            total = total + weight * divergence(guessed.flatten(0, 1), self._rows, taught.flatten(0, 1), self._rows)
            weights += weight
        return total / weights

    def heads(self, notes: Mapping[str, str]) -> Heads:
        return Heads(self.kind, self._arrays(), notes)

    @torch.no_grad()
    def figures(self, validation: TokenFile) -> dict[str, float]:
        """How often each head's likeliest token is the target's."""
        right = torch.zeros(self.count, dtype=torch.float64)
        seen = 0
        for batch in self._windows(validation):
            read, states = self._states(batch)
            said = (states @ self._target.model.lm_head.weight.T).argmax(-1)  # (1, S)
            places = batch.shape[1] - 1 - self.count
            for head in range(self.count):
                guessed = self._guess(head, read[:, :places], batch[:, 1:]) @ self._rows.T
                chosen = self._tokens[guessed.argmax(-1)]
                right[head] += float((chosen == said[:, 1 + head : 1 + head + places]).sum())
            seen += places
        shares = (right / max(1, seen)).tolist()
        return {f"agreement at place {place}": share for place, share in enumerate(shares, 1)}

    def _states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S) -> (B, S, D) each
        """The target's states as the heads read them, and as its own head does."""
        states = final_states(self._target.model, ids)
        return states, states

    @abstractmethod
    def _make(self, size: int) -> torch.nn.ModuleList:
        """Untrained heads."""

    @abstractmethod
    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """A head's output, which the rows multiply; it may see the first n + i of the following tokens. states (B, n,
        D), following (B, ...) -> (B, n, D)"""

    @abstractmethod
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The heads' arrays by their names in bundles."""


class MedusaTask(HeadsTask):
    """Head i is the target's final norm of n + SiLU(W n + b), n being a state divided by its root mean square. Before
    training it gives the input of the target's own head."""

    kind = "medusa"

    def _make(self, size: int) -> torch.nn.ModuleList:
        blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(self.count))
        for parameter in blocks.parameters():
            torch.nn.init.zeros_(parameter)
        return blocks

    @torch.no_grad()
    def _states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S) -> (B, S, D) each
        kept: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
        try:
            said = final_states(self._target.model, ids)
        finally:
            hook.remove()
        return _unit(kept[0]), said

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        guessed: torch.Tensor = self._norm(states + F.silu(self.module[head](states)))
        return guessed

    def _arrays(self) -> dict[str, NDArray[Any]]:
        values = dict(self.module.named_parameters())
        arrays: dict[str, NDArray[Any]] = {
            part: _half(torch.stack([values[f"{head}.{part}"] for head in range(self.count)]))
            for part in ("weight", "bias")
        }
        if self._all:
            return arrays
        return arrays | {"tokens": _ids(self._tokens), "rows": _half(self._rows * self._norm.weight.detach())}


class HydraTask(HeadsTask):
    """Head i reads the state, the root and i tokens after it; tokens that are not predicted enter as zeros."""

    kind = "hydra"
    most_tokens = _HYDRA_TOKENS

    def _make(self, size: int) -> torch.nn.ModuleList:
        embedding = self._target.model.model.embed_tokens.weight.detach()  # (V, D)
        self._known = torch.zeros_like(embedding)
        # Scaled as states are, and rounded as they will be stored.
        self._known[self._tokens] = _unit(embedding[self._tokens]).half().float()
        return torch.nn.ModuleList(_Block(size, 2 + head) for head in range(self.count))

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        count = states.shape[1]
        seen = [self._known[following[:, place : place + count]] for place in range(1 + head)]
        guessed: torch.Tensor = self.module[head](torch.cat([states, *seen], -1))
        return guessed

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {
            "norm": self._norm.weight.detach().cpu().numpy().astype(np.float32),
            "tokens": _ids(self._tokens),
            "rows": _half(self._rows),
            "embeddings": _half(self._known[self._tokens]),
        }
        for name, value in self.module.named_parameters():
            head, part = name.split(".")
            arrays[f"{part}.{head}"] = _half(value)
        return arrays


class _Block(torch.nn.Module):
    """P z + SiLU(W z + b), which is the state alone before training."""

    def __init__(self, size: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, size, inputs * size))
        self.bias = torch.nn.Parameter(torch.zeros(size))
        with torch.no_grad():
            self.weight[0, :, :size] = torch.eye(size)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (..., inputs * D) -> (..., D)
        projected: torch.Tensor = F.linear(z, self.weight[0]) + F.silu(F.linear(z, self.weight[1], self.bias))
        return projected
