"""llama.cpp's architectures with Mamba-2 layers: Mamba-2, Granite 4 and Bamba, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from edgeinfer.bundle.parts import Mamba2Spec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.mamba import ANY_STEP
from edgeinfer.export.architectures.tensors import Shape, TensorPlan
from edgeinfer.export.gguf.architectures import Floats, GgufArchitecture, GgufForm, GgufMixture, Tensor
from edgeinfer.export.gguf.dense import DENSE, GRANITE
from edgeinfer.export.gguf.keys import GgufKeys
from edgeinfer.export.source.hf_config import HFConfig

_TENSORS = {
    "mixer.in": ("ssm_in.weight",),
    "mixer.conv": ("ssm_conv1d.weight",),
    "mixer.conv_bias": ("ssm_conv1d.bias",),
    "mixer.dt_bias": ("ssm_dt.bias",),
    "mixer.a_log": ("ssm_a",),
    "mixer.d": ("ssm_d",),
    "mixer.norm": ("ssm_norm.weight",),
    "mixer.out": ("ssm_out.weight",),
}
# Longer than any text: what a model without positions says.
_UNBOUNDED = 1 << 20


def _sizes(spec: DecoderSpec) -> Mamba2Spec:
    assert spec.mamba2 is not None, "a family of Mamba-2 has its sizes"
    return spec.mamba2


def decayed(rows: Floats) -> Floats:  # (heads,) -> (heads,)
    """Decay of a state per step of time as a logarithm, from the checkpoint's logarithm."""
    return -np.exp(rows)


def conv_form(spec: DecoderSpec, shape: Shape) -> GgufForm:
    """One row of weights per channel."""
    return GgufForm((shape[0], shape[2]))


_FORMS = {
    "mixer.conv": conv_form,
    "mixer.a_log": lambda spec, shape: GgufForm((*shape, 1), decayed),
    "mixer.d": lambda spec, shape: GgufForm((*shape, 1)),
    "mixer.norm": lambda spec, shape: GgufForm((_sizes(spec).groups, shape[0] // _sizes(spec).groups)),
}


def add_recurrence(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    scan = _sizes(spec)
    writer.add_ssm_conv_kernel(scan.width)
    writer.add_ssm_inner_size(scan.inner_size)
    writer.add_ssm_state_size(scan.state_size)
    writer.add_ssm_time_step_rank(scan.heads)
    writer.add_ssm_group_count(scan.groups)


def _scan(keys: GgufKeys) -> Mamba2Spec:
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    normed = any(name.endswith("ssm_norm.weight") for name in keys.tensors)
    sizes = keys.integer("ssm.group_count"), keys.integer("ssm.state_size"), keys.integer("ssm.conv_kernel")
    return Mamba2Spec(heads, inner // max(heads, 1), *sizes, normed=normed)


def _mamba_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of attention, which there is none of, are the smallest."""
    scan, layers = _scan(keys), known["num_layers"]
    keys.ignore("attention.head_count", "attention.head_count_kv")
    fields: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "rope": RopeSpec("default", 1e4, 8)}
    fields |= {"mixers": ("mamba2",) * layers, "mamba2": scan, "no_mlp": tuple(range(layers))}
    return {**fields, "intermediate_size": scan.inner_size}


def _granite_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    layers = known["num_layers"]
    attends = keys.by_layer("attention.head_count_kv", layers)
    still = {} if keys.flag("rope.scaling.finetuned", True) else {"rope_layers": (-1,) * layers}
    mixers = tuple("attention" if each else "mamba2" for each in attends)
    return {"mixers": mixers, "mamba2": _scan(keys), **still}


def _falcon_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"mixers": ("attention+mamba2",) * known["num_layers"], "mamba2": _scan(keys)}


def _nemotron_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """A layer attends, has an MLP or recurs."""
    layers = known["num_layers"]
    attends, wide = (keys.by_layer(n, layers, 0) for n in ("attention.head_count_kv", "feed_forward_length"))
    keys.ignore("attention.layer_norm_epsilon")
    kinds = zip(attends, wide, strict=True)
    mixers = tuple("attention" if heads else "none" if size else "mamba2" for heads, size in kinds)
    alone = tuple(layer for layer, mixer in enumerate(mixers) if mixer != "none")
    return {"mixers": mixers, "mamba2": _scan(keys), "no_mlp": alone, "rope_layers": (-1,) * layers}


def _lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    scan = spec.mamba2
    if scan is None:
        yield "form without Mamba-2 layers"
        return
    if scan.bias:
        yield "biases of a Mamba-2 layer's products"
    if scan.norm_first:
        yield "norm before the gate"
    if not scan.conv_bias:
        yield "convolution without a bias"
    # llama.cpp steps through a Nemotron-H without a floor, as the code of published checkpoints does.
    least = 0.0 if config.model_type == "nemotron_h" else scan.least_step
    if least or 0 < scan.most_step < ANY_STEP:
        yield "limits of time steps"


def _normed(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    yield from _lacks(config, spec)
    if spec.mamba2 is not None and not spec.mamba2.normed:
        yield "form without a norm of the recurrence"


def _granite_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    add_recurrence(writer, config, spec, tensor)
    writer.add_rope_scaling_finetuned(bool({0} & set(spec.rope_layers or (0,))))


def _without_recurrence(spec: DecoderSpec) -> GgufArchitecture | None:
    """A Granite 4 that attends in all layers."""
    if spec.mamba2 is not None:
        return None
    return DENSE["granite"] if spec.moe is None else DENSE["granitemoe"]


def _falcon_rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """The head carries the multiplier of the logits, if there is one, not the last norm."""
    if not spec.tied and plan.name == "final_norm":
        plan = plan.changed()
    if plan.name == "head":
        plan = plan.changed(scale=config.number("lm_head_multiplier", 1.0))
    yield plan


def _nemotron_rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """A layer has one norm, before its only part."""
    yield dataclasses.replace(plan, name=plan.name.replace(".mlp_norm", ".attn_norm"))


def _nemotron_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    add_recurrence(writer, config, spec, tensor)
    writer.add_layer_norm_eps(spec.norm_eps)


def _nemotron_widths(spec: DecoderSpec) -> list[int]:
    wide = spec.intermediate_size if spec.moe is None else spec.moe.expert_size
    return [0 if layer in spec.no_mlp else wide for layer in range(spec.num_layers)]


_GRANITE4 = GgufArchitecture(
    "granitehybrid",
    neighbours=True,
    partial_rope=True,
    free_heads=True,
    output_bias=True,
    mlp_bias=True,
    tensors=_TENSORS,
    forms=_FORMS,
    parts=("attention_scale", "mixers", "mamba2", "rope_layers"),
    mixture=GgufMixture(True, length=False),
    mixed_heads=True,
    keys=_granite_keys,
    fields=_granite_fields,
    lacks=_normed,
)
_NEMOTRON = GgufArchitecture(
    "nemotron_h",
    # Nothing is rotated, but the converter orders queries and keys so.
    neighbours=True,
    free_heads=True,
    output_bias=True,
    mlp_bias=True,
    activation="relu2",
    tensors=_TENSORS,
    forms=_FORMS,
    parts=("mixers", "mamba2", "no_mlp", "gated", "rope_layers"),
    mixed_heads=True,
    widths=_nemotron_widths,
    rewrite=_nemotron_rewrite,
    keys=_nemotron_keys,
    fields=_nemotron_fields,
    lacks=_normed,
)
_NEMOTRON_MOE = dataclasses.replace(
    _NEMOTRON,
    name="nemotron_h_moe",
    mixture=GgufMixture(None, router="sigmoid", scale=True, groups=True, shared="both", parts=("choice_bias", "gated")),
)
MAMBA = {
    "mamba2": GgufArchitecture(
        "mamba2",
        free_heads=True,
        attention=False,
        tensors=_TENSORS,
        forms=_FORMS,
        parts=("mixers", "mamba2", "no_mlp"),
        keys=add_recurrence,
        fields=_mamba_fields,
        lacks=_normed,
    ),
    "granitemoehybrid": dataclasses.replace(_GRANITE4, multipliers=GRANITE, instead=_without_recurrence),
    "bamba": _GRANITE4,
    "falcon_h1": GgufArchitecture(
        "falcon-h1",
        free_heads=True,
        mlp_bias=True,
        # Without an ending, as its loader asks for.
        tensors=_TENSORS | {"mlp_norm": ("ffn_norm",)},
        forms=_FORMS,
        parts=("mixers", "mamba2"),
        refined=True,
        rewrite=_falcon_rewrite,
        keys=add_recurrence,
        fields=_falcon_fields,
        lacks=_lacks,
    ),
    "nemotron_h": dataclasses.replace(
        _NEMOTRON, instead=lambda spec: None if spec.moe is None else _NEMOTRON_MOE, others=(_NEMOTRON_MOE,)
    ),
}
