"""Trains an EAGLE-3 head for a target by training-time test: on states of its own, as it drafts (Li et al. 2025).

The row of a token reads its embedding and the state before it: the target's in the first of some steps, the head's own
of the step before in each further one, in which every row moves one token on. So all drafts of a window, one after each
of its tokens, are learned together. The loss is the divergence from the target's probabilities among the tokens that
the head can draft, where the target's likeliest token is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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

_EPS = 1e-5
# Shallower targets are read before other layers than EAGLE-3 reads (eagle/model/modeling_llama_kv.py).
_USUAL_LAYERS = 8


@dataclass(frozen=True)
class EagleOptions(ChainOptions["EagleTask"]):
    kind = "eagle"

    depth: int = 5  # steps of drafting that a window is unrolled over

    @property
    def places(self) -> int:
        return self.depth

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.depth <= 16, "depth", self.depth, "from 1 to 16")

    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> EagleTask:
        taps = _default_taps(target.config.get_text_config().num_hidden_layers)
        return EagleTask(target, sources, self, HeadShape(**self._sizes(target), taps=taps))


def _default_taps(layers: int) -> tuple[int, int, int]:
    """The layers of a target before which its states are read: EAGLE-3's, and different ones in shallow targets."""
    if layers >= _USUAL_LAYERS:
        return 2, layers // 2, layers - 3
    return min(1, layers - 1), layers // 2, layers - 1


@dataclass(frozen=True)
class HeadShape(ChainShape):
    taps: tuple[int, ...]  # layers of the target before which it reads states


class EagleTask(ChainTask):
    """A head over a frozen target."""

    name = "EAGLE-3"
    module: EagleHead
    shape: HeadShape

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], options: EagleOptions, shape: HeadShape) -> None:
        super().__init__(target, sources, options, {"depth": options.depth}, options.depth, shape)
        self.module = self._draw(lambda: EagleHead(shape, self._first_head()))

    def save(self, folder: Path) -> None:
        taps = {"eagle_aux_hidden_state_layer_ids": list(self.shape.taps)}
        self._write(folder, _EPS, {"architectures": ["LlamaForCausalLMEagle3"], **taps}, {})

    def _read_states(self, output: Any) -> Tensor:  # (1, S, W)
        return torch.cat([output.hidden_states[tap].float() for tap in self.shape.taps], -1)

    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        rows = self._rows(batch)
        states, past = self.module.fc(taught.states[:, :rows]), list[tuple[Tensor, Tensor]]()
        found = []
        for place in range(self._places):
            embedded = F.embedding(batch[:, 1 + place : 1 + place + rows], self._embedding)
            states = self.module.midlayer.step(states, embedded, past)
            found.append(self.module.norm(states))
        return found


class EagleHead(ChainModule):
    """A head of one layer (Li et al. 2025), whose parameters have the names of the published checkpoints; `head` is the
    initial LM head (Vd, D)."""

    def __init__(self, shape: HeadShape, head: Tensor) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(len(shape.taps) * shape.width, shape.width, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = torch.nn.RMSNorm(shape.width, _EPS)
        self.lm_head = torch.nn.Linear(shape.width, shape.drafted, bias=False)
        draw_matrices(self)
        with torch.no_grad():
            # At first the state is that of the last tap, which is the nearest to the target's prediction.
            self.fc.weight[:, -shape.width :] += torch.eye(shape.width)
            self.lm_head.weight.copy_(head)


class _Attention(ModuleAttention):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.width)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, S, 2 D) -> (B, S, D)
        """Each row attends to the text up to itself and, of each drafted step, to its own chain's row. `past` has keys
        and values of earlier steps, the text's first, (B, H, S, Dh) each; this step's are appended."""
        places = torch.arange(x.shape[1], device=x.device) + len(past)
        queries = self._queries(x, places)
        past.append((self._keys(x, places), self._values(x)))
        if len(past) > 1:
            return self._joined(_chain_attention(queries, past))
        keys, values = past[0]
        return self._joined(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))


def _chain_attention(queries: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, H, S, Dh)
    (keys, values), drafted = past[0], past[1:]
    queries = queries / queries.shape[-1] ** 0.5
    rows = queries.shape[2]
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    scores = (queries @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)  # (B, H, S, S)
    own = torch.stack([(queries * key).sum(-1) for key, _ in drafted], -1)  # (B, H, S, steps)
    weights = torch.softmax(torch.cat([scores, own], -1), -1)
    mixed = weights[..., :rows] @ values
    for place, (_, value) in enumerate(drafted):
        mixed = mixed + weights[..., rows + place, None] * value
    return mixed


class _Layer(ModuleLayer):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, _Attention(shape), _EPS)
        self.hidden_norm = torch.nn.RMSNorm(shape.width, _EPS)

    def step(self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, S, D)
        """The states after the next token of every row; `past` gets keys and values."""
        entering = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        return self._with_mlp(states + self.self_attn(entering, past))
