"""MiniCPM3, and BlockFFN, published under MiniCPM's class: small ungated experts, of which a ReLU chooses any number.

Their multipliers go into the weights: of the embedding, of results before they are added, and of the hidden states
before the head. MiniCPM's ordinary MLPs are refused.
"""

from __future__ import annotations

import dataclasses
import math

from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.latent import latent_spec
from edgeinfer.export.architectures.mixture_plans import MixtureNaming
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# What a configuration must say; the first is what transformers' code of the family takes where it is silent.
_KNOWN: dict[str, tuple[object, ...]] = {
    "attention_type": ("vanilla", "mla"),
    "ffn_type": ("vanilla", "block", "block_linear"),
    "router_act": ("relu",),
    "norm_after_router": ("sum", "rms"),
    "num_shared_experts": (0,),
}
_BLOCKS = ("block", "block_linear")


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    given = {name: config.get(name) if config.get(name) is not None else known[0] for name, known in _KNOWN.items()}
    fits = all(given[name] in known for name, known in _KNOWN.items())
    if not fits or given["ffn_type"] not in _BLOCKS or given["norm_after_router"] != "rms":
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UnsupportedArchitectureError(f"A MiniCPM with {said} is not supported.", OPTIMUM_HINT)
    experts = config.integer("num_experts")
    moe = MoESpec(
        experts=experts,
        top_k=experts,
        expert_size=config.integer("expert_size"),
        router="relu",
        renormalize=False,
        gated=False,
    )
    if given["attention_type"] == "mla":
        # Whatever the configuration says of the width of values, the published code does not read it.
        values = config.values | {"v_head_dim": config.integer("hidden_size") // config.integer("num_attention_heads")}
        return latent_spec(HFConfig(values), tied, interleaved=False, moe=moe)
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, moe=moe)


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    embedding, factor = config.number("scale_emb", 1.0), 1.0
    if plan.name == "embed":
        factor = embedding
    elif plan.name == "final_norm":
        factor = config.number("dim_model_base", 1.0) / (spec.hidden_size * (embedding if spec.tied else 1.0))
    elif plan.name.endswith((".attn.out", ".attn.out_bias", ".down", ".down_bias")):
        factor = config.number("scale_depth", 1.0) / math.sqrt(spec.num_layers)
    sources = tuple(dataclasses.replace(s, scale=factor) for s in plan.sources)
    expert = find_expert(plan.name)
    if expert is not None and config.get("ffn_type") == "block_linear":
        # The experts' rows, or columns, follow one another in one matrix.
        sources = tuple(dataclasses.replace(s, joined=int(expert.part == "down")) for s in sources)
    return TensorPlan(plan.name, sources)


_MIXTURE = MixtureNaming(
    router="mlp.router_proj.weight",
    router_norm="mlp.router_norm.weight",
    stacked_gate_up="mlp.up_proj",
    stacked_down="mlp.down_proj",
)
BLOCK_FFN = Architecture(
    classes=("MiniCPMForCausalLM",),
    model_types=("minicpm",),
    read=_read,
    naming=Naming(mixture=_MIXTURE),
    refine=_refine,
)


def _read_minicpm3(config: HFConfig, tied: bool) -> DecoderSpec:
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    return latent_spec(config, tied, interleaved=False, value_size=width, mlp_bias=config.flag("mlp_bias"))


MINICPM3 = Architecture(
    classes=("MiniCPM3ForCausalLM",), model_types=("minicpm3",), read=_read_minicpm3, refine=_refine
)
