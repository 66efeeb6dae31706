"""The attention of a layer in a graph: over pages of a pool in the native graph, over one buffer in the portable one.

`edgeinfer.Attention`, version 1, takes queries, keys and values side by side, normalises and rotates them, writes keys
and values into the pool, and attends. Its inputs, besides those of the graph that edgeinfer.bundle.graph describes:
  0 qkv float32 (1, S, heads h + kv_heads h + kv_heads v) · 1 kv_pool · 2 kv_layout · 3 kv_pages · 4 rows · 5 path_slots
  6 position_ids · 7 cos_cache · 8 sin_cache (both or none) · 9 q_norm · 10 k_norm float32 (both or none): (h,) for a
  root-mean-square norm of each head, as wide as all heads for one of all together. With the attribute `latent`, whose
  values are part of the keys, 0 is (1, S, heads v + heads h + v + h): the parts of queries that meet values, those that
  meet keys, value and key; and k_norm alone, (v,), is of the values
  11 sinks float32 (heads,) (optional) · 12 layer_mask (optional): where it is false at the attribute `part`, nothing is
  written and the output is zeros · 13 qkv_bias float32 (as wide as 0) that keys of few bits are stored without where
  they hardly turn, from the rotated pair `still` on (edgeinfer.nn.key_centres; optional)

`edgeinfer.ShortConv`, version 1, attributes channels (D), width, layer, part: C * conv(B * x) over a row's path. B * x
of every row lies in the pool as a value of one head without keys, in float32 whatever `kv_layout` says.
  0 B, C and x side by side float32 (1, S, 3 D) · 1 to 5 as above · 6 weights float32 (D, 1, width), the latest token's
  last · 7 bias float32 (D,) (optional) · 8 layer_mask (optional)

`edgeinfer.GatedDelta`, version 1, attributes heads (of values), key_heads, key_size, value_size, channels, width,
layer, part, norm_epsilon: the gated delta rule over a row's path, its convolution before, its gated norm behind it.
  0 queries, keys, values and gate side by side float32 (1, S, channels + heads value_size) · 1 rows · 2 path_slots
  3 state_pool · 4 state_layout · 5 state_rows · 6 layer_mask (optional) · 7 weights float32 (channels, 1, width) · 8 no
  bias · 9 b and a side by side float32 (1, S, 2 heads) · 10 dt_bias · 11 a_log float32 (heads,) · 12 norm (value_size,)

`edgeinfer.Mamba2`, version 1, attributes heads, key_heads (groups), key_size (of B and C), value_size (of x), channels,
width, layer, part, norm_epsilon, norm_first, least_step, most_step: the recurrence of edgeinfer.bundle.parts.
  0 z, x, B, C and time steps side by side float32 (1, S, heads value_size + channels + heads) · 1 to 7 as above · 8
  bias (channels,) (optional) · 9 dt_bias · 10 a_log · 11 d float32 (heads,) · 12 norm (heads value_size,) (optional)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.parts import LatentSpec, LayerHeads, Mixer, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder
from edgeinfer.export.graph.operators import Operators
from edgeinfer.nn.key_centres import still_pair

_PAGES = (io.KV_POOL, io.KV_LAYOUT, io.KV_PAGES, io.ROWS, io.PATH_SLOTS)
_STATES = (io.ROWS, io.PATH_SLOTS, io.STATE_POOL, io.STATE_LAYOUT, io.STATE_ROWS)


@dataclass(frozen=True)
class Carried:
    """A result of an attention block besides the hidden states."""

    name: str
    inside: str  # its name where the block runs
    source: str  # its value where the block is masked
    dtype: str
    shape: tuple[int | str, ...]


class Attention(ABC):
    """Adds the attention of a decoder to its graph; `operators` make the weighted parts."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], operators: Operators) -> None:
        self._spec, self._tensors, self._ops = spec, tensors, operators

    @abstractmethod
    def declare_inputs(self, graph: GraphBuilder) -> None:
        """Declares the graph inputs that only attention reads."""

    @abstractmethod
    def attend(self, graph: GraphBuilder, layer: int, qkv: str, rows: str = io.ROWS) -> str:
        """Adds the nodes from a layer's queries, keys and values to its heads' results; `rows` names their paths."""

    def attend_latent(self, graph: GraphBuilder, layer: int, latent: LatentSpec, value: str, part: int | None) -> str:
        """Adds the nodes of latent attention from normed hidden states to its heads' results."""
        raise NotImplementedError("What latent attention keeps lies in pages.")

    def convolve(self, graph: GraphBuilder, layer: int, read: str) -> str:
        """Adds the nodes of a short convolution, between the layer's first and last product."""
        raise NotImplementedError("What convolutions keep lies in pages.")

    def recur(self, graph: GraphBuilder, layer: int, read: str, *further: str) -> str:
        """Adds the nodes of a recurrence with a state, between the layer's first and last products."""
        raise NotImplementedError("States lie in slots.")

    def carried(self, layer: int) -> tuple[Carried, ...]:
        """Results of a layer's block besides the hidden states; outputs of the graph."""
        return ()

    def _tables(self, layer: int) -> list[str]:
        """Inputs with the tables of a layer's rotation; empty names where it does not rotate."""
        index = self._spec.rope_index(layer)
        return ["", ""] if index < 0 else list(io.rotary_names(index))

    def _whole(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """Queries, keys and values; where values are the keys, the product gave them once."""
        heads, prefix = self._spec.heads(layer), f"layers.{layer}.attn"
        if not (heads.owns and heads.keys_are_values):
            return qkv
        keys = f"{prefix}.keys"
        graph.ops("Split", [qkv, graph.constant(list(heads.products))], [f"{prefix}.queries_alone", keys], axis=-1)
        return graph.op("Concat", [qkv, keys], f"{prefix}.qkv.whole", axis=-1)

    def _factored(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """Queries, keys and values, the queries times factors of their positions where the rotation has some."""
        rope, prefix, heads = self._spec.rope_of(layer), f"layers.{layer}.attn", self._spec.heads(layer)
        if rope is None or not rope.query_beta:
            return qkv
        factors = graph.op("Gather", [io.QUERY_FACTORS, io.POSITION_IDS], f"{prefix}.factors", axis=0)  # (1, S, 1)
        queries, rest = f"{prefix}.queries", f"{prefix}.keys_and_values"
        graph.ops("Split", [qkv, graph.constant([heads.q_size, sum(heads.products[1:])])], [queries, rest], axis=-1)
        scaled = graph.op("Mul", [queries, factors], f"{prefix}.scaled_queries")
        return graph.op("Concat", [scaled, rest], f"{prefix}.qkv.factored", axis=-1)


@dataclass(frozen=True)
class PagedLayer:
    """The attributes of `edgeinfer.Attention`, by their names."""

    num_heads: int
    kv_num_heads: int
    key_size: int
    value_size: int
    layer: int  # index into the offsets of `kv_layout`
    part: int  # place in the layer mask
    rotary_dim: int  # rotated channels of a head; the rest pass through. 0: none.
    norm_epsilon: float
    window: int = 0  # positions of a path that a row sees, itself included; 0: all
    interleaved: int = 0  # neighbouring channels are rotated as pairs, instead of one of each half
    scale: float = 0.0  # of the scores; 0: one over the square root of the key size
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0: no cap
    norm_after: int = 0  # queries and keys are normed after the rotation
    value_norm: int = 0  # values are normed without a weight
    shared: int = 0  # keys and values of `layer` were written by an earlier node, and only queries enter

    @classmethod
    def of(cls, spec: DecoderSpec, layer: int) -> PagedLayer:
        rope, heads, latent = spec.rope_of(layer), spec.heads(layer), spec.latent
        return cls(
            num_heads=heads.heads,
            kv_num_heads=heads.kv_heads,
            key_size=heads.size if latent is None else latent.rotary_size,
            value_size=heads.size if latent is None else latent.rank,
            layer=heads.source,
            part=2 * layer,
            rotary_dim=0 if rope is None else rope.dim,
            norm_epsilon=spec.norm_eps if latent is None else latent.norm_eps,
            window=spec.window(layer),
            interleaved=int(rope is not None and rope.interleaved),
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            norm_after=int(spec.norm_after_rope),
            value_norm=int(spec.value_norm),
            shared=int(not heads.owns),
        )


# Each mixer with a state: its operator, the vectors that it reads, and attributes besides the sizes of the state.
_RECURRENCES: dict[Mixer, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "delta": ("GatedDelta", ("dt_bias", "a_log", "norm"), ()),
    "mamba2": ("Mamba2", ("dt_bias", "a_log", "d", "norm"), ("norm_first", "least_step", "most_step")),
}


class _PagedAttention(Attention):
    """Our operator, which norms, rotates, writes and attends, and the operators of recurrent layers."""

    def declare_inputs(self, graph: GraphBuilder) -> None:
        graph.input(io.KV_POOL, "uint8", ("B",))
        graph.input(io.KV_LAYOUT, "int64", (3 + self._spec.num_layers,))
        graph.input(io.KV_PAGES, "int32", ("N", "G"))
        graph.input(io.ROWS, "int32", ("S", 4))
        graph.input(io.PATH_SLOTS, "int32", ("X",))
        if self._spec.geometry.states:
            graph.input(io.STATE_POOL, "uint8", ("Bs",))
            graph.input(io.STATE_LAYOUT, "int64", (2 + self._spec.num_layers,))
            graph.input(io.STATE_ROWS, "int64", ("N", 2))

    def attend(self, graph: GraphBuilder, layer: int, qkv: str, rows: str = io.ROWS) -> str:
        prefix, attributes = f"layers.{layer}.attn", PagedLayer.of(self._spec, layer)
        weights = [self._ops.vector(graph, f"{prefix}.{name}") for name in ("q_norm", "k_norm", "sinks")]
        qkv = self._factored(graph, layer, self._centred(graph, layer, self._whole(graph, layer, qkv)))
        pages = [rows if name == io.ROWS else name for name in _PAGES]
        inputs = [qkv, *pages, io.POSITION_IDS, *self._tables(layer), *weights, io.LAYER_MASK]
        further: dict[str, int] = {}
        if (still := still_pair(self._spec, layer)) is not None:
            inputs.append(self._ops.vector(graph, f"{prefix}.qkv_bias"))
            further["still"] = still
        return graph.op(
            "Attention", inputs, f"{prefix}.heads", domain=io.NATIVE_DOMAIN, **asdict(attributes), **further
        )

    def attend_latent(self, graph: GraphBuilder, layer: int, latent: LatentSpec, value: str, part: int | None) -> str:
        prefix, heads, rope = f"layers.{layer}.attn", self._spec.num_heads, self._spec.rope_of(layer)
        queries = self._latent_queries(graph, prefix, latent, value, part)
        if rope is not None and rope.query_beta:
            factors = graph.op("Gather", [io.QUERY_FACTORS, io.POSITION_IDS], f"{prefix}.factors", axis=0)  # (1, S, 1)
            queries = graph.op("Mul", [queries, factors], f"{prefix}.queries.factored")
        by_head = graph.op("Reshape", [queries, graph.constant([0, 0, heads, -1])], f"{prefix}.queries.heads")
        parts, sizes = [f"{prefix}.queries.plain", f"{prefix}.queries.turning"], [latent.plain_size, latent.rotary_size]
        graph.ops("Split", [by_head, graph.constant(sizes)], parts, axis=-1)
        plain, turning = (
            graph.op("Reshape", [each, graph.constant([0, 0, heads * size])], f"{each}.together")
            for each, size in zip(parts, sizes, strict=True)
        )
        meeting = self._ops.heads(graph, plain, f"{prefix}.k_b", f"{prefix}.k_b.result", heads, part)
        given = self._ops.linear(graph, value, f"{prefix}.kv_a", f"{prefix}.kv_a.result", part=part)
        joined = graph.op("Concat", [meeting, turning, given], f"{prefix}.qkv.joined", axis=-1)
        weights = ["", self._ops.vector(graph, f"{prefix}.kv_norm"), self._ops.vector(graph, f"{prefix}.sinks")]
        inputs = [joined, *_PAGES, io.POSITION_IDS, *self._tables(layer), *weights, io.LAYER_MASK]
        attributes = asdict(PagedLayer.of(self._spec, layer))
        mixed = graph.op("Attention", inputs, f"{prefix}.mixed", domain=io.NATIVE_DOMAIN, latent=1, **attributes)
        return self._ops.heads(graph, mixed, f"{prefix}.v_b", f"{prefix}.heads", heads, part)

    def _latent_queries(
        self, graph: GraphBuilder, prefix: str, latent: LatentSpec, value: str, part: int | None
    ) -> str:
        if not latent.query_rank:
            return self._ops.linear(graph, value, f"{prefix}.q", f"{prefix}.q.result", part=part)
        small = self._ops.linear(graph, value, f"{prefix}.q_a", f"{prefix}.q_a.result", part=part)
        # An epsilon of its own, so that no product can take this norm in.
        inputs: list[str] = [small, self._ops.vector(graph, f"{prefix}.q_a_norm")]
        attributes: dict[str, Any] = {"axis": -1, "epsilon": latent.norm_eps, "stash_type": 1}
        normed = graph.op("RMSNormalization", inputs, f"{prefix}.q_a.normed", **attributes)
        return self._ops.linear(graph, normed, f"{prefix}.q_b", f"{prefix}.q_b.result", part=part)

    def convolve(self, graph: GraphBuilder, layer: int, read: str) -> str:
        conv, prefix = self._spec.conv, f"layers.{layer}.mixer"
        assert conv is not None, "a layer with a convolution has its sizes"
        weights = graph.weight(f"{prefix}.conv", self._tensors[f"{prefix}.conv"].data)
        inputs = [read, *_PAGES, weights, self._ops.vector(graph, f"{prefix}.conv_bias"), io.LAYER_MASK]
        attributes = {"channels": self._spec.hidden_size, "width": conv.width, "layer": layer, "part": 2 * layer}
        return graph.op("ShortConv", inputs, f"{prefix}.mixed", domain=io.NATIVE_DOMAIN, **attributes)

    def recur(self, graph: GraphBuilder, layer: int, read: str, *further: str) -> str:
        prefix, state = f"layers.{layer}.mixer", self._spec.state_of(layer)
        name, vectors, attributes = _RECURRENCES[self._spec.parts_of(layer)[-1]]
        weights = graph.weight(f"{prefix}.conv", self._tensors[f"{prefix}.conv"].data)
        bias = self._ops.vector(graph, f"{prefix}.conv_bias")
        own = [*further, *(self._ops.vector(graph, f"{prefix}.{vector}") for vector in vectors)]
        inputs = [read, *_STATES, io.LAYER_MASK, weights, bias, *own]
        sizes = asdict(state) | {"layer": layer, "part": 2 * layer, "norm_epsilon": self._spec.norm_eps}
        given = {each: getattr(self._spec.mamba2, each) for each in attributes}
        return graph.op(name, inputs, f"{prefix}.mixed", domain=io.NATIVE_DOMAIN, **sizes, **given)

    def _centred(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """Queries and keys minus the means of their heads where their norms are layer norms: the rest is an RMS norm. A
        norm of all heads together subtracts the mean of all."""
        spec, prefix, heads = self._spec, f"layers.{layer}.attn", self._spec.heads(layer)
        if not spec.qk_norm or spec.norm != "layer":
            return qkv
        parts = [f"{prefix}.{name}" for name in ("q", "k", "v")]
        graph.ops("Split", [qkv, graph.constant([heads.q_size, heads.kv_size, heads.kv_size])], parts, axis=-1)
        for index, size in enumerate((heads.q_size, heads.kv_size)):
            wide = size if spec.whole_norm else heads.size
            apart = graph.op("Reshape", [parts[index], graph.constant([0, 0, -1, wide])], f"{parts[index]}.heads")
            mean = graph.op("ReduceMean", [apart, graph.constant([-1])], f"{parts[index]}.mean", keepdims=1)
            centred = graph.op("Sub", [apart, mean], f"{parts[index]}.centred_heads")
            parts[index] = graph.op("Reshape", [centred, graph.constant([0, 0, size])], f"{parts[index]}.centred")
        return graph.op("Concat", parts, f"{prefix}.qkv.centred", axis=-1)


class BufferedAttention(Attention):
    """GroupQueryAttention, with nodes before it for what it lacks."""

    def declare_inputs(self, graph: GraphBuilder) -> None:
        graph.input(io.ATTENTION_BIAS, "float32", (1, 1, "S", "T"))
        if self._spec.window_size:
            graph.input(io.WINDOW_BIAS, "float32", (1, 1, "S", "T"))
        graph.input(io.SEQLENS_K, "int32", (1,))
        graph.input(io.TOTAL_LENGTH, "int32", ())
        for layer in range(self._spec.num_layers):
            for name in io.past_names(layer):
                graph.input(name, "float32", self._cache_shape(layer))

    def carried(self, layer: int) -> tuple[Carried, ...]:
        prefix = f"layers.{layer}.attn"
        inside = (f"{prefix}.present_key", f"{prefix}.present_value")
        named = zip(io.present_names(layer), inside, io.past_names(layer), strict=True)
        return tuple(Carried(*names, "float32", self._cache_shape(layer)) for names in named)

    def attend(self, graph: GraphBuilder, layer: int, qkv: str, rows: str = io.ROWS) -> str:
        prefix, spec, window = f"layers.{layer}.attn", self._spec, self._spec.window(layer)
        query, key, value = self._heads(graph, layer, self._factored(graph, layer, self._whole(graph, layer, qkv)))
        lengths, rope = [io.SEQLENS_K, io.TOTAL_LENGTH], spec.rope_of(layer)
        fused = rope is not None and self._fuses_rotation(rope)
        rotary = [*self._tables(layer), io.POSITION_IDS] if fused else ["", "", ""]
        bias = io.WINDOW_BIAS if window else io.ATTENTION_BIAS
        further: dict[str, float] = {}
        if spec.attention_scale:
            further["scale"] = spec.attention_scale
        if spec.attention_softcap:
            further["softcap"] = spec.attention_softcap
        sinks = self._ops.vector(graph, f"{prefix}.sinks")
        graph.ops(
            "GroupQueryAttention",
            [query, key, value, *io.past_names(layer), *lengths, *rotary, bias, sinks],
            [f"{prefix}.heads", *(each.inside for each in self.carried(layer))],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.heads(layer).kv_heads,
            local_window_size=window + io.TREE_ROWS if window else -1,
            do_rotary=int(fused),
            **({"rotary_interleaved": 1} if fused and rope is not None and rope.interleaved else {}),
            **further,
        )
        return f"{prefix}.heads"

    def _cache_shape(self, layer: int) -> tuple[int | str, ...]:
        heads = self._spec.heads(layer)
        return (1, heads.kv_heads, "C", heads.size)

    def _fuses_rotation(self, rope: RopeSpec) -> bool:
        """Whether GroupQueryAttention can rotate: its kernel needs tables whose width is a multiple of eight."""
        return rope.dim % 16 == 0 and not self._spec.norm_after_rope

    def _heads(self, graph: GraphBuilder, layer: int, qkv: str) -> tuple[str, str, str]:
        """Queries, keys and values for GroupQueryAttention: packed, unless something happens before it."""
        spec, prefix, rope = self._spec, f"layers.{layer}.attn", self._spec.rope_of(layer)
        apart = rope is not None and not self._fuses_rotation(rope)
        if not apart and not spec.qk_norm and not spec.value_norm:
            return qkv, "", ""
        query, key, value = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
        heads = spec.heads(layer)
        sizes = graph.constant([heads.q_size, heads.kv_size, heads.kv_size])
        graph.ops("Split", [qkv, sizes], [query, key, value], axis=-1)
        steps = [step for step, there in (("norm", spec.qk_norm), ("rotation", apart)) if there]
        for step in reversed(steps) if spec.norm_after_rope else steps:
            if step == "norm":
                query = self._norm_heads(graph, query, f"{prefix}.q_norm", heads.q_size, heads.size)
                key = self._norm_heads(graph, key, f"{prefix}.k_norm", heads.kv_size, heads.size)
            else:
                query = self._rotate(graph, layer, query, heads.heads)
                key = self._rotate(graph, layer, key, heads.kv_heads)
        return query, key, self._norm_values(graph, value, heads) if spec.value_norm else value

    def _norm_heads(self, graph: GraphBuilder, value: str, norm: str, size: int, head: int) -> str:
        if self._spec.whole_norm:
            return self._ops.norm(graph, value, norm)
        heads = graph.op("Reshape", [value, graph.constant([0, 0, -1, head])], f"{value}.heads")
        normed = self._ops.norm(graph, heads, norm)
        return graph.op("Reshape", [normed, graph.constant([0, 0, size])], f"{value}.normed")

    def _norm_values(self, graph: GraphBuilder, value: str, own: LayerHeads) -> str:
        heads = graph.op("Reshape", [value, graph.constant([0, 0, -1, own.size])], f"{value}.heads")
        ones = graph.ones(f"value_norm.{own.size}", own.size)
        attributes: dict[str, Any] = {"axis": -1, "epsilon": self._spec.norm_eps, "stash_type": 1}
        normed = graph.op("RMSNormalization", [heads, ones], f"{value}.scaled", **attributes)
        return graph.op("Reshape", [normed, graph.constant([0, 0, own.kv_size])], f"{value}.normed")

    def _rotate(self, graph: GraphBuilder, layer: int, value: str, heads: int) -> str:
        rope = self._spec.rope_of(layer)
        assert rope is not None, "who asks rotates"
        inputs = [value, io.POSITION_IDS, *self._tables(layer)]
        attributes = {"num_heads": heads, "rotary_embedding_dim": rope.dim}
        attributes |= {"interleaved": 1} if rope.interleaved else {}
        return graph.op("RotaryEmbedding", inputs, f"{value}.rotated", domain=MICROSOFT, **attributes)


# By the layout of the weights that the graph reads.
ATTENTIONS: dict[Layout, type[Attention]] = {NATIVE: _PagedAttention, PORTABLE: BufferedAttention}
