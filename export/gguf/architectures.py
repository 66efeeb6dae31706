"""What an architecture of llama.cpp can express of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.plans import Shape, TensorPlan
from edgeinfer.export.gguf.mixtures import GgufMixture
from edgeinfer.export.source.hf_config import HFConfig

Floats = NDArray[np.float32]
# Reads one of the file's tensors by our name.
Tensor = Callable[[str], Floats]

ONNX_HINT = "Export it to ONNX instead: leave out --format gguf."
# llama.cpp's own limit, at which it ends the process.
_MOST_LAYERS = 512


@dataclass(frozen=True)
class GgufForm:
    """How a tensor lies in a file.

    Attributes:
        shape: as numpy gives it.
        change: of the values of some rows, as ours lie.
        rows: what it is given at a time is a multiple of so many.
        parts: the rows of ours that follow one another, from and to; empty for all in their order.
    """

    shape: Shape
    change: Callable[[Floats], Floats] | None = None
    rows: int = 1
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp.

    Attributes:
        name: `general.architecture`.
        neighbours: its rotary embedding turns neighbours of a head, where most of Hugging Face's turn halves.
        ropes: types of scaled rotary embedding that its graph has.
        partial_rope: some dimensions of a head may pass through.
        free_heads: all heads together may be wider or narrower than the hidden state.
        grouped: queries may share keys.
        qkv_bias, output_bias, mlp_bias: it has such tensors.
        own_head: it has no tied head, so that the embedding is stored twice.
        tensors: llama.cpp's names of a layer's tensors, by ours, where they are its own.
        activation: of its MLP.
        parts: later fields of a DecoderSpec (edgeinfer.bundle.spec) that its graph has.
        needs: fields of a DecoderSpec without which its graph has no meaning.
        full_every: every so many layers one sees everything and the others have a window, where no key says which; 0
            where it has no windows, -1 where a key always says.
        always_slides: its graph has windows in any case.
        unrotated_every: every so many layers one does not rotate; 0 where all do.
        scale: of scores in its graph; 0 is by the width of heads.
        norm_offset: weights of norms that checkpoints store without, and llama.cpp with.
        compressed: of latent attention its cache holds the small vector.
        attention: some of its layers attend.
        mixed_heads: layers that do not attend have no heads of keys; where False, it says otherwise which those are.
        widths: of the layers' MLPs, where they differ.
        instead: another architecture that some decoders of the family are written as.
        mixture: of its experts.
        multipliers: fields of config.json, the keys of the metadata they become, and what they are where none is given.
        refined: what a family does to its weights (Architecture.refine) is done, instead of by multipliers.
        rewrite: a tensor of ours as those that a file is made of; their names are ours, or llama.cpp's in a layer.
        forms: of tensors whose forms are not ours, by our names in a layer.
        keys: adds further keys, also of what tensors hold.
        lacks: what else its graph lacks of a decoder, in words.
    """

    name: str
    neighbours: bool = False
    ropes: tuple[str, ...] = ("default", "linear")
    partial_rope: bool = False
    free_heads: bool = False
    grouped: bool = True
    qkv_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    own_head: bool = False
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activation: str = "silu"
    parts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    full_every: int = 0
    always_slides: bool = True
    unrotated_every: int = 0
    scale: float = 0.0
    norm_offset: float = 0.0
    compressed: bool = False
    attention: bool = True
    mixed_heads: bool = False
    widths: Callable[[DecoderSpec], list[int]] | None = None
    instead: Callable[[DecoderSpec], GgufArchitecture | None] | None = None
    mixture: GgufMixture | None = None
    multipliers: tuple[tuple[str, str, float], ...] = ()
    refined: bool = False
    rewrite: Callable[[HFConfig, DecoderSpec, TensorPlan], Iterator[TensorPlan]] | None = None
    forms: Mapping[str, Callable[[DecoderSpec, Shape], GgufForm]] = field(default_factory=dict)
    keys: Callable[[Any, HFConfig, DecoderSpec, Tensor], None] | None = None
    lacks: Callable[[HFConfig, DecoderSpec], Iterator[str]] | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """Later fields of a decoder's description that may have other values than their defaults."""
        borders = ("beta_fast", "beta_slow") if "yarn" in self.ropes else ()
        return ("activation", *borders, *self.parts, *(self.mixture.known if self.mixture else ()))

    def check(self, config: HFConfig, spec: DecoderSpec) -> None:
        """Refuses what would give another model, or end the process, in llama.cpp."""
        mixed = self.mixture.missing(spec) if self.mixture else ()
        further = self.lacks(config, spec) if self.lacks else ()
        for what in (*self._missing(spec), *self._missing_by_layer(spec), *mixed, *further):
            raise UnsupportedArchitectureError(f"llama.cpp's {self.name} has no {what}.", ONNX_HINT)

    def planned(self, config: HFConfig, spec: DecoderSpec, plans: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        """A checkpoint's tensors with the values that llama.cpp wants."""
        if self.rewrite is not None:
            return tuple(written for plan in plans for written in self.rewrite(config, spec, plan))
        offset = self.norm_offset
        return tuple(plan.changed(offset=offset) if offset and plan.name.endswith("norm") else plan for plan in plans)

    def _missing(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.activation != self.activation:
            yield f"activation {spec.activation}"
        if spec.rope.type not in self.ropes:
            yield f"rotary embedding of type {spec.rope.type}"
        if spec.rope.dim != spec.head_dim and not self.partial_rope:
            yield "rotary embedding of a part of each head"
        if spec.q_size != spec.hidden_size and not self.free_heads:
            yield f"heads that are {spec.q_size} wide together beside a hidden state of {spec.hidden_size}"
        if spec.num_kv_heads != spec.num_heads and not self.grouped:
            yield "queries that share keys"
        if spec.qkv_bias and not self.qkv_bias:
            yield "biases of queries, keys and values"
        if spec.output_bias and not self.output_bias:
            yield "bias of the attention's output"
        if spec.mlp_bias and not self.mlp_bias:
            yield "biases in its MLP"
        free = self.multipliers or self.refined or spec.rope.type == "yarn"
        fixed = self.scale or spec.head_dim**-0.5
        if spec.attention_scale and not free and not math.isclose(spec.attention_scale, fixed):
            yield f"scale of scores of {spec.attention_scale:.6g}"
        for name in self.needs:
            if not getattr(spec, name):
                yield f"form without {name}"
        if self.attention and not any(map(spec.attends, range(spec.num_layers))):
            yield "form without attention"
        if spec.num_layers > _MOST_LAYERS:
            yield f"room for {spec.num_layers} layers"

    def _missing_by_layer(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.windows and self.full_every and spec.more_ropes:
            turned = tuple(int(window > 0) for window in spec.windows)
            if spec.rope_layers != turned:
                yield "rotations that do not follow its windows"
        if self.unrotated_every:
            still = tuple(-1 if each else 0 for each in every(self.unrotated_every, spec.num_layers))
            if (spec.rope_layers or (0,) * spec.num_layers) != still:
                yield "rotation of these layers"
        for rope in spec.more_ropes:
            if rope.type != "default":
                yield f"second rotary embedding of type {rope.type}"


def every(count: int, layers: int) -> Iterator[bool]:
    """Whether each layer is the last of so many."""
    return (count > 0 and (layer + 1) % count == 0 for layer in range(layers))
