"""The decoder that a checkpoint and its config.json describe, with every tensor used and heads wide enough to run.

The kernel wants heads of a multiple of eight. Rows of zeros after each query, key and value head, and matching columns
of the output projection, add nothing to any product; only the kernel's scale, one over the root of the width, changes,
and the queries are multiplied by the inverse of that. The result is an ordinary decoder whose heads are wider and
partly rotated.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.layouts import PORTABLE, Layout
from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec, uncommon_fields
from edgeinfer.core.errors import BundleError, CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.tensors import HeadPadding, Source, TensorPlan
from edgeinfer.export.source.checkpoint import FLOATS, Checkpoint
from edgeinfer.export.source.hf_config import CONFIG_HINT, OPTIMUM_HINT, HFConfig
from edgeinfer.export.source.packed import PACKINGS, require_fp8_blocks

# What the kernel's heads are a multiple of.
_MULTIPLE = 8


@dataclass(frozen=True)
class Described:
    """A checkpoint as a decoder, with the plans of its tensors."""

    spec: DecoderSpec
    plans: tuple[TensorPlan, ...]

    @property
    def parameters(self) -> int:
        return sum(plan.parameters for plan in self.plans)


def describe(spec: DecoderSpec, hf_config: HFConfig, family: Architecture, checkpoint: Checkpoint) -> Described:
    """Plans the tensors of a decoder that `read_spec` read; exactly these must be there."""
    plans = family.tensors(hf_config, spec, checkpoint.names)
    _check_tensors(checkpoint, family.unread(spec.num_layers), plans)
    return Described(spec, plans)


def read_spec(hf_config: HFConfig, family: Architecture, checkpoint: Checkpoint) -> DecoderSpec:
    """Reads the decoder of config.json, which is tied where it has no head or one equal to the embedding."""
    layers, count = hf_config.integer("num_hidden_layers"), len(checkpoint.names)
    if layers > count:
        # Before anything is made for each of what may be any number of layers.
        message = f"config.json: num_hidden_layers={layers}, but the checkpoint has only {count} tensors."
        raise CheckpointError(message, "Check that config.json belongs to these weights.")
    require_fp8_blocks(hf_config)
    head, silent = family.naming.head, hf_config.get("tie_word_embeddings") is None
    # As transformers reads it: a head with other values than the embedding is used, whatever config.json says.
    apart = head in checkpoint and (silent or not checkpoint.same(head, family.naming.embed))
    tied = not apart and (silent or hf_config.flag("tie_word_embeddings"))
    try:
        spec = family.read(hf_config, tied)
    except BundleError as error:
        # The description's own checks speak of bundles; here the checkpoint is at fault.
        raise CheckpointError(f"config.json: {error.message}", CONFIG_HINT) from error
    return spec


def require_graphs(spec: DecoderSpec, layout: Layout) -> None:
    """Refuses a decoder with a part that a bundle's graphs lack."""
    if spec.native_only and layout == PORTABLE:
        parts = {
            "recurrent layers": bool(spec.mixers),
            "latent attention": spec.latent is not None,
            "layers that share keys and values": bool(spec.kv_sources),
            "hidden states in streams": spec.streams is not None,
            f"experts of the activation {spec.activation}": True,
        }
        part = next(name for name, there in parts.items() if there)
        message = f"Portable bundles of a decoder with {part} are not supported."
        raise UnsupportedArchitectureError(message, "Leave --portable out: the native kernel computes them.")
    # Of those without a gate ONNX Runtime's operators have silu alone.
    squared = ("relu2",) if spec.mixers else ()
    known = ("silu", "swiglu_oai", "gelu_tanh") if spec.moe is None or spec.moe.gated else ("silu", *squared)
    if spec.moe is not None and spec.activation not in known:
        message = f"Experts with the activation {spec.activation} are not supported yet."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)


def require_plain(spec: DecoderSpec, what: str, hint: str, known: Collection[str] = ()) -> None:
    """Refuses a decoder with parts that Llama, Qwen and their mixtures lack, except the fields `known`; `what` begins
    the message."""
    _refuse(spec, lambda name: name not in known, hint, what)
    odd = [f"activation={spec.activation}"] if spec.activation != "silu" and "activation" not in known else []
    later = ("sigmoid", "sparsemixer")
    if spec.moe is not None and spec.moe.router in later and "router" not in known:
        odd.append(f"router={spec.moe.router}")
    if odd:
        raise UnsupportedArchitectureError(f"{what} of a decoder with {odd[0]} are not supported yet.", hint)


def _refuse(spec: DecoderSpec, refused: Callable[[str], bool], hint: str, what: str = "Bundles") -> None:
    parts: list[DecoderSpec | RopeSpec | MoESpec] = [spec, *spec.ropes, *([spec.moe] if spec.moe else [])]
    for part in parts:
        given = [name for name in uncommon_fields(part) if refused(name)]
        if given:
            message = f"{what} of a decoder with {given[0]}={getattr(part, given[0])!r} are not supported yet."
            raise UnsupportedArchitectureError(message, hint)


def _check_tensors(checkpoint: Checkpoint, ignorable: tuple[str, ...], plans: tuple[TensorPlan, ...]) -> None:
    """Refuses missing and unused tensors: a dropped weight would silently make a wrong model."""
    used = set()
    for plan in plans:
        for source in plan.sources:
            for name, shape, types in stored_tensors(source):
                checkpoint.require(name, shape, types)
                used.add(name)
    unused = sorted(
        name for name in checkpoint.names - used if not any(fnmatch.fnmatchcase(name, p) for p in ignorable)
    )
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        message = f"{checkpoint.folder} has tensors that the architecture does not use: {shown}."
        raise CheckpointError(message, "Check that config.json names the right architecture and biases.")


def stored_tensors(source: Source) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Names, shapes and types of the checkpoint's tensors that a source reads."""
    if not source.packing:
        yield source.name, source.stored_shape, FLOATS
    else:
        yield from PACKINGS[source.packing].tensors(source.name, source.stored_shape)


def pad_heads(described: Described) -> Described:
    """Pads heads, and the tensors with rows or columns of heads, to a width that the kernel supports."""
    spec, plans = described.spec, described.plans
    wide = -(-spec.head_dim // _MULTIPLE) * _MULTIPLE
    full = spec.full_heads is None or spec.full_heads.head_dim % _MULTIPLE == 0
    if (wide == spec.head_dim and full) or spec.latent is not None:
        return described
    packed = any(p.name.endswith("attn.qkv") and len(p.sources) == 1 for p in plans)
    # Zeros would count in a norm over what heads give, or lack rows in a gate of it.
    counted = spec.value_norm or spec.inner_norms or spec.output_gate == "channel"
    if spec.qk_norm or packed or counted or spec.full_heads is not None:
        message = (
            f"A head size of {spec.head_dim} is not supported for this model: it is not a multiple of {_MULTIPLE}."
        )
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    padded = tuple(_pad_plan(plan, spec, wide) for plan in plans)
    return Described(dataclasses.replace(spec, head_dim=wide), padded)


def _pad_plan(plan: TensorPlan, spec: DecoderSpec, wide: int) -> TensorPlan:
    if plan.name.endswith(("attn.qkv", "attn.qkv_bias")):
        # A scale of the decoder's own does not change with the width.
        scale = 1.0 if spec.attention_scale else math.sqrt(wide / spec.head_dim)
        query = HeadPadding(0, spec.num_heads, spec.head_dim, wide, scale)
        others = HeadPadding(0, spec.num_kv_heads, spec.head_dim, wide)
        paddings = [query, others, others]
    elif plan.name.endswith("attn.out"):
        paddings = [HeadPadding(1, spec.num_heads, spec.head_dim, wide)]
    else:
        return plan
    sources = (dataclasses.replace(s, padding=p) for s, p in zip(plan.sources, paddings, strict=True))
    return TensorPlan(plan.name, tuple(sources))


def pad_values(values: NDArray[np.float32], padding: HeadPadding) -> NDArray[np.float32]:
    before, after = values.shape[: padding.axis], values.shape[padding.axis + 1 :]
    wide = np.zeros((*before, padding.heads, padding.wide, *after), np.float32)
    narrow = values.reshape(*before, padding.heads, padding.width, *after)
    inner = (slice(None),) * (padding.axis + 1) + (slice(padding.width),)
    np.multiply(narrow, np.float32(padding.scale), out=wide[inner])
    return wide.reshape(*before, padding.heads * padding.wide, *after)
