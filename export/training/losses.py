"""Losses over a large vocabulary in pieces, and the states after every layer that they are taken from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from edgeinfer.errors import UsageError

__all__ = [
    "DepthFigures",
    "cross_entropy",
    "divergence",
    "in_pieces",
    "layer_states",
    "measure_depths",
    "require_plain",
    "taught_divergence",
]

DepthFigures = dict[int, float]
_ROWS = 4


def require_plain(model: Any) -> None:
    """Refuses decoders whose layers cannot be called one by one.

    Raises:
        UsageError: some of them have a sliding window.
    """
    config = model.config
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if window or getattr(config, "_attn_implementation", "sdpa") != "sdpa":
        message = f"{type(model).__name__} with sliding windows cannot be trained layer by layer."
        raise UsageError(message, "Give a Llama, Qwen2 or Qwen3 without windows.")


def layer_states(model: Any, tokens: torch.Tensor, dropped: Collection[int] = ()) -> list[torch.Tensor]:
    """States after each layer, normed as the head takes them. (B, S) -> L of (B * S, D)

    Args:
        dropped: layers that pass their input on.
    """
    inner = model.model
    states = inner.embed_tokens(tokens)  # (B, S, D)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotation = inner.rotary_emb(states, positions)
    found = []
    for index, layer in enumerate(inner.layers):
        if index not in dropped:
            # Without a mask the attention is causal.
            output = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotation)
            states = output[0] if isinstance(output, tuple) else output
        found.append(inner.norm(states).flatten(0, 1))
    return found


@torch.inference_mode()
def measure_depths(model: Any, windows: NDArray[np.int64]) -> tuple[DepthFigures, float]:  # (n, S)
    """How often each depth finds the token likeliest that the whole model does; and the whole model's perplexity."""
    layers = len(model.model.layers)
    agreed, loss, count = dict.fromkeys(range(1, layers), 0), 0.0, 0
    for start in range(0, len(windows), _ROWS):
        tokens = torch.from_numpy(windows[start : start + _ROWS]).to(model.device)  # (b, S)
        states = layer_states(model, tokens)
        logits = model.lm_head(states[-1]).float()  # (b * S, V)
        whole = logits.argmax(-1)
        for depth in agreed:
            agreed[depth] += int((model.lm_head(states[depth - 1]).argmax(-1) == whole).sum())
        count += whole.numel()
        following = logits.unflatten(0, tokens.shape)[:, :-1].flatten(0, 1)
        loss += float(F.cross_entropy(following, tokens[:, 1:].flatten())) * len(tokens)
    return {depth: hits / count for depth, hits in agreed.items()}, float(np.exp(loss / len(windows)))


# Logits in memory at a time: 64 MB in float32, and as much again for what is derived from them.
_MOST_LOGITS = 1 << 24
# What is left to tokens that are not known one by one, at least.
_TINY = 1e-6


def in_pieces(
    loss: Callable[..., torch.Tensor], vocabulary: int, *rows: torch.Tensor, most: int = _MOST_LOGITS
) -> torch.Tensor:
    """The mean over rows of a loss that is worked out for some of them at a time, and again for its gradient.

    Args:
        loss: gives the sum over the rows it gets. (n, ...) each -> ()
        vocabulary: columns of the logits that it makes.
        rows: what it takes. (N, ...) each
        most: logits that it may make at a time.
    """
    count = len(rows[0])
    size = max(1, most // vocabulary)
    if size >= count:
        return loss(*rows) / count
    total = torch.zeros((), device=rows[0].device)
    for start in range(0, count, size):
        part = [each[start : start + size] for each in rows]
        total = total + checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False)
    return total / count


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean of -log p(label).  hidden (N, D), head (V, D), labels (N,)"""

    def piece(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(states @ head.T, wanted, reduction="sum")

    return in_pieces(piece, len(head), hidden, labels)


def divergence(
    hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, teacher_head: torch.Tensor
) -> torch.Tensor:
    """Mean Kullback-Leibler divergence of the student from its teacher, in nats.

    hidden (N, D), head (V, D), teacher (N, T), teacher_head (V', T); where V' differs, the columns of both count.
    """
    known = min(len(head), len(teacher_head))

    def piece(states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(taught @ teacher_head[:known].T, -1)  # (n, V)
        guessed = torch.log_softmax(states @ head[:known].T, -1)  # (n, V)
        return F.kl_div(guessed, wanted, reduction="sum", log_target=True)

    return in_pieces(piece, known, hidden, teacher)


def taught_divergence(
    hidden: torch.Tensor, head: torch.Tensor, likeliest: torch.Tensor, logs: torch.Tensor
) -> torch.Tensor:
    """As `divergence`, of distributions whose likeliest tokens are known one by one and the others together.

    hidden (N, D), head (V, D), likeliest (N, K), logs (N, K)
    """

    def piece(states: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = states @ head.T  # (n, V)
        guessed = logits.gather(-1, tokens) - torch.logsumexp(logits, -1, keepdim=True)  # (n, K)
        known = wanted.exp()
        rest, guessed_rest = ((1 - part.sum(-1)).clamp(min=_TINY) for part in (known, guessed.exp()))
        return (known * (wanted - guessed)).sum() + (rest * (rest / guessed_rest).log()).sum()

    return in_pieces(piece, len(head), hidden, likeliest, logs)
