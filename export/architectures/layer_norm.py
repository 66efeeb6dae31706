"""Families with layer norms: Phi, StableLM, StarCoder 2, Nemotron, Command R and R7B (Cohere)."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import (
    ALL_BIASES,
    ATTENTION_BIASES,
    Architecture,
    Naming,
    common_spec,
    flag,
    neighbours,
    reader,
)
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# Every fourth layer of Cohere 2 sees everything, and does not rotate.
_COHERE2_PATTERN = 4


def _refuse_head_norms(config: HFConfig, field: str) -> None:
    if config.flag(field):
        message = f"config.json: {field} is not supported: every head has a norm with weights of its own."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)


_LAYER_NORM: dict[str, Any] = {"norm_eps": "layer_norm_eps", "norm": "layer"}
_BIASED_NORM = _LAYER_NORM | {"norm_bias": True}


def _read_phi(config: HFConfig, tied: bool) -> DecoderSpec:
    """Phi-1, 1.5 and 2: attention and MLP in parallel, biases everywhere, partial rotation."""
    _refuse_head_norms(config, "qk_layernorm")
    biases: dict[str, Any] = dict.fromkeys((*ALL_BIASES, "head_bias"), True)
    return common_spec(config, tied, **_BIASED_NORM, **biases, parallel=True, gated=False)


def _read_stablelm(config: HFConfig, tied: bool) -> DecoderSpec:
    """StableLM: partial rotation, gated MLPs, in some models in parallel with attention."""
    _refuse_head_norms(config, "qk_layernorm")
    parallel, bias = config.flag("use_parallel_residual"), config.flag("use_qkv_bias")
    return common_spec(config, tied, **_BIASED_NORM, parallel=parallel, qkv_bias=bias)


def _refine_nemotron(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    return plan.changed(offset=1.0) if plan.name.endswith("norm") else plan


def _read_cohere(config: HFConfig, tied: bool) -> DecoderSpec:
    """Command R: attention and MLP in parallel after one norm without a bias; neighbouring channels are rotated."""
    _refuse_head_norms(config, "use_qk_norm")
    return reader(**_LAYER_NORM, **ATTENTION_BIASES, parallel=True, rope=neighbours)(config, tied)


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
# MLPs without a gate, biases, a window on every layer.
STARCODER2 = Architecture(
    classes=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    read=reader(
        **_BIASED_NORM | {"norm_eps": "norm_epsilon"},
        **dict.fromkeys(ALL_BIASES, flag("use_bias", True)),
        gated=False,
        windows=HFConfig.uniform_windows,
    ),
    naming=Naming(up="mlp.c_fc", down="mlp.c_proj"),
)
# Nemotron and Minitron: layer norms stored minus one, squared ReLU without a gate, partial rotation.
NEMOTRON = Architecture(
    classes=("NemotronForCausalLM",),
    model_types=("nemotron",),
    read=reader(**_BIASED_NORM | {"norm_eps": "norm_eps"}, **ALL_BIASES, gated=False),
    refine=_refine_nemotron,
)
COHERE = Architecture(classes=("CohereForCausalLM",), model_types=("cohere",), read=_read_cohere, refine=refine_cohere)
COHERE2 = Architecture(
    classes=("Cohere2ForCausalLM",), model_types=("cohere2",), read=read_cohere2, refine=refine_cohere
)
