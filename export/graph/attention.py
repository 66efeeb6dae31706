"""The attention of a layer in a graph: over pages of a pool in the native graph, over one buffer in the portable one.

`edgeinfer.Attention`, version 1, takes queries, keys and values side by side, normalises and rotates them, writes keys
and values into the pool, and attends. Its inputs beside those of the graph that edgeinfer.bundle.graph describes:
  0 qkv float32 (1, S, heads h + kv_heads h + kv_heads v) · 1 kv_pool · 2 kv_layout · 3 kv_pages · 4 rows · 5 path_slots
  6 position_ids · 7 cos_cache · 8 sin_cache (both or none) · 9 q_norm · 10 k_norm float32 (both or none): (h,) for a
  root-mean-square norm of each head, as wide as all heads for one of all together
  11 sinks float32 (heads,) (optional) · 12 layer_mask (optional): where it is false at the attribute `part`, nothing is
  written and the output is zeros
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from edgeinfer.bundle import NATIVE, PORTABLE, DecoderSpec, Layout, TensorEntry
from edgeinfer.bundle import graph as io
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder
from edgeinfer.export.graph.operators import Operators

__all__ = ["ATTENTIONS", "Attention", "Carried", "PagedLayer"]


@dataclass(frozen=True)
class Carried:
    """What a block of attention hands on beside the hidden states.

    Attributes:
        name: of the outcome.
        inside: its name where the block runs.
        source: what it is where the block is masked.
    """

    name: str
    inside: str
    source: str
    dtype: str
    shape: tuple[int | str, ...]


class Attention(ABC):
    """Adds the attention of a decoder to its graph.

    Args:
        tensors: the tensor table by canonical name; complete for the spec.
        operators: that make the weighted pieces.
    """

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], operators: Operators) -> None:
        self._spec, self._tensors, self._ops = spec, tensors, operators

    @abstractmethod
    def declare_inputs(self, graph: GraphBuilder) -> None:
        """Declares the graph inputs that only attention reads."""

    @abstractmethod
    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """Adds the nodes from a layer's queries, keys and values to what its heads give."""

    def carried(self, layer: int) -> tuple[Carried, ...]:
        """What a layer's block hands on beside the hidden states; outputs of the graph."""
        return ()


@dataclass(frozen=True)
class PagedLayer:
    """The attributes of `edgeinfer.Attention`, by their names.

    Attributes:
        layer: index into the offsets of `kv_layout`.
        part: place in the layer mask.
        rotary_dim: rotated channels of a head; the rest pass through. 0: none.
        window: positions of a path that a row sees, itself included; 0: all.
        interleaved: neighbouring channels are rotated as pairs, instead of one of each half.
        scale: of the scores; 0: one over the square root of the key size.
        softcap: scores are softcap * tanh(score / softcap); 0: as they are.
    """

    num_heads: int
    kv_num_heads: int
    key_size: int
    value_size: int
    layer: int
    part: int
    rotary_dim: int
    norm_epsilon: float
    window: int = 0
    interleaved: int = 0
    scale: float = 0.0
    softcap: float = 0.0

    @classmethod
    def of(cls, spec: DecoderSpec, layer: int) -> PagedLayer:
        """Those of a decoder's layer."""
        return cls(
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            key_size=spec.head_dim,
            value_size=spec.head_dim,
            layer=layer,
            part=2 * layer,
            rotary_dim=spec.rope.dim,
            norm_epsilon=spec.norm_eps,
            window=spec.window(layer),
        )


class _PagedAttention(Attention):
    """One operator of ours, which normalises, rotates, writes and attends."""

    def declare_inputs(self, graph: GraphBuilder) -> None:
        """See `Attention.declare_inputs`."""
        graph.input(io.KV_POOL, "uint8", ("B",))
        graph.input(io.KV_LAYOUT, "int64", (3 + self._spec.num_layers,))
        graph.input(io.KV_PAGES, "int32", ("N", "G"))
        graph.input(io.ROWS, "int32", ("S", 4))
        graph.input(io.PATH_SLOTS, "int32", ("X",))

    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """See `Attention.attend`."""
        prefix, attributes = f"layers.{layer}.attn", PagedLayer.of(self._spec, layer)
        pages = [io.KV_POOL, io.KV_LAYOUT, io.KV_PAGES, io.ROWS, io.PATH_SLOTS]
        tables = [io.COS_CACHE, io.SIN_CACHE] if attributes.rotary_dim else ["", ""]
        weights = [self._weight(graph, f"{prefix}.{name}") for name in ("q_norm", "k_norm", "sinks")]
        inputs = [qkv, *pages, io.POSITION_IDS, *tables, *weights, io.LAYER_MASK]
        return graph.op("Attention", inputs, f"{prefix}.heads", domain=io.NATIVE_DOMAIN, **asdict(attributes))

    def _weight(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a vector; empty where the model has none."""
        entry = self._tensors.get(name)
        return "" if entry is None else graph.weight(name, entry.data)


class _BufferedAttention(Attention):
    """GroupQueryAttention, with what it cannot do itself in nodes before it."""

    def declare_inputs(self, graph: GraphBuilder) -> None:
        """See `Attention.declare_inputs`."""
        graph.input(io.ATTENTION_BIAS, "float32", (1, 1, "S", "T"))
        if self._spec.window_size:
            graph.input(io.WINDOW_BIAS, "float32", (1, 1, "S", "T"))
        graph.input(io.SEQLENS_K, "int32", (1,))
        graph.input(io.TOTAL_LENGTH, "int32", ())
        for layer in range(self._spec.num_layers):
            for name in io.past_names(layer):
                graph.input(name, "float32", self._cache_shape)

    def carried(self, layer: int) -> tuple[Carried, ...]:
        """See `Attention.carried`."""
        prefix = f"layers.{layer}.attn"
        inside = (f"{prefix}.present_key", f"{prefix}.present_value")
        named = zip(io.present_names(layer), inside, io.past_names(layer), strict=True)
        return tuple(Carried(*names, "float32", self._cache_shape) for names in named)

    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """See `Attention.attend`."""
        prefix, spec, window = f"layers.{layer}.attn", self._spec, self._spec.window(layer)
        query, key, value = self._heads(graph, qkv, prefix)
        lengths = [io.SEQLENS_K, io.TOTAL_LENGTH]
        rotary = [io.COS_CACHE, io.SIN_CACHE, io.POSITION_IDS] if self._fused_rotation else ["", "", ""]
        bias = io.WINDOW_BIAS if window else io.ATTENTION_BIAS
        graph.ops(
            "GroupQueryAttention",
            [query, key, value, *io.past_names(layer), *lengths, *rotary, bias],
            [f"{prefix}.heads", *(each.inside for each in self.carried(layer))],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            local_window_size=window + io.TREE_ROWS if window else -1,
            do_rotary=int(self._fused_rotation),
        )
        return f"{prefix}.heads"

    @property
    def _cache_shape(self) -> tuple[int | str, ...]:
        return (1, self._spec.num_kv_heads, "C", self._spec.head_dim)

    @property
    def _fused_rotation(self) -> bool:
        """Whether GroupQueryAttention can rotate; its kernel takes tables whose width is a multiple of eight."""
        return self._spec.rope.dim % 16 == 0

    def _heads(self, graph: GraphBuilder, qkv: str, prefix: str) -> tuple[str, str, str]:
        """Queries, keys and values as GroupQueryAttention takes them: packed, unless something is done before it."""
        spec = self._spec
        if self._fused_rotation and not spec.qk_norm:
            return qkv, "", ""
        query, key, value = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
        sizes = graph.constant([spec.q_size, spec.kv_size, spec.kv_size])
        graph.ops("Split", [qkv, sizes], [query, key, value], axis=-1)
        if spec.qk_norm:
            query = self._norm_heads(graph, query, f"{prefix}.q_norm", spec.q_size)
            key = self._norm_heads(graph, key, f"{prefix}.k_norm", spec.kv_size)
        if not self._fused_rotation:
            query = self._rotate(graph, query, spec.num_heads)
            key = self._rotate(graph, key, spec.num_kv_heads)
        return query, key, value

    def _norm_heads(self, graph: GraphBuilder, value: str, norm: str, size: int) -> str:
        if self._spec.whole_norm:
            return self._ops.norm(graph, value, norm)
        heads = graph.op("Reshape", [value, graph.constant([0, 0, -1, self._spec.head_dim])], f"{value}.heads")
        normed = self._ops.norm(graph, heads, norm)
        return graph.op("Reshape", [normed, graph.constant([0, 0, size])], f"{value}.normed")

    def _rotate(self, graph: GraphBuilder, value: str, heads: int) -> str:
        inputs = [value, io.POSITION_IDS, io.COS_CACHE, io.SIN_CACHE]
        attributes = {"num_heads": heads, "rotary_embedding_dim": self._spec.rope.dim}
        return graph.op("RotaryEmbedding", inputs, f"{value}.rotated", domain=MICROSOFT, **attributes)


# By the layout of the weights that the graph reads.
ATTENTIONS: dict[Layout, type[Attention]] = {NATIVE: _PagedAttention, PORTABLE: _BufferedAttention}
