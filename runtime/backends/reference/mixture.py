"""Mixtures of experts in plain numpy: the router's choice, the experts it chose, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edgeinfer.bundle.arithmetic import logistic, route
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import ExpertChoice


@dataclass(frozen=True)
class ReferenceMixture:
    """The mixture of a layer.

    Attributes:
        weights: all tensors by name.
        linear, norm: product and norm by the names of their weights.
        mlp: an MLP by the prefix of its weights, gated or not.
    """

    spec: DecoderSpec
    layer: int
    moe: MoESpec
    weights: Mapping[str, Floats]
    linear: Callable[[str, Floats], Floats]
    norm: Callable[[str, Floats], Floats]
    mlp: Callable[[str, Floats, bool], Floats]

    @property
    def _prefix(self) -> str:
        return f"layers.{self.layer}.mlp"

    def of(self, x: Floats, choice: ExpertChoice | None) -> tuple[Floats, Ints]:  # (S, D) -> (S, D), (S, k)
        """What it gives, and which experts were used."""
        if not self.moe.with_mlp:
            return self._mixed(x, x, choice)
        prefix = self._prefix
        routed, entering = (self.norm(f"{prefix}.{name}", x) for name in ("router_input_norm", "experts_norm"))
        mixed, used = self._mixed(routed, entering, choice)
        dense = self.mlp(prefix, self.norm(f"layers.{self.layer}.mlp_norm", x), True)
        normed = self.norm(f"{prefix}.experts_post_norm", mixed) + self.norm(f"{prefix}.dense_post_norm", dense)
        return normed, used

    def _mixed(
        self, routed: Floats, x: Floats, choice: ExpertChoice | None
    ) -> tuple[Floats, Ints]:  # (S, D) -> (S, D), (S, k)
        """What the chosen experts of every token and the shared one make of it, and which were used."""
        moe, prefix = self.moe, self._prefix
        bias = None if choice is None or choice.bias is None else choice.bias[self.layer]
        scores, norm = self.linear(f"{prefix}.router", routed), self.weights.get(f"{prefix}.router_norm")
        count = None if choice is None else choice.count
        judging = self.weights.get(f"{prefix}.choice_bias")
        chosen, weights = route(
            scores, moe, count=count, bias=bias, choice_bias=judging, norm=norm, eps=self.spec.norm_eps
        )
        if moe.with_mlp:
            weights = weights * self.weights[f"{prefix}.expert_scale"][chosen]
        used = np.where(weights != 0, chosen, -1)
        mixed = np.zeros_like(x)
        for expert in np.unique(used[used >= 0]).tolist():
            tokens, slots = np.nonzero(used == expert)
            given = self.mlp(f"{prefix}.experts.{expert}", x[tokens], moe.gated)
            mixed[tokens] += weights[tokens, slots, None] * given
        if moe.shared_size:
            shared = self.mlp(f"{prefix}.shared", x, moe.gated)
            mixed += shared * logistic(self.linear(f"{prefix}.shared.gate", x)) if moe.shared_gate else shared
        return mixed, used
