"""What the mixtures of experts of llama.cpp's architectures can express, and the keys that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec

# llama.cpp's own limit, at which it ends the process.
_MOST_EXPERTS = 1024
# llama.cpp's numbers of how scores become shares (enum llama_expert_gating_func_type, src/llama-hparams.h).
_GATING = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True)
class GgufMixture:
    """The mixture of an architecture of llama.cpp.

    Attributes:
        renormalizes: whether the weights of a token's experts are made to sum to one; None where a key says so.
        length: the width of experts has a key of its own.
        leading: its first layers may have ordinary MLPs.
        router: how scores become shares.
        gating: a key says how, which `router` is where it is missing; both are possible then.
        scale: a key multiplies the weights.
        groups: experts may be chosen among the best groups.
        shared: what describes the shared expert: "length" is its width, "count" how many experts wide it is, "both"
            are needed, "same" it is as wide as an expert, "" there is none.
        parts: later fields of a MoESpec (edgeinfer.bundle.spec) that its graph has.
    """

    renormalizes: bool | None
    length: bool = True
    leading: bool = False
    router: str = "softmax"
    gating: bool = False
    scale: bool = False
    groups: bool = False
    shared: str = "length"
    parts: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """Later fields of a MoESpec that may have other values than their defaults."""
        routers = ("router",) if self.gating or self.router != "softmax" else ()
        scale = ("scale",) if self.scale else ()
        return (*self.parts, *routers, *scale, *(("groups", "group_top_k") if self.groups else ()))

    def missing(self, spec: DecoderSpec) -> Iterator[str]:
        """What its graph lacks of a decoder, in words."""
        moe = spec.moe
        if moe is None:
            return
        first = tuple(range(len(moe.dense_layers)))
        if moe.dense_layers and not (self.leading and moe.dense_layers == first):
            yield "layers without experts beside others with them"
        if self.renormalizes is not None and moe.renormalize != self.renormalizes:
            yield "weights of experts that are " + ("renormalized" if moe.renormalize else "not renormalized")
        if moe.router != self.router and not (self.gating and moe.router in _GATING):
            yield f"router of type {moe.router}"
        if moe.shared_size and self.shared in ("count", "both") and moe.shared_size % moe.expert_size:
            yield f"shared expert that is {moe.shared_size} wide beside others of {moe.expert_size}"
        if moe.shared_size and not self.shared:
            yield "shared expert"
        if moe.experts > _MOST_EXPERTS:
            yield f"room for {moe.experts} experts"

    def add_keys(self, writer: Any, moe: MoESpec) -> None:
        """Adds the keys of a mixture."""
        writer.add_expert_count(moe.experts)
        writer.add_expert_used_count(moe.top_k)
        if self.length:
            writer.add_expert_feed_forward_length(moe.expert_size)
        if moe.shared_size and self.shared in ("length", "both"):
            writer.add_expert_shared_feed_forward_length(moe.shared_size)
        if self.shared in ("count", "both"):
            writer.add_expert_shared_count(moe.shared_size // moe.expert_size)
        if self.leading:
            writer.add_leading_dense_block_count(len(moe.dense_layers))
        if self.gating:
            writer.add_uint32(f"{writer.arch}.expert_gating_func", _GATING[moe.router])
        if self.scale:
            writer.add_expert_weights_scale(moe.scale)
        if self.renormalizes is None:
            writer.add_expert_weights_norm(moe.renormalize)
        if self.groups:
            writer.add_expert_group_count(moe.groups)
            writer.add_expert_group_used_count(moe.group_top_k)
