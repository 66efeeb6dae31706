"""Draft modules in torch: layers, the loss of those that draft token by token, and checkpoints."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.export.training.distill import DistillOptions, DistillTask, KindOptions, T
from edgeinfer.export.training.losses import divergence_from_logits
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.text import TokenFile, frequent_tokens

_THETA = 10_000.0
# Initial deviation of matrices, as Llama's and Qwen3's.
_DEVIATION = 0.02
# Weight of a place of a draft relative to the one before (eagle/traineagle3/main.py).
_FADING = 0.8
_MOST_TOKENS = 32_000

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class ModuleShape:
    width: int  # D, hidden size of the target and of the module
    inner: int  # of the MLPs
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # V, of the target

    @property
    def facts(self) -> dict[str, Any]:
        fields = asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}


def sizes_like(target: Target) -> dict[str, int]:
    """Sizes of a module whose layers resemble its target's, by the names of `ModuleShape`."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocabulary": config.vocab_size,
    }


def rotated(x: Tensor, places: Tensor) -> Tensor:  # (B, H, S, h), (B, S) or (S,)
    """Queries or keys rotated by their positions, in halves."""
    half = x.shape[-1] // 2
    frequencies = torch.pow(_THETA, -torch.arange(half, device=x.device) / half)
    angles = places[..., None, :, None] * frequencies  # (B, 1, S, h / 2) or (1, S, h / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class ModuleAttention(torch.nn.Module):
    """The projections of Llama's attention, or of Qwen3's with queries and keys normed by `eps`; subclasses attend."""

    def __init__(self, shape: ModuleShape, entering: int, eps: float | None = None) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._head_dim, self._shared = shape.head_dim, shape.heads // shape.kv_heads
        self.q_proj = torch.nn.Linear(entering, queries, bias=False)
        self.k_proj = torch.nn.Linear(entering, keys, bias=False)
        self.v_proj = torch.nn.Linear(entering, keys, bias=False)
        self.o_proj = torch.nn.Linear(queries, shape.width, bias=False)
        self.q_norm = torch.nn.Identity() if eps is None else torch.nn.RMSNorm(shape.head_dim, eps)
        self.k_norm = torch.nn.Identity() if eps is None else torch.nn.RMSNorm(shape.head_dim, eps)

    def _queries(self, x: Tensor, places: Tensor) -> Tensor:  # (B, S, E), (B, S) or (S,) -> (B, H, S, h)
        return rotated(self.q_norm(self._split(self.q_proj(x))), places)

    def _keys(self, x: Tensor, places: Tensor) -> Tensor:  # (B, S, E), (B, S) or (S,) -> (B, H, S, h)
        return rotated(self.k_norm(self._split(self.k_proj(x))), places).repeat_interleave(self._shared, 1)

    def _values(self, x: Tensor) -> Tensor:  # (B, S, E) -> (B, H, S, h)
        return self._split(self.v_proj(x)).repeat_interleave(self._shared, 1)

    def _joined(self, mixed: Tensor) -> Tensor:  # (B, H, S, h) -> (B, S, D)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:  # (B, S, H h) -> (B, H, S, h)
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)


class ModuleLayer(torch.nn.Module):
    """A layer of Llama or Qwen3 around an attention."""

    def __init__(self, shape: ModuleShape, attention: ModuleAttention, eps: float) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(shape.width, eps)
        self.self_attn = attention
        self.post_attention_layernorm = torch.nn.RMSNorm(shape.width, eps)
        self.mlp = _GatedMLP(shape.width, shape.inner)

    def forward(self, hidden: Tensor, *seen: Tensor) -> Tensor:  # (B, S, D)
        """Adds attention and MLP to states; `seen` is passed to the attention."""
        return self._with_mlp(hidden + self.self_attn(self.input_layernorm(hidden), *seen))

    def _with_mlp(self, hidden: Tensor) -> Tensor:  # (B, S, D)
        further: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return further


class _GatedMLP(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D)
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


def draw_matrices(module: torch.nn.Module) -> None:
    """Draws the initial values of a module's matrices."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=_DEVIATION)


def common_config(shape: ModuleShape, eps: float) -> dict[str, object]:
    """Fields of every module's config.json."""
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": eps,
        # Texts may be as long as the target's.
        "max_position_embeddings": 2048,
        "rope_theta": _THETA,
        "hidden_act": "silu",
    }


def save_module(
    folder: Path, module: torch.nn.Module, more: Mapping[str, Tensor], config: Mapping[str, object]
) -> None:
    """Writes a checkpoint for `edgeinfer export --drafter` and for other programs."""
    state = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state | dict(more), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(config), indent=1), "utf-8")


class ModuleTask(DistillTask):
    """A module that is written as a checkpoint."""

    shape: ModuleShape

    @property
    def configuration(self) -> Mapping[str, Any]:
        return dict(super().configuration) | self.shape.facts

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the module in its published layout."""

    def _draw(self, make: Callable[[], M]) -> M:
        """A module whose initial values depend on the seed alone, on the target's device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._options.seed)
            return make().to(self._target.device)


def by_place(right: np.ndarray[Any, Any], reached: np.ndarray[Any, Any]) -> dict[str, float]:  # (places,) each
    """Figures of how often the likeliest token is the target's at each place, after a correct draft so far."""
    return {f"drafted token {n}": float(share) for n, share in enumerate(right / np.maximum(reached, 1), 1)}


@dataclass(frozen=True)
class Taught:
    """The target's results for windows."""

    states: Tensor  # inputs of the module. (B, S, W)
    logits: Tensor  # of the tokens that can be drafted. (B, S, Vd)
    known: Tensor  # whether the likeliest token can be drafted. (B, S)


class ChainModule(torch.nn.Module):
    """A module with its own head over the tokens that it can draft."""

    lm_head: torch.nn.Linear  # (Vd, D)


@dataclass(frozen=True)
class ChainShape(ModuleShape):
    drafted: int  # Vd, tokens that it can draft


@dataclass(frozen=True)
class ChainOptions(KindOptions[T]):
    """Options of modules that draft token by token."""

    # That the module can draft, the most frequent ones; None is 32,000, or half of a smaller vocabulary.
    tokens: int | None = None

    @property
    @abstractmethod
    def places(self) -> int:
        """Tokens of a draft to learn from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")
        require(self.length >= 2 * self.places, "length", self.length, f"{2 * self.places} or more")

    def _sizes(self, target: Target) -> dict[str, int]:
        sizes = sizes_like(target)
        vocabulary = sizes["vocabulary"]
        drafted = self.tokens or min(_MOST_TOKENS, vocabulary // 2)
        require(1 <= drafted <= vocabulary, "tokens", drafted, f"from 1 to {vocabulary}")
        return sizes | {"drafted": drafted}


class ChainTask(ModuleTask):
    """A module that drafts token by token, up to `places`, among the most frequent tokens."""

    module: ChainModule
    shape: ChainShape

    def __init__(
        self,
        target: Target,
        sources: tuple[TokenFile, ...],
        options: DistillOptions,
        settings: Mapping[str, Any],
        places: int,
        shape: ChainShape,
    ) -> None:
        super().__init__(target, sources, options, settings)
        self._places, self.shape = places, shape
        self.tokens = torch.from_numpy(frequent_tokens(sources, shape.drafted)).to(target.device)  # (Vd,)
        self._embedding = target.model.get_input_embeddings().weight.detach()  # (V, D)

    @abstractmethod
    def _read_states(self, output: Any) -> Tensor:  # (1, S, W)
        """The module's inputs in the output of the target's code."""

    @abstractmethod
    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        """Inputs of the head at each place of a draft, after each row of windows (B, S). places of (B, R, D)"""

    def _write(self, folder: Path, eps: float, config: dict[str, object], more: Mapping[str, Tensor]) -> None:
        """Saves the module with d2t and t2d: the offset of each drafted token's id, and which tokens are drafted."""
        own, shape = self.tokens.cpu(), self.shape
        known = torch.zeros(shape.vocabulary, dtype=torch.bool).index_fill(0, own, True)
        mapped = {"d2t": own - torch.arange(len(own)), "t2d": known}
        config |= {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
        config |= common_config(shape, eps) | {"draft_vocab_size": shape.drafted}
        save_module(folder, self.module, {**mapped, **more}, config)

    def _first_head(self) -> Tensor:  # (Vd, D)
        """The target's head for the drafted tokens, scaled to logits of about one, so that nothing seems certain."""
        rows: Tensor = self._target.model.get_output_embeddings().weight.detach()[self.tokens].cpu()
        return rows / rows.square().sum(-1).mean().sqrt()

    def _rows(self, batch: Tensor) -> int:
        """R, the number of rows of windows (B, S) after which a whole draft is known."""
        return batch.shape[1] - self._places - 1

    def loss(self, step: int) -> Tensor:
        """Mean divergence from the target at every place, later places counting less."""
        batch = self._batch(step)
        taught = self._read(batch)
        total, weights = torch.zeros((), device=batch.device), 0.0
        for place, states in enumerate(self._unrolled(batch, taught)):
            wanted, known = self._at(taught, place)
            if known.any():
                weight = _FADING**place
                lost = divergence_from_logits(states[known], self.module.lm_head.weight, wanted[known])
                total, weights = total + weight * lost, weights + weight
        if not weights:
            raise UsageError("The drafter can draft none of the tokens that the model says.", "Give more text.")
        return total / weights

    @torch.no_grad()
    def figures(self, validation: TokenFile) -> dict[str, float]:
        right, reached = np.zeros(self._places), np.zeros(self._places)
        for batch in self._windows(validation):
            taught = self._read(batch)
            going = torch.ones_like(taught.known[:, : self._rows(batch)])
            for place, states in enumerate(self._unrolled(batch, taught)):
                wanted, known = self._at(taught, place)
                same = known & ((states @ self.module.lm_head.weight.T).argmax(-1) == wanted.argmax(-1))
                right[place] += float((same & going).sum())
                reached[place] += float(going.sum())
                # The text continues as the target would.
                said = self.tokens[wanted.argmax(-1)] == batch[:, 2 + place :][:, : same.shape[1]]
                going = going & same & said
        return by_place(right, reached)

    @torch.no_grad()
    def _read(self, batch: Tensor) -> Taught:  # (B, S)
        """Reads one window at a time, so that few logits are in memory."""
        found = []
        for window in batch[:, None]:  # (1, S)
            output = self._target.model(window, output_hidden_states=True, use_cache=False)
            logits = output.logits.float()
            chosen = logits[..., self.tokens]
            found.append((self._read_states(output), chosen, chosen.amax(-1) == logits.amax(-1)))
        return Taught(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _at(self, taught: Taught, place: int) -> tuple[Tensor, Tensor]:  # (B, R, Vd), (B, R)
        """The target's logits after the tokens that are known at a place, and whether their best can be drafted."""
        rows = slice(1 + place, taught.known.shape[1] - self._places + place)
        return taught.logits[:, rows], taught.known[:, rows]
