"""A Hydra++ module in torch: a prefix layer and heads over it, and the checkpoint that it is saved as."""

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


@dataclass(frozen=True)
class HydraShape(ModuleShape):
    """Sizes of a module; those of its base are the prefix layer's.

    Attributes:
        drafted: Vd, tokens that it can draft.
        places: heads that draft, one for each place of a draft.
        layers: of each of them.
        eps: of the norms.
    """

    drafted: int
    places: int
    layers: int
    eps: float

    def __post_init__(self) -> None:
        require(1 <= self.drafted <= self.vocabulary, "tokens", self.drafted, f"from 1 to {self.vocabulary}")


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

    def begin(self) -> None:
        """Gives the first D of what it reads."""
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
        # The same block several times over, as in the published code.
        self.further = _Block(shape.width) if self._further else torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (..., (1 + tokens) D) -> (..., D)
        value: Tensor = self.first(x)
        for _ in range(self._further):
            value = self.further(value)
        return value


class HydraModule(ChainModule):
    """A prefix layer over the target's states, and a head for each place of a draft (Ankner et al. 2024).

    Before training every head gives what the prefix layer does.

    Args:
        head: the target's rows of the tokens that can be drafted, with which the own ones begin. (Vd, D)
    """

    def __init__(self, shape: HydraShape, head: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.embed_norm = torch.nn.RMSNorm(shape.width, shape.eps)
        self.layers = torch.nn.ModuleList([ModuleLayer(shape, _Attention(shape), shape.eps)])
        self.norm = torch.nn.RMSNorm(shape.width, shape.eps)
        self.heads = torch.nn.ModuleList(_Head(shape, 1 + place) for place in range(shape.places))
        self.lm_head = torch.nn.Linear(shape.width, shape.drafted, bias=False)
        draw_matrices(self)
        for block in self.modules():
            if isinstance(block, _Block):
                block.begin()
        with torch.no_grad():
            # Logits of about one, so that nothing is thought certain at first.
            self.lm_head.weight.copy_(head / head.square().sum(-1).mean().sqrt())

    def prefix(self, states: Tensor) -> Tensor:  # (B, S, D)
        """What heads read of the target's normed states."""
        normed: Tensor = self.norm(self.layers[0](states))
        return normed

    def at(self, place: int, prefix: Tensor, embedded: list[Tensor]) -> Tensor:  # (..., D)
        """What the head of a place gives.

        Args:
            embedded: embeddings of the root and of the tokens before that place. 1 + place of (..., D)
        """
        normed = [self.embed_norm(each) for each in embedded]
        given: Tensor = self.heads[place](torch.cat([prefix, *normed], -1))
        return given

    def save(self, folder: Path, tokens: Tensor, state_norm: Tensor) -> None:
        """Writes the module as a checkpoint that `edgeinfer export --drafter` reads.

        Args:
            tokens: the target's that its own are, ascending. (Vd,)
            state_norm: the weight of the target's final norm. (D,)
        """
        more = mapped_tokens(tokens, self.shape.vocabulary) | {"state_norm.weight": state_norm.cpu()}
        save_module(folder, self, more, _config(self.shape))


def _config(shape: HydraShape) -> dict[str, object]:
    return common_config(shape, shape.eps) | {
        "architectures": ["HydraPlusPlusModel"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.drafted,
        "tie_word_embeddings": False,
        "hydra_config": {"num_heads": shape.places, "num_layers": shape.layers},
    }
