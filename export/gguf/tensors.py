"""The tensors of a GGUF file by llama.cpp's names, and the rows of ours that they hold; MXFP4 blocks unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import QuantizedMatrix, find_expert
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.gguf.architectures import GgufArchitecture
from edgeinfer.nn.arithmetic import inverse_frequencies
from edgeinfer.quant.policy import QuantScheme

Floats = NDArray[np.float32]

_MODEL = {
    "embed": "token_embd.weight",
    "embed.per_layer": "per_layer_token_embd.weight",
    "per_layer.projection": "per_layer_model_proj.weight",
    "per_layer.norm": "per_layer_proj_norm.weight",
    "streams.enter": "altup_proj.weight",
    "streams.leave": "altup_unembd_proj.weight",
    "final_norm": "output_norm.weight",
    "final_norm_bias": "output_norm.bias",
    "head": "output.weight",
    "head_bias": "output.bias",
}
_LAYER = {
    "attn_norm": ("attn_norm.weight",),
    "attn_norm_bias": ("attn_norm.bias",),
    "attn.qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "attn.qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attn.q_norm": ("attn_q_norm.weight",),
    "attn.k_norm": ("attn_k_norm.weight",),
    "attn.sinks": ("attn_sinks.weight",),
    "attn.q": ("attn_q.weight",),
    "attn.q_a": ("attn_q_a.weight",),
    "attn.q_a_norm": ("attn_q_a_norm.weight",),
    "attn.q_b": ("attn_q_b.weight",),
    "attn.kv_a": ("attn_kv_a_mqa.weight",),
    "attn.kv_norm": ("attn_kv_a_norm.weight",),
    "attn.out": ("attn_output.weight",),
    "attn.out_bias": ("attn_output.bias",),
    "mlp_norm": ("ffn_norm.weight",),
    "mlp_norm_bias": ("ffn_norm.bias",),
    "mlp.gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "mlp.gate_up_bias": ("ffn_gate.bias", "ffn_up.bias"),
    "mlp.up": ("ffn_up.weight",),
    "mlp.up_bias": ("ffn_up.bias",),
    "mlp.down": ("ffn_down.weight",),
    "mlp.down_bias": ("ffn_down.bias",),
    "per_layer.gate": ("inp_gate.weight",),
    "per_layer.out": ("proj.weight",),
    "per_layer.norm": ("post_norm.weight",),
    "mlp.router": ("ffn_gate_inp.weight",),
    "mlp.router_bias": ("ffn_gate_inp.bias",),
    "mlp.choice_bias": ("exp_probs_b.bias",),
    "mlp.experts.gate_up_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_bias": ("ffn_down_exps.bias",),
    "mlp.shared.up": ("ffn_up_shexp.weight",),
    "mlp.shared.gate_up": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "mlp.shared.down": ("ffn_down_shexp.weight",),
    "mlp.shared.gate": ("ffn_gate_inp_shexp.weight",),
}
_EXPERT = {
    "gate_up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "up": ("ffn_up_exps.weight",),
    "down": ("ffn_down_exps.weight",),
}
# Divisors of a rotation's frequencies: for all contexts, or for long and short ones.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# As llama.cpp's converter has it.
_NO_TURN = 1e30
# They decide more than they cost: llama.cpp keeps them in float32 too.
_EXACT = ("mlp.router", "mlp.shared.gate", "mixer.conv", "mixer.norm", "streams.predict", "streams.correct")


@dataclass(frozen=True)
class TensorRows:
    """Rows `start` to `stop` - 1 of one of our tensors."""

    plan: str
    start: int
    stop: int


@dataclass(frozen=True)
class PlannedGgufTensor:
    """A tensor of the file: parts of ours that follow one another."""

    name: str
    shape: tuple[int, ...]  # as in numpy; experts of a layer are stacked along the first of three axes
    parts: tuple[TensorRows, ...]
    exact: bool = False  # it is float32 whatever the type of the file
    # Of the values of some rows, by multiples of `rows`; None where they stay.
    change: Callable[[Floats], Floats] | None = None
    rows: int = 1
    packed: bool = False  # the checkpoint's MXFP4 blocks are copied whatever the type of the file


def gguf_tensor_names(name: str, own: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> tuple[str, ...]:
    """llama.cpp's names of the tensors that hold one of ours, in the order of its rows; a layer's experts share
    them."""
    if name in _MODEL:
        return own.get(name, (_MODEL[name],))
    layer, _, part = name.removeprefix("layers.").partition(".")
    expert = find_expert(name)
    if expert is None:
        names = own.get(part, _LAYER.get(part, (part,)))
    else:
        names = own.get(f"experts.{expert.part}", _EXPERT[expert.part])
    return tuple(f"blk.{layer}.{n}" for n in names)


def gguf_tensors(spec: DecoderSpec, plans: Iterable[TensorPlan], arch: GgufArchitecture) -> Iterator[PlannedGgufTensor]:
    """The tensors of the file in their order."""
    stacked: dict[str, list[TensorRows]] = {}
    for plan in plans:
        expert = find_expert(plan.name)
        names = gguf_tensor_names(plan.name, arch.tensors)
        if expert is None:
            if names:
                yield from _tensors(spec, plan, arch, names)
            continue
        for name, part in zip(names, _split(plan, _even(plan, len(names))), strict=True):
            stacked.setdefault(name, []).append(part)
        last = spec.experts_of(expert.layer)
        if last is not None and expert.expert == last.experts - 1 and expert.part == "down":
            for name, found in stacked.items():
                width = last.expert_size if "ffn_down" in name else spec.hidden_size
                stack = (len(found), found[0].stop - found[0].start, width)
                yield PlannedGgufTensor(name, stack, tuple(found), packed=plan.kept(MXFP4_BITS) == MXFP4_SCHEME)
            stacked.clear()
    if spec.tied and arch.own_head:
        shape = (spec.vocab_size, spec.hidden_size)
        yield PlannedGgufTensor(_MODEL["head"], shape, (TensorRows("embed", 0, spec.vocab_size),))


def _tensors(
    spec: DecoderSpec, plan: TensorPlan, arch: GgufArchitecture, names: tuple[str, ...]
) -> Iterator[PlannedGgufTensor]:
    """The tensors that hold one of ours, which belongs to no expert."""
    part = plan.name.removeprefix("layers.").partition(".")[2]
    if spec.moe is not None and part.endswith("experts.gate_up_bias"):
        yield from _expert_biases(plan, names, spec.moe.experts)
        return
    if spec.moe is not None and part.endswith("experts.down_bias"):
        rows = TensorRows(plan.name, 0, plan.shape[0])
        yield PlannedGgufTensor(names[0], (spec.moe.experts, spec.hidden_size), (rows,), exact=True)
        return
    sizes = _even(plan, len(names))
    if part in ("attn.qkv", "attn.qkv_bias") and len(names) == 3:
        heads = spec.heads(int(plan.name.split(".")[1]))
        own = [heads.kv_size] * (1 if heads.keys_are_values else 2)
        sizes = [heads.q_size, *(own if heads.owns else ())]
        names = names[: len(sizes)]
    for name, rows in zip(names, _split(plan, sizes), strict=True):
        if part in arch.forms:
            form = arch.forms[part](spec, plan.shape)
            exact = len(form.shape) == 1 or not name.endswith("weight") or plan.name.endswith(_EXACT)
            parts = tuple(TensorRows(plan.name, *each) for each in form.parts) or (rows,)
            yield PlannedGgufTensor(name, form.shape, parts, exact, form.change, form.rows)
        else:
            yield _tensor(spec, plan, arch, name, rows)


def _expert_biases(plan: TensorPlan, names: tuple[str, ...], experts: int) -> Iterator[PlannedGgufTensor]:
    """Gate and up of all experts, which alternate in our tensor."""
    size = plan.shape[0] // experts // len(names)
    for index, name in enumerate(names):
        starts = (size * (len(names) * expert + index) for expert in range(experts))
        parts = tuple(TensorRows(plan.name, start, start + size) for start in starts)
        yield PlannedGgufTensor(name, (experts, size), parts, exact=True)


def _even(plan: TensorPlan, count: int) -> list[int]:
    return [plan.shape[0] // count] * count


def _split(plan: TensorPlan, sizes: Iterable[int]) -> Iterator[TensorRows]:
    """Our rows of each of several tensors."""
    start = 0
    for size in sizes:
        yield TensorRows(plan.name, start, start + size)
        start += size


def _tensor(
    spec: DecoderSpec, plan: TensorPlan, arch: GgufArchitecture, name: str, part: TensorRows
) -> PlannedGgufTensor:
    # Where the checkpoint turns neighbours too, they are in order.
    turned = arch.neighbours and not spec.rope.interleaved and any(f".{n}." in name for n in ("attn_q", "attn_k"))
    # The gate of a shared expert is a vector there.
    shape = (plan.shape[1],) if plan.name.endswith(".shared.gate") else (part.stop - part.start, *plan.shape[1:])
    exact = len(shape) == 1 or plan.name.endswith(_EXACT)
    if not turned:
        return PlannedGgufTensor(name, shape, (part,), exact)
    change = partial(interleaved, head_dim=spec.head_dim, turned=spec.rope.dim)
    return PlannedGgufTensor(name, shape, (part,), exact, change, spec.head_dim)


def interleaved(rows: Floats, head_dim: int, turned: int) -> Floats:  # (heads x head_dim, ...)
    """The rows in llama.cpp's order: it rotates neighbours of a head, where Hugging Face rotates halves."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    first = heads[:, :turned].reshape(len(heads), 2, turned // 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.concatenate([first.reshape(heads[:, :turned].shape), heads[:, turned:]], axis=1).reshape(rows.shape)


def rope_tensors(rope: RopeSpec) -> dict[str, Floats]:
    """Divisors of a rotary embedding's frequencies, (dim / 2,) each; linear scaling is a key."""
    if rope.type == "llama3":
        plain = inverse_frequencies(RopeSpec("default", rope.theta, rope.dim), 0)
        return {ROPE_TENSORS[0]: plain / inverse_frequencies(rope, 0)}
    if rope.type == "proportional":
        # What is not turned has no frequency to speak of.
        still = rope.dim // 2 - rope.turned
        return {ROPE_TENSORS[0]: np.array([1.0] * rope.turned + [_NO_TURN] * still, np.float32)}
    if rope.type == "longrope":
        lists = (rope.long_factors, rope.short_factors)
        return {name: np.asarray(each, np.float32) for name, each in zip(ROPE_TENSORS[1:], lists, strict=True)}
    return {}


MXFP4_BITS = 4
MXFP4_SCHEME = QuantScheme(MXFP4_BITS, 32, symmetric=True, e2m1=True)
# Of an exponent that a byte holds, E8M0.
_BIAS = 127


def mxfp4_blocks(rows: QuantizedMatrix) -> NDArray[np.uint8]:  # (N, blocks * 17)
    """Rows of ggml's `block_mxfp4` (ggml-common.h): the scale's exponent, then values 0 to 15 in lower halves of bytes
    and 16 to 31 in upper ones, where checkpoints have neighbours in a byte."""
    codes = np.stack([rows.data & 15, rows.data >> 4], axis=-1)  # (N, blocks, 16, 2)
    codes = codes.reshape(*codes.shape[:2], 2, 16)
    halves = codes[:, :, 0] | codes[:, :, 1] << 4
    # Ours are half of the checkpoint's scales, and frexp's mantissa is one half.
    exponents = (np.frexp(rows.scales)[1] + _BIAS).astype(np.uint8)  # (N, blocks)
    return np.concatenate([exponents[:, :, None], halves], axis=2).reshape(len(exponents), -1)
