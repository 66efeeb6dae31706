"""The tensors of a GGUF file by llama.cpp's names, and the rows of ours that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.arithmetic import inverse_frequencies
from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.spec import RopeSpec
from edgeinfer.export.architectures import TensorPlan
from edgeinfer.export.gguf.architectures import GgufArchitecture

__all__ = ["PlannedGgufTensor", "TensorRows", "gguf_tensor_names", "gguf_tensors", "interleaved", "rope_tensors"]

Floats = NDArray[np.float32]

_MODEL = {
    "embed": "token_embd.weight",
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
    "mlp.router": ("ffn_gate_inp.weight",),
    "mlp.shared.gate_up": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "mlp.shared.down": ("ffn_down_shexp.weight",),
    "mlp.shared.gate": ("ffn_gate_inp_shexp.weight",),
}
_EXPERT = {"gate_up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "down": ("ffn_down_exps.weight",)}
# They decide more than they cost: llama.cpp keeps them in float32 too.
_EXACT = ("mlp.router", "mlp.shared.gate")


@dataclass(frozen=True)
class TensorRows:
    """Rows `start` to `stop` - 1 of one of our tensors."""

    plan: str
    start: int
    stop: int


@dataclass(frozen=True)
class PlannedGgufTensor:
    """A tensor of the file: parts of ours that follow one another.

    Attributes:
        shape: as numpy gives it; experts of a layer are stacked along the first of three axes.
        turned: width of the heads whose rows take llama.cpp's order; 0 where they stay.
        exact: it stays in float32 whatever the type of the file.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorRows, ...]
    turned: int = 0
    exact: bool = False


def gguf_tensor_names(name: str, own: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> tuple[str, ...]:
    """llama.cpp's names of the tensors that one of ours becomes, in the order of its rows.

    All experts of a layer share theirs.

    Args:
        name: as the manifest's table has it (edgeinfer.bundle.manifest).
        own: names that the architecture has of its own (GgufArchitecture.tensors).
    """
    if name in _MODEL:
        return (_MODEL[name],)
    layer, _, part = name.removeprefix("layers.").partition(".")
    expert = find_expert(name)
    names = (own.get(part) or _LAYER[part]) if expert is None else _EXPERT[expert.part]
    return tuple(f"blk.{layer}.{n}" for n in names)


def gguf_tensors(spec: DecoderSpec, plans: Iterable[TensorPlan], arch: GgufArchitecture) -> Iterator[PlannedGgufTensor]:
    """The tensors of the file in the order they are written."""
    stacked: dict[str, list[TensorRows]] = {}
    for plan in plans:
        expert = find_expert(plan.name)
        names = gguf_tensor_names(plan.name, arch.tensors)
        parts = list(_split(spec, plan, len(names)))
        if expert is None:
            yield from (_tensor(spec, plan, arch, name, part) for name, part in zip(names, parts, strict=True))
            continue
        for name, part in zip(names, parts, strict=True):
            stacked.setdefault(name, []).append(part)
        last = spec.experts_of(expert.layer)
        if last is not None and expert.expert == last.experts - 1 and expert.part == "down":
            for name, found in stacked.items():
                width = last.expert_size if "ffn_down" in name else spec.hidden_size
                yield PlannedGgufTensor(name, (len(found), found[0].stop - found[0].start, width), tuple(found))
            stacked.clear()
    if spec.tied and arch.own_head:
        shape = (spec.vocab_size, spec.hidden_size)
        yield PlannedGgufTensor(_MODEL["head"], shape, (TensorRows("embed", 0, spec.vocab_size),))


def _split(spec: DecoderSpec, plan: TensorPlan, count: int) -> Iterator[TensorRows]:
    """The rows that each of the tensors takes that one of ours becomes."""
    rows = [plan.shape[0] // count] * count
    if count == 3:
        rows = [spec.q_size, spec.kv_size, spec.kv_size]
    start = 0
    for size in rows:
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
    return PlannedGgufTensor(name, shape, (part,), spec.head_dim if turned else 0, exact)


def interleaved(rows: Floats, head_dim: int) -> Floats:  # (heads x head_dim, ...)
    """The rows in llama.cpp's order: it turns neighbours of a head, where Hugging Face turns halves."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def rope_tensors(rope: RopeSpec) -> dict[str, Floats]:
    """What llama.cpp divides the frequencies of a rotary embedding by, (dim / 2,) each; linear scaling is a key."""
    if rope.type == "llama3":
        plain = inverse_frequencies(RopeSpec("default", rope.theta, rope.dim), 0)
        return {"rope_freqs.weight": plain / inverse_frequencies(rope, 0)}
    if rope.type == "longrope":
        return {
            "rope_factors_long.weight": np.asarray(rope.long_factors, np.float32),
            "rope_factors_short.weight": np.asarray(rope.short_factors, np.float32),
        }
    return {}
