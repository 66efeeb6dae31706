"""A mixture of experts over whole texts, for calibration: who is chosen, and each expert with what reaches it.

An expert's inputs count by what its result is multiplied by, because so do its errors. Knows nothing of the rest of a
layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import route
from edgeinfer.bundle.spec import MoESpec
from edgeinfer.quant.calibration_products import Signal, activate, multiply

if TYPE_CHECKING:
    from edgeinfer.quant.calibration_layers import LayerWalk

__all__ = ["ExpertUse", "mix_experts"]

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ExpertUse:
    """How much the tokens of the texts used the experts of a layer.

    Attributes:
        counts: tokens that chose each expert.
        weights: the mean, over all tokens, of what its result was multiplied by; 0 for tokens that did not choose it.
    """

    layer: int
    counts: NDArray[np.int64]  # (E,)
    weights: Floats  # (E,)

    @property
    def reached(self) -> NDArray[np.bool_]:  # (E,)
        """Experts that any token chose."""
        return self.counts > 0


def mix_experts(walk: LayerWalk, layer: int, moe: MoESpec, normed: Signal) -> Signal:  # (N, D) -> (N, D)
    """What the experts of a layer, and the shared one, make of its normed states."""
    prefix = f"layers.{layer}.mlp"
    router = walk.tensors(f"{prefix}.router")
    norm = walk.tensors(f"{prefix}.router_norm") if moe.router == "relu" else None
    shares = tuple(_shares(multiply(x, router), moe, norm, walk.spec.norm_eps) for x in normed)  # (N, E)
    chosen = shares[-1] != 0
    walk.uses.append(ExpertUse(layer, chosen.sum(axis=0), shares[-1].mean(axis=0)))
    mixed = tuple(np.zeros_like(x) for x in normed)
    inner = "gate_up" if moe.gated else "up"
    for expert in range(moe.experts):
        columns = tuple(np.ascontiguousarray(share[:, expert]) for share in shares)
        _add_expert(walk, f"{prefix}.experts.{expert}", inner, normed, columns, mixed)
    if moe.shared_size:
        columns = tuple(np.ones(len(x), np.float32) for x in normed)
        if moe.shared_gate:
            gate = walk.tensors(f"{prefix}.shared.gate")
            columns = tuple(_logistic(multiply(x, gate)[:, 0]) for x in normed)
        _add_expert(walk, f"{prefix}.shared", "gate_up", normed, columns, mixed)
    return mixed


def _shares(scores: Floats, moe: MoESpec, norm: Floats | None, eps: float) -> Floats:  # (N, E) -> (N, E)
    """What each expert's result is multiplied by; 0 where a token does not use it."""
    chosen, weights = route(scores, moe, norm=norm, eps=eps)
    shares = np.zeros_like(scores)
    np.put_along_axis(shares, chosen, weights, axis=1)
    return shares


def _logistic(x: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return result


def _add_expert(
    walk: LayerWalk,
    prefix: str,
    inner_name: str,
    normed: Signal,  # (N, D)
    shares: Signal,  # (N,)
    mixed: Signal,  # (N, D), added to
) -> None:
    """Adds what one expert makes of the tokens that use it, in each stream."""
    leading = shares[-1] != 0
    # The statistics relate streams token by token, so each stream also computes the tokens of the last one.
    used = [(share != 0) | leading for share in shares]
    seen = [leading[rows] for rows in used]
    weighing = shares[-1][leading, None] if walk.weigh_experts else np.float32(1)
    gated = inner_name == "gate_up"
    weights = walk.weights(f"{prefix}.{inner_name}", tuple(x[leading] * weighing for x in normed))
    inner = [activate(x[rows], w, gated=gated) for x, rows, w in zip(normed, used, weights, strict=True)]
    weights = walk.weights(f"{prefix}.down", tuple(h[s] * weighing for h, s in zip(inner, seen, strict=True)))
    for out, share, rows, hidden, weight in zip(mixed, shares, used, inner, weights, strict=True):
        out[rows] += share[rows, None] * multiply(hidden, weight)
