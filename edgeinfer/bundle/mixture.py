"""Mixtures of experts, as a decoder's description gives them: sizes, routers, and what chosen experts weigh."""

from __future__ import annotations

from typing import Literal, get_args

from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.records import dataclass

Router = Literal["softmax", "relu", "sigmoid", "sparsemixer"]


@dataclass(frozen=True)
class MoESpec:
    """The mixture of experts that stands in for a layer's MLP.

    A token's scores are the router's product with its normed hidden state, and a bias where there is one. They become
    shares by "softmax" over all experts or by "sigmoid" of each; the `top_k` experts of highest share, plus a bias that
    is for choosing alone, are used, and their results multiplied by their shares, divided by the chosen ones' sum where
    `renormalize`, times `scale`. "relu": every expert whose score is positive, weighted by the RMS norm of the
    rectified scores (BlockFFN); `top_k` is the number of experts then. "sparsemixer" (Phi-3.5-MoE): experts are chosen
    by falling score, and each weighted by its share of a softmax over those that are not chosen before it and whose
    score lies at most 2 `jitter` below its own, relative to the larger magnitude of theirs and its own score.

    Attributes:
        experts: of a layer.
        top_k: the most a token uses.
        expert_size: inner width of one.
        shared_size: inner width of the expert that every token uses; 0 where there is none.
        shared_gate: its result is multiplied by the logistic function of a product of its own (Qwen2-MoE).
        gated: experts, the shared one too, are down(act(gate(x)) * up(x)); otherwise down(act(up(x))).
        dense_layers: layers that have an ordinary MLP of `intermediate_size`, ascending.
        router_bias: is added to the scores (gpt-oss).
        choice_bias: is added to the shares when experts are chosen, and not to what they are weighted by (DeepSeek-V3).
        expert_bias: the experts' matrices have biases (gpt-oss).
        groups, group_top_k: experts are chosen among the best groups alone (DeepSeek); 1 group is all of them. A
            group's rank is its best share, or with a choice bias the sum of its two best.
        scale: of the chosen experts' weights.
        jitter: of a "sparsemixer"; 0 for other routers.
        beside: the layer has its ordinary MLP as well. Router, experts and MLP each read the hidden states through a
            norm of their own; what the chosen experts give is multiplied by a number of each, experts and MLP are
            normed, and their sum is what the layer's MLP gives (Gemma 4).
    """

    experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    router: Router = "softmax"
    renormalize: bool = True
    gated: bool = True
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    choice_bias: bool = False
    expert_bias: bool = False
    groups: int = 1
    group_top_k: int = 1
    scale: float = 1.0
    jitter: float = 0.0
    beside: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "expert_size"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.experts <= 4096, f"{self.experts} experts are impossible")
        _require(self.top_k <= self.experts, f"top_k {self.top_k} exceeds {self.experts} experts")
        _require(self.shared_size >= 0, "shared_size must be 0 or positive")
        _require(self.shared_size > 0 or not self.shared_gate, "a shared gate needs a shared expert")
        _require(self.router in get_args(Router), f"router {self.router!r} is unknown")
        every = self.router != "relu" or self.top_k == self.experts
        _require(every, "a relu router chooses among all experts")
        ascending = self.dense_layers == tuple(sorted(set(self.dense_layers)))
        _require(ascending and min(self.dense_layers, default=0) >= 0, "dense_layers must ascend")
        _require(1 <= self.group_top_k <= self.groups, "group_top_k must be from 1 to groups")
        _require(self.experts % self.groups == 0, "groups must divide the experts")
        enough = self.top_k <= self.experts // self.groups * self.group_top_k
        _require(enough, "the groups chosen have fewer experts than top_k")
        _require(self.scale > 0, "the scale of the experts must be positive")
        mixes = self.router == "sparsemixer"
        _require(self.jitter > 0 if mixes else not self.jitter, "jitter is of a sparsemixer router, and positive")
        plain = self.groups == 1 and not self.choice_bias and not self.renormalize
        _require(not mixes or plain, "a sparsemixer has weights of its own, and chooses by scores alone")

        _require(not self.beside or (self.gated and not self.shared_size), "experts beside an MLP share none")

    @property
    def by_shares(self) -> bool:
        """Whether weights are shares that were made before experts are chosen, by something else than these shares."""
        return self.router == "sigmoid" or self.choice_bias or (self.groups > 1 and not self.renormalize)

    @property
    def draft_count(self) -> int:
        """Experts of a token in a cheap pass, where an operator cannot have any number of them."""
        return max(1, self.top_k // 2)
