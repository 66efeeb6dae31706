"""llama.cpp's architectures with short convolutions or delta rules: LFM2, Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edgeinfer.bundle.parts import ConvSpec, DeltaSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.tensors import Shape, Source, TensorPlan
from edgeinfer.export.gguf.architectures import GgufArchitecture, GgufForm, GgufMixture, Tensor, every
from edgeinfer.export.gguf.keys import GgufKeys
from edgeinfer.export.gguf.mamba import conv_form, decayed
from edgeinfer.export.source.hf_config import HFConfig

# Of pairs of a head, those that turn by time, height and width: transformers' configuration of Qwen3.5.
_SECTIONS = (11, 11, 10)
# Layers of which the last attends, where a file does not say.
_FULL_EVERY = 4


def _lfm_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    assert spec.conv is not None, "a layer with a convolution has its sizes"
    writer.add_shortconv_l_cache(spec.conv.width)


def _lfm_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    attends = keys.by_layer("attention.head_count_kv", known["num_layers"])
    conv = ConvSpec(keys.integer("shortconv.l_cache"))
    return {} if all(attends) else {"mixers": tuple("attention" if n else "conv" for n in attends), "conv": conv}


def _lfm_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if spec.conv is None:
        yield "form without convolutions"
    elif spec.conv.bias:
        yield "biases of convolutions"
    if spec.moe is not None and not spec.moe.choice_bias:
        yield "experts that are chosen without a bias"


def _sizes(spec: DecoderSpec) -> DeltaSpec:
    assert spec.delta is not None, "a layer with a delta rule has its sizes"
    return spec.delta


def _qwen_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    delta = _sizes(spec)
    writer.add_ssm_conv_kernel(delta.width)
    writer.add_ssm_state_size(delta.key_size)
    writer.add_ssm_group_count(delta.key_heads)
    writer.add_ssm_time_step_rank(delta.value_heads)
    writer.add_ssm_inner_size(delta.values)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [mixer == "delta" for mixer in spec.mixers])


def _turned_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    """Qwen3.5's rotation has sections for pictures; texts rotate all of them alike."""
    _qwen_keys(writer, config, spec, tensor)
    rope = config.get("rope_parameters")
    given = rope.get("mrope_section") if isinstance(rope, dict) else None
    sections = given if isinstance(given, list) else list(_SECTIONS)
    writer.add_rope_dimension_sections([*sections, 0, 0, 0, 0][:4])


def _qwen_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    layers, listed = known["num_layers"], "attention.recurrent_layers"
    keys.ignore("rope.dimension_sections")
    if keys.is_array(listed):
        recurs = keys.flags(listed, layers)
    else:
        recurs = [not each for each in every(keys.integer("full_attention_interval", _FULL_EVERY), layers)]
    heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    sizes = keys.integer("ssm.state_size"), keys.integer("ssm.inner_size") // max(heads[1], 1)
    delta = DeltaSpec(*heads, *sizes, keys.integer("ssm.conv_kernel"))
    mixers = tuple("delta" if each else "attention" for each in recurs)
    return {"output_gate": "channel", **({"mixers": mixers, "delta": delta} if any(recurs) else {})}


def _qwen_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    delta = spec.delta
    if delta is None:
        yield "form without delta rules"
    elif delta.key_size != delta.value_size:
        yield f"heads of {delta.value_size} channels of values and {delta.key_size} of keys"


def _rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """Queries are followed by their gates; the inputs and the gate of a delta rule are separate tensors."""
    part = plan.name.removeprefix("layers.").partition(".")[2]
    root = plan.name.removesuffix(part)
    if part == "attn.qkv":
        query, *others = plan.sources
        yield TensorPlan(f"{root}attn_q.weight", (Source(query.name, (2 * query.shape[0], *query.shape[1:])),))
        for name, source in zip("kv", others, strict=True):
            yield TensorPlan(f"{root}attn_{name}.weight", (source,))
    elif part == "mixer.in":
        *read, gate = plan.sources
        yield TensorPlan(f"{root}attn_qkv.weight", tuple(read))
        yield TensorPlan(f"{root}attn_gate.weight", (gate,))
    elif part == "mixer.gates" and plan.sources[0].pieces:
        rows = sum(source.shape[0] for source in plan.sources)
        whole = dataclasses.replace(plan.sources[0], shape=(rows, spec.hidden_size), pieces=())
        yield TensorPlan(f"{root}ssm_ba.weight", (whole,))
    elif part == "mixer.gates":
        for name, source in zip(("beta", "alpha"), plan.sources, strict=True):
            yield TensorPlan(f"{root}ssm_{name}.weight", (source,))
    elif part != "attn.gate":
        yield plan


def _by_turns(delta: DeltaSpec, size: int, before: int = 0) -> tuple[tuple[int, int], ...]:
    """Rows of value heads in llama.cpp's order: the first of every key head, then the second of each, and so on."""
    each = delta.value_heads // delta.key_heads
    starts = (before + (key * each + index) * size for index in range(each) for key in range(delta.key_heads))
    return (*(((0, before),) if before else ()), *((start, start + size) for start in starts))


def _read_form(spec: DecoderSpec, shape: Shape) -> GgufForm:
    """The form of queries, keys and values, and of their convolution, with one row of weights per channel."""
    delta = _sizes(spec)
    flat = (shape[0], shape[-1])
    return GgufForm(flat, parts=_by_turns(delta, delta.value_size, 2 * delta.keys))


def _head_form(spec: DecoderSpec, shape: Shape) -> GgufForm:
    return GgufForm(shape, parts=_by_turns(_sizes(spec), 1))


def _out_form(spec: DecoderSpec, shape: Shape) -> GgufForm:
    """The form of the output, whose columns alternate between heads."""
    delta = _sizes(spec)
    columns = np.concatenate([np.arange(*rows) for rows in _by_turns(delta, delta.value_size)])
    if (columns[1:] > columns[:-1]).all():
        return GgufForm(shape)
    return GgufForm(shape, lambda rows: np.ascontiguousarray(rows[:, columns]))


_DELTA = GgufArchitecture(
    "qwen3next",
    partial_rope=True,
    free_heads=True,
    qkv_bias=False,
    tensors={
        "mlp_norm": ("post_attention_norm.weight",),
        "mixer.conv": ("ssm_conv1d.weight",),
        "mixer.dt_bias": ("ssm_dt.bias",),
        "mixer.a_log": ("ssm_a",),
        "mixer.norm": ("ssm_norm.weight",),
        "mixer.out": ("ssm_out.weight",),
    },
    forms={"mixer.conv": conv_form, "mixer.a_log": lambda spec, shape: GgufForm(shape, decayed)},
    parts=("mixers", "delta", "output_gate"),
    mixture=GgufMixture(True),
    refined=True,
    rewrite=_rewrite,
    keys=_qwen_keys,
    fields=_qwen_fields,
    lacks=_qwen_lacks,
)
_TURNED: dict[str, Callable[[DecoderSpec, Shape], GgufForm]] = {
    "attn_qkv.weight": _read_form,
    "attn_gate.weight": lambda spec, shape: GgufForm(shape, parts=_by_turns(_sizes(spec), _sizes(spec).value_size)),
    "ssm_beta.weight": _head_form,
    "ssm_alpha.weight": _head_form,
    "mixer.conv": _read_form,
    "mixer.dt_bias": _head_form,
    "mixer.a_log": lambda spec, shape: GgufForm(shape, decayed, parts=_by_turns(_sizes(spec), 1)),
    "mixer.out": _out_form,
}
_QWEN35 = dataclasses.replace(_DELTA, name="qwen35", mixture=None, forms=_TURNED, keys=_turned_keys)
_LFM = GgufArchitecture(
    "lfm2",
    qkv_bias=False,
    tensors={
        "final_norm": ("token_embd_norm.weight",),
        "mixer.in": ("shortconv.in_proj.weight",),
        "mixer.conv": ("shortconv.conv.weight",),
        "mixer.out": ("shortconv.out_proj.weight",),
    },
    forms={"mixer.conv": conv_form},
    parts=("mixers", "conv"),
    mixed_heads=True,
    keys=_lfm_keys,
    fields=_lfm_fields,
    lacks=_lfm_lacks,
)
HYBRID = {
    "lfm2": _LFM,
    "lfm2_moe": dataclasses.replace(
        _LFM,
        name="lfm2moe",
        mixture=GgufMixture(True, leading=True, router="sigmoid", gating=True, shared="", parts=("choice_bias",)),
    ),
    "qwen3_next": _DELTA,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": dataclasses.replace(_QWEN35, name="qwen35moe", mixture=GgufMixture(True)),
}
