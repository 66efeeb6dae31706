"""States after every layer of a decoder, with layers left out at will; knows nothing of what is learnt from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.errors import UsageError

__all__ = ["DepthFigures", "layer_states", "measure_depths", "require_plain"]

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
