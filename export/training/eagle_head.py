"""An EAGLE-3 head in torch, with the names of its published layout, and the checkpoint that it is saved as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.export.training.layers import (
    ChainModule,
    ModuleAttention,
    ModuleLayer,
    ModuleShape,
    common_config,
    draw_matrices,
    mapped_tokens,
    save_module,
)
from edgeinfer.options import require

_EPS = 1e-5
# Targets of fewer layers are read before others than those that EAGLE-3 reads (eagle/model/modeling_llama_kv.py).
_USUAL_LAYERS = 8


def default_taps(layers: int) -> tuple[int, int, int]:
    """The layers of a target before which its states are read: EAGLE-3's, and in shallow targets others that differ."""
    if layers >= _USUAL_LAYERS:
        return 2, layers // 2, layers - 3
    return min(1, layers - 1), layers // 2, layers - 1


@dataclass(frozen=True)
class HeadShape(ModuleShape):
    """Sizes of a head.

    Attributes:
        drafted: Vd, tokens that it can draft.
        taps: layers of the target before which it reads states.
    """

    drafted: int
    taps: tuple[int, ...]

    def __post_init__(self) -> None:
        require(1 <= self.drafted <= self.vocabulary, "tokens", self.drafted, f"from 1 to {self.vocabulary}")


class _Attention(ModuleAttention):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.width)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, S, 2 D) -> (B, S, D)
        """Attends to the rows of the text up to each own and, behind them, to what the same chain drafted.

        Args:
            past: keys and values of earlier steps, those of the text first; gets this step's. (B, H, S, Dh) each
        """
        places = torch.arange(x.shape[1], device=x.device) + len(past)
        queries = self._queries(x, places)
        past.append((self._keys(x, places), self._values(x)))
        if len(past) > 1:
            return self._joined(_chain_attention(queries, past))
        keys, values = past[0]
        return self._joined(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))


def _chain_attention(queries: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, H, S, Dh)
    """Each row sees the text up to itself, and of every later step the row of its own chain alone."""
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
        entering = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        return self._fed(states + self.self_attn(entering, past))


class EagleHead(ChainModule):
    """A head of one layer (Li et al. 2025), whose parameters have the names of the published checkpoints.

    Args:
        head: the target's rows of the tokens that can be drafted, with which the own ones begin. (Vd, D)
    """

    def __init__(self, shape: HeadShape, head: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = torch.nn.Linear(len(shape.taps) * shape.width, shape.width, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = torch.nn.RMSNorm(shape.width, _EPS)
        self.lm_head = torch.nn.Linear(shape.width, shape.drafted, bias=False)
        draw_matrices(self)
        with torch.no_grad():
            # At first the state is that of the last tap, which is the nearest to what the target says.
            self.fc.weight[:, -shape.width :] += torch.eye(shape.width)
            # Logits of about one, so that nothing is thought certain at first.
            self.lm_head.weight.copy_(head / head.square().sum(-1).mean().sqrt())

    def states(self, tapped: Tensor) -> Tensor:  # (B, S, W) -> (B, S, D)
        """The states that stand for the target's."""
        given: Tensor = self.fc(tapped)
        return given

    def step(self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:  # (B, S, D)
        """The states behind the next token of every row; `past` gets keys and values."""
        return self.midlayer.step(states, embedded, past)

    def save(self, folder: Path, tokens: Tensor) -> None:
        """Writes the head as a checkpoint that `edgeinfer export --drafter` and others read.

        Args:
            tokens: the target's that its own are, ascending. (Vd,)
        """
        save_module(folder, self, mapped_tokens(tokens, self.shape.vocabulary), _config(self.shape))


def _config(shape: HeadShape) -> dict[str, object]:
    return common_config(shape, _EPS) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.drafted,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "tie_word_embeddings": False,
    }
