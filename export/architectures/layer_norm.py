"""Families with layer norms: Phi, StableLM, StarCoder 2, Nemotron, Command R and R7B (Cohere)."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# Every fourth layer of Cohere 2 sees everything, and does not rotate.
_COHERE2_PATTERN = 4


def _refuse_head_norms(config: HFConfig, field: str) -> None:
    if config.flag(field):
        message = f"config.json: {field} is not supported: every head has a norm with weights of its own."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)


def _read_phi(config: HFConfig, tied: bool) -> DecoderSpec:
    """Phi-1, 1.5 and 2: attention and MLP in parallel, biases everywhere, partial rotation."""
    _refuse_head_norms(config, "qk_layernorm")
    return common_spec(
        config,
        tied,
        norm_eps="layer_norm_eps",
        norm="layer",
        norm_bias=True,
        parallel=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _read_stablelm(config: HFConfig, tied: bool) -> DecoderSpec:
    """StableLM: partial rotation, gated MLPs, in some models in parallel with attention."""
    _refuse_head_norms(config, "qk_layernorm")
    return common_spec(
        config,
        tied,
        norm_eps="layer_norm_eps",
        norm="layer",
        norm_bias=True,
        parallel=config.flag("use_parallel_residual"),
        qkv_bias=config.flag("use_qkv_bias"),
    )


def _read_starcoder2(config: HFConfig, tied: bool) -> DecoderSpec:
    """StarCoder 2: MLPs without a gate, biases, a window on every layer."""
    bias = config.get("use_bias") is None or config.flag("use_bias")
    return common_spec(
        config,
        tied,
        norm_eps="norm_epsilon",
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        windows=config.uniform_windows(),
    )


def _read_nemotron(config: HFConfig, tied: bool) -> DecoderSpec:
    """Nemotron and Minitron: layer norms stored minus one, squared ReLU without a gate, partial rotation."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return common_spec(
        config,
        tied,
        norm_eps="norm_eps",
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )


def _refine_nemotron(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    return plan.changed(offset=1.0) if plan.name.endswith("norm") else plan


def _neighbours(config: HFConfig) -> RopeSpec:
    return dataclasses.replace(config.rope(config.head_dim()), interleaved=True)


def _read_cohere(config: HFConfig, tied: bool) -> DecoderSpec:
    """Command R: attention and MLP in parallel after one norm without a bias; neighbouring channels are rotated."""
    _refuse_head_norms(config, "use_qk_norm")
    bias = config.flag("attention_bias")
    parts: dict[str, Any] = {
        "norm_eps": "layer_norm_eps",
        "norm": "layer",
        "parallel": True,
        "rope": _neighbours(config),
    }
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, **parts)


def read_cohere2(config: HFConfig, tied: bool) -> DecoderSpec:
    """Command R7B: windows, and no rotation in layers that attend to everything."""
    slides = config.slides(_COHERE2_PATTERN)
    spec, layers = _read_cohere(config, tied), tuple(0 if slide else -1 for slide in slides)
    return dataclasses.replace(spec, windows=config.windows_of(slides), rope_layers=layers)


def refine_cohere(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """The last norm has no bias, so that its weight scales the logits."""
    return plan.changed(scale=config.number("logit_scale", 0.0625)) if plan.name == "final_norm" else plan


PHI = Architecture(
    classes=("PhiForCausalLM",),
    model_types=("phi",),
    read=_read_phi,
    naming=Naming(final_norm="model.final_layernorm.weight", out="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
)
STABLELM = Architecture(classes=("StableLmForCausalLM",), model_types=("stablelm",), read=_read_stablelm)
STARCODER2 = Architecture(
    classes=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    read=_read_starcoder2,
    naming=Naming(up="mlp.c_fc", down="mlp.c_proj"),
)
NEMOTRON = Architecture(
    classes=("NemotronForCausalLM",), model_types=("nemotron",), read=_read_nemotron, refine=_refine_nemotron
)
COHERE = Architecture(classes=("CohereForCausalLM",), model_types=("cohere",), read=_read_cohere, refine=refine_cohere)
COHERE2 = Architecture(
    classes=("Cohere2ForCausalLM",), model_types=("cohere2",), read=read_cohere2, refine=refine_cohere
)
