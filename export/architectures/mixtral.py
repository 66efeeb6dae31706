"""Mixtral: Mistral whose MLPs are mixtures of experts, all of them renormalised."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixtures import MixtureNaming
from edgeinfer.export.hf_config import HFConfig

__all__ = ["MIXTRAL"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    moe = MoESpec(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
    )
    return common_spec(config, tied, windows=config.uniform_windows(), moe=moe)


_MIXTURE = MixtureNaming(
    router="block_sparse_moe.gate.weight",
    gate_up=("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
MIXTRAL = Architecture(
    classes=("MixtralForCausalLM",), model_types=("mixtral",), read=_read, naming=Naming(mixture=_MIXTURE)
)
