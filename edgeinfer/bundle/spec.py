"""The decoder a bundle holds, described by its parts: sizes, norms, attention, rotation, MLPs, recurrences."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, get_args

from edgeinfer.bundle.geometry import Geometry, KVLayer, StateLayer, require_few_layers
from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.bundle.parts import (
    ConvSpec,
    DeltaSpec,
    EncoderSpec,
    HeadsSpec,
    LatentSpec,
    LayerHeads,
    Mamba2Spec,
    Mixer,
    MoESpec,
    PerLayerSpec,
    RopeSpec,
    StreamsSpec,
    check_heads,
    check_mixers,
    parts_of,
)
from edgeinfer.core.records import dataclass

# gelu_tanh is the tanh approximation; relu2 squares what is positive; swiglu_oai is gpt-oss's clamped SwiGLU.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu", "swiglu_oai"]
NormKind = Literal["rms", "layer"]
OutputGate = Literal["", "channel", "head"]


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder of attention, and MLPs or mixtures of experts, with residual connections around both."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec  # rotation of queries and keys, in the layers that rotate
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # norm on every query and key head before rotation (Qwen3)
    whole_norm: bool = False  # that norm is over all heads together (OLMoE)
    tied: bool = False  # the LM head is the embedding
    # Sliding window of each layer in tokens, 0 for full attention; empty when all are full.
    windows: tuple[int, ...] = ()
    # The experts of every layer that is not among its dense layers; None where all are dense.
    moe: MoESpec | None = None
    norm: NormKind = "rms"  # "rms", or "layer", which also takes the mean off
    norm_bias: bool = False  # norms, except those of queries and keys, add a bias
    # `pre_norm`, `post_norm`: norms before attention and MLP, and of their results before these are added (OLMo 2 has
    # the latter alone, Gemma 2 both).
    pre_norm: bool = True
    post_norm: bool = False
    inner_norms: bool = False  # norms before the last product of attention and of the MLP (BitNet)
    # Attention and MLP read the same hidden states, with one norm, and both are added (Cohere, Phi).
    parallel: bool = False
    gated: bool = True  # MLPs are down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
    head_bias: bool = False
    # `logit_softcap`, `attention_softcap`: logits, and scores, are cap * tanh(x / cap); 0 leaves them as they are.
    logit_softcap: float = 0.0
    attention_softcap: float = 0.0
    attention_scale: float = 0.0  # of the scores; 0 is one over the root of the head's width
    sinks: bool = False  # every head has a score that takes its share of the softmax and gives nothing (gpt-oss)
    norm_after_rope: bool = False  # queries and keys are normed after rotation (Hunyuan)
    value_norm: bool = False  # values are normed like keys, without a weight (Gemma 4)
    # The heads' results are multiplied by the logistic function of a product of the normed hidden state, one number for
    # each "channel" (Qwen3-Next) or "head" (LFM3).
    output_gate: OutputGate = ""
    more_ropes: tuple[RopeSpec, ...] = ()
    # For each layer -1 where it does not rotate, 0 for `rope`, n for the nth of `more_ropes`; empty where all layers
    # have `rope`.
    rope_layers: tuple[int, ...] = ()
    # Multi-head latent attention; head sizes are those of its queries then, and it has one key.
    latent: LatentSpec | None = None
    mixers: tuple[Mixer, ...] = ()  # how each layer mixes tokens; empty where all have attention
    # `conv`, `delta`, `mamba2`: sizes of the layers with that mixer.
    conv: ConvSpec | None = None
    delta: DeltaSpec | None = None
    mamba2: Mamba2Spec | None = None
    no_mlp: tuple[int, ...] = ()  # layers without an MLP, ascending (Nemotron-H, Mamba-2)
    full_heads: HeadsSpec | None = None  # heads of the layers without a window, where theirs differ
    # For each layer the one whose keys and values it reads; empty where all read their own.
    kv_sources: tuple[int, ...] = ()
    mlp_sizes: tuple[int, ...] = ()  # inner width of each layer's MLP; empty where all have `intermediate_size`
    layer_scales: bool = False  # the hidden states after each layer are multiplied by a number of its own (Gemma 4)
    per_layer: PerLayerSpec | None = None
    streams: StreamsSpec | None = None  # hidden states in several streams (Gemma 3n)
    # Share of each layer's gate values that is cut off, as if they were normally distributed; the rest are counted from
    # the cutoff. 0 cuts nothing. Empty where no layer cuts.
    sparsity: tuple[float, ...] = ()
    encoder: EncoderSpec | None = None  # these layers as an encoder; None where they are a decoder

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        require_few_layers(self.num_layers)
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads")
        widest = self.head_dim if self.full_heads is None else max(self.head_dim, self.full_heads.head_dim)
        _require(all(rope.dim <= widest for rope in self.ropes), "rope dim exceeds head_dim")
        _require(0 < self.norm_eps < 1, "norm_eps must be in (0, 1)")
        for kind, name in ((Activation, "activation"), (NormKind, "norm"), (OutputGate, "output_gate")):
            _require(getattr(self, name) in get_args(kind), f"{name} {getattr(self, name)!r} is unknown")
        _require(len(self.windows) in (0, self.num_layers), "windows must name every layer or none")
        _require(all(w >= 0 for w in self.windows), "windows must be 0 or positive")
        _require(len({w for w in self.windows if w}) <= 1, "all windows must be of one size")
        _require(self.qk_norm or not (self.whole_norm or self.norm_after_rope), "it is a kind of qk_norm")
        _require(self.pre_norm or self.post_norm, "there must be norms before or after")
        _require(self.pre_norm or not self.parallel, "parallel parts share the norm before them")
        _require(min(self.logit_softcap, self.attention_softcap, self.attention_scale) >= 0, "caps must be positive")
        dense = () if self.moe is None else self.moe.dense_layers
        _require(all(layer < self.num_layers for layer in dense), "dense_layers must be layers")
        _require(len(self.rope_layers) in (0, self.num_layers), "rope_layers must name every layer or none")
        known = range(-1, len(self.ropes))
        _require(all(index in known for index in self.rope_layers), "rope_layers must name rotations that there are")
        kinds = {"conv": self.conv, "delta": self.delta, "mamba2": self.mamba2}
        check_mixers(self.mixers, self.num_layers, kinds, self.no_mlp)
        self._check_latent()
        for name in ("mlp_sizes", "kv_sources", "sparsity"):
            _require(len(getattr(self, name)) in (0, self.num_layers), f"{name} must name every layer or none")
        _require(min(self.mlp_sizes, default=1) > 0, "mlp_sizes must be positive")
        _require(all(0 <= share < 1 for share in self.sparsity), "sparsity must be in [0, 1)")
        _require(not self.sparsity or self.gated, "what is cut is a gate")
        plain = self.pre_norm and self.post_norm and not (self.parallel or self.mixers or self.moe or self.latent)
        alone = self.per_layer is not None and plain and not self.layer_scales and not self.norm_bias
        _require(self.streams is None or alone, "streams are combined with per-layer embeddings and norms alone")
        others = self.mixers or self.moe or self.latent or self.kv_sources or self.per_layer or self.streams
        _require(self.encoder is None or not (others or self.parallel), "an encoder has attention and MLPs alone")
        check_heads([self.heads(layer) for layer in range(len(self.kv_sources or self.windows or (0,)))])

    def _check_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        fits = self.num_kv_heads == 1 and self.head_dim == latent.plain_size + latent.rotary_size
        _require(fits, "latent attention has one key, and queries of both its sizes")
        _require(self.attention_scale > 0, "latent attention needs a scale")
        _require(all(rope.dim <= latent.rotary_size for rope in self.ropes), "rope dim exceeds the rotated channels")
        others = self.qk_norm or self.value_norm or self.inner_norms or self.mixers or self.norm != "rms"
        plain = self.pre_norm and not (others or self.output_gate or self.parallel)
        _require(plain, "latent attention is not combined with other norms, gates or mixers")

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return (self.rope, *self.more_ropes)

    def rope_index(self, layer: int) -> int:
        """The index in `ropes` of a layer's rotation; -1 where it does not rotate."""
        return self.rope_layers[layer] if self.rope_layers else 0

    def rope_of(self, layer: int) -> RopeSpec | None:
        index = self.rope_index(layer)
        return None if index < 0 else self.ropes[index]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads; of latent attention, of the vector that is kept."""
        return self.num_kv_heads * self.head_dim if self.latent is None else self.latent.met_size

    @property
    def heads_size(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_size)

    @property
    def attention_matrices(self) -> tuple[str, ...]:
        """Names of a layer's matrices of attention, after its prefix, in the order they are used."""
        if self.latent is not None:
            queries = ("q_a", "q_b") if self.latent.query_rank else ("q",)
            return (*queries, "kv_a", "k_b", "v_b", "out")
        return ("qkv", "gate", "out") if self.output_gate else ("qkv", "out")

    @property
    def native_only(self) -> bool:
        """Whether only our own operators compute it: ONNX Runtime has none for some of its parts."""
        own = self.mixers or self.kv_sources or self.streams or self.sparsity or self.latent is not None
        # ONNX Runtime's gated experts have these two activations.
        return bool(own or (self.moe and self.moe.gated and self.activation not in ("silu", "swiglu_oai")))

    def experts_of(self, layer: int) -> MoESpec | None:
        """The mixture of experts of a layer; None where it has an ordinary MLP, or none."""
        dense = self.moe is None or layer in self.moe.dense_layers or layer in self.no_mlp
        return None if dense else self.moe

    @property
    def window_size(self) -> int:
        """Sliding window in tokens, of the layers that have one; 0 when none has."""
        return max(self.windows, default=0)

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0 is full attention."""
        return self.windows[layer] if self.windows else 0

    def mixer(self, layer: int) -> Mixer:
        return self.mixers[layer] if self.mixers else "attention"

    def heads(self, layer: int) -> LayerHeads:
        source = self.kv_sources[layer] if self.kv_sources else layer
        full = None if self.window(layer) else self.full_heads
        sizes = (self.num_kv_heads, self.head_dim) if full is None else (full.num_kv_heads, full.head_dim)
        return LayerHeads(self.num_heads, *sizes, bool(full and full.keys_are_values), source, source == layer)

    def mlp_size(self, layer: int) -> int:
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def carried_size(self) -> int:
        """Width of the hidden states of all streams."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    def cut(self, layer: int) -> float:
        """Share of a layer's gate that is cut off."""
        return self.sparsity[layer] if self.sparsity else 0.0

    def parts_of(self, layer: int) -> tuple[Mixer, ...]:
        return parts_of(self.mixer(layer))

    def attends(self, layer: int) -> bool:
        return "attention" in self.parts_of(layer)

    @property
    def _kv_layers(self) -> tuple[KVLayer, ...]:
        """What each layer keeps of a token; empty where all keep the same."""
        if self.latent is not None:
            return (KVLayer(1, self.latent.rotary_size, self.latent.rank),) * self.num_layers
        attends, reads = KVLayer(self.num_kv_heads, self.head_dim, self.head_dim), KVLayer(1, 0, self.hidden_size)
        others = (reads if self.mixer(layer) == "conv" else KVLayer(0, 0, 0) for layer in range(self.num_layers))
        kept = tuple(self.heads(layer).kept if self.attends(layer) else each for layer, each in enumerate(others))
        return () if set(kept) == {attends} else kept

    def state_of(self, layer: int) -> StateLayer:
        kinds = {"delta": self.delta, "mamba2": self.mamba2}
        kept = (kind.state for name, kind in kinds.items() if kind is not None and name in self.parts_of(layer))
        return next(kept, StateLayer())

    @property
    def _states(self) -> tuple[StateLayer, ...]:
        states = tuple(self.state_of(layer) for layer in range(self.num_layers))
        return states if any(each.heads for each in states) else ()

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            vocab_size=self.vocab_size,
            hidden_size=self.carried_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            kv_layers=self._kv_layers,
            states=self._states,
        )


# The last field of each that plain decoders use: Llama, Qwen and their mixtures.
_LAST_COMMON: dict[type, str] = {RopeSpec: "attention_factor", MoESpec: "dense_layers", DecoderSpec: "moe"}


def uncommon_fields(part: DecoderSpec | RopeSpec | MoESpec) -> tuple[str, ...]:
    """Names of the fields, of those that plain decoders do not use, that differ from their defaults."""
    every = fields(part)
    last = [field.name for field in every].index(_LAST_COMMON[type(part)])
    return tuple(field.name for field in every[last + 1 :] if getattr(part, field.name) != field.default)


# The most rows of the target that wait for their module; memory is planned for them.
WAITING_ROWS = 64
# The most rows of a block: published drafters have 8 to 16.
MOST_BLOCK = 64
# The most heads after a prefix layer (published modules have 4), and layers of each.
MOST_DRAFT_HEADS, MOST_HEAD_LAYERS = 8, 8

# Tensors that a module can read in its target's bundle.
_SHARED = ("embed", "head")


@dataclass(frozen=True)
class DraftModule:
    """How a draft module reads its target: EAGLE heads and modules for multi-token prediction, nested in a bundle.

    A module is a decoder of one layer or a few. Its row for a token reads that token's embedding, and the state from
    which the target, or the module itself in the row before, predicted it; or its rows are a block that is drafted at
    once. Embedding and head may be the target's own, whose bytes are read in the target's bundle.
    """

    width: int  # W, of the states read for each of the target's rows: all tapped layers', or the last one's
    drafter: str  # name of the drafter that uses it
    vocab_size: int = 0  # tokens that it can draft; 0 is all of the target's
    shares: tuple[str, ...] = ()  # tensors that lie in the target's bundle, of "embed" and "head"
    # The first layer's attention reads normed embedding and normed state side by side, the state being a product of the
    # target's states (EAGLE-3); otherwise a product of both enters the first layer.
    concatenated: bool = False
    residual_normed: bool = False  # the first layer adds to the normed state (EAGLE-3's norm_before_residual)
    taps_normed: bool = False  # the target's states are normed before that product (EAGLE-3's norm_before_fc)
    parts_normed: bool = False  # embedding and state are normed before their product (MTP)
    first_normed: bool = True  # the input of the first layer's attention is normed (all but EAGLE-1)
    last_normed: bool = True  # the head reads normed states (all but EAGLE-1)
    state_normed: bool = False  # the target's state is read through its final norm, as its head reads it
    feeds_normed: bool = False  # the module's own state is read through the module's final norm (Qwen's MTP)
    # Rows of a block that is drafted at once (DFlash): the last token, then masks that see each other and the text. The
    # text's rows are keys and values alone, made from a normed product of the target's states. 0 where tokens are
    # drafted one by one.
    block: int = 0
    mask: int = 0  # the token of the masks
    embed_scale: float = 1.0  # factor of the rows of the target's embedding that a block's tokens and heads read
    causal: tuple[int, ...] = ()  # layers in which a row of a block does not see later ones
    # One for each token of a draft, over the layer's output for the target's normed states alone (Hydra++); 0 where the
    # layers draft.
    heads: int = 0
    head_layers: int = 1  # of each head

    def __post_init__(self) -> None:
        _require(self.width > 0 and self.vocab_size >= 0, "a draft module reads states")
        _require(all(name in _SHARED for name in self.shares), f"a draft module shares {self.shares}")
        _require(
            self.first_normed or not self.concatenated, "a draft module that reads side by side norms what it reads"
        )
        _require(self.block == 0 or 2 <= self.block <= MOST_BLOCK, f"a block has from 2 to {MOST_BLOCK} rows")
        _require(self.mask >= 0, "a mask is a token")
        _require(self.embed_scale > 0, f"embeddings are multiplied by {self.embed_scale}")
        _require(all(layer >= 0 for layer in self.causal), f"layers are numbered from 0, not as {self.causal}")
        heads, layers = self.heads, self.head_layers
        _require(0 <= heads <= MOST_DRAFT_HEADS, f"a draft module has up to {MOST_DRAFT_HEADS} heads, not {heads}")
        _require(1 <= layers <= MOST_HEAD_LAYERS, f"a head has from 1 to {MOST_HEAD_LAYERS} layers, not {layers}")
        _require(not (heads and self.block), "a draft module has heads or blocks")
