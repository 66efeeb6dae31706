"""Which checkpoint tensors make up each tensor of a bundle, and how they are changed; mixtures and recurrent layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.kinds import KINDS, MOST_SEGMENTS, Segment
from edgeinfer.bundle.packing import expert_biases, expert_tensor, find_expert
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.peft import Module
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import is_looked_up
from edgeinfer.export.source.packed import MXFP4, PACKINGS, mxfp4_tensors
from edgeinfer.quant.policy import QuantScheme

Shape = tuple[int, ...]

_WEIGHT = ".weight"


@dataclass(frozen=True)
class HeadPadding:
    """Zeros after each attention head along one axis; see edgeinfer.export.architectures.described."""

    axis: int  # 0 for rows, 1 for columns
    heads: int
    # `width`, `wide`: of a head, before and after.
    width: int
    wide: int
    scale: float = 1.0


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, or one of several stacked in it, and how it changes on its way into the bundle."""

    name: str
    shape: Shape  # of the one that is taken
    padding: HeadPadding | None = None
    # `index`, `stacked`: its place and the number of tensors stacked along an additional first axis; 0 where none are.
    index: int = 0
    stacked: int = 0
    joined: int | None = None  # axis of a matrix along which several follow one another instead
    split: int = 1  # our rows in a row of the checkpoint's matrix
    turned: bool = False  # the checkpoint's matrix is transposed
    packing: str = ""  # how the checkpoint's numbers are packed (edgeinfer.export.source.packed); "" for floats
    scale: float = 1.0
    offset: float = 0.0
    # `softplus`, `offset`, `scale`: values become (log(1 + exp(x)) or x, plus the offset) times the scale.
    softplus: bool = False
    # Period, first and number of the rows that are taken of each period; empty for all.
    pieces: tuple[int, int, int] | tuple[()] = ()
    heads: int = 0  # of a matrix that the bundle has transposed head by head; 0 for none
    # Rows of a head, and those of them that are stored as neighbours where ours are halves; empty for none.
    paired: tuple[int, int] | tuple[()] = ()
    runs: tuple[tuple[int, int], ...] = ()  # ranges of the stored rows, one after the other; empty for all in order
    logged: bool = False  # values x are stored as -exp(x)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole checkpoint tensor in its order, times a factor at most."""
        plain = Source(self.name, self.shape, turned=self.turned, scale=self.scale)
        return self == plain

    @property
    def stored_shape(self) -> Shape:
        """Shape of the checkpoint's tensor, unpacked."""
        if self.joined is not None:
            return tuple(size * self.stacked if axis == self.joined else size for axis, size in enumerate(self.shape))
        if self.split > 1:
            return (self.shape[0] // self.split, self.shape[1] * self.split)
        shape = self.shape
        if self.pieces:
            period, _, share = self.pieces
            shape = (shape[0] // share * period, *shape[1:])
        shape = shape[::-1] if self.turned else shape
        return (self.stacked, *shape) if self.stacked else shape

    @property
    def padded_shape(self) -> Shape:
        """Shape in the bundle."""
        if self.heads:
            return (self.heads * self.shape[1], self.shape[0] // self.heads)
        if self.padding is None:
            return self.shape
        axis, size = self.padding.axis, self.padding.heads * self.padding.wide
        return (*self.shape[:axis], size, *self.shape[axis + 1 :])


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the bundle: checkpoint tensors put together along the rows."""

    name: str
    sources: tuple[Source, ...]

    def changed(self, *, scale: float = 1.0, offset: float = 0.0) -> TensorPlan:
        """This tensor with an offset added to the stored values, then times the scale."""
        changed = (dataclasses.replace(source, scale=scale, offset=offset) for source in self.sources)
        return TensorPlan(self.name, tuple(changed))

    def packed(self, packing: str) -> TensorPlan:
        """This tensor of packed sources."""
        return TensorPlan(self.name, tuple(dataclasses.replace(source, packing=packing) for source in self.sources))

    @property
    def shape(self) -> Shape:
        first = self.sources[0].padded_shape
        return (sum(s.padded_shape[0] for s in self.sources), *first[1:])

    @property
    def parameters(self) -> int:
        """Number of the checkpoint's weights in it; padding does not count."""
        return sum(math.prod(s.shape) for s in self.sources)

    def kept(self, bits: int) -> QuantScheme | None:
        """The scheme that holds the checkpoint's packed values unchanged at this number of bits, if any."""
        if all(source.packing in KINDS for source in self.sources):
            return self._kept_blocks()
        packing, *others = {source.packing for source in self.sources}
        if others or not packing:
            return None
        return PACKINGS[packing].scheme(self.shape[1], bits)

    def _kept_blocks(self) -> QuantScheme | None:
        """The scheme of rows of a GGUF file, where nothing but one factor changes them."""
        first = self.sources[0]
        plain = all(
            (s.padding, s.joined, s.split, s.turned, s.offset, s.softplus, s.heads)
            == (None, None, 1, False, 0, False, 0)
            and s.scale == first.scale
            for s in self.sources
        )
        scheme = QuantScheme.of_file(Segment(source.packing, source.shape[0]) for source in self.sources)
        count, floats = len(scheme.segments), any(KINDS[each.kind].floats for each in scheme.segments)
        # Floats have a product of their own, which experts have not.
        fits = count == 1 and find_expert(self.name) is None if floats else count <= MOST_SEGMENTS
        return scheme if plain and fits else None


def plan(name: str, *sources: tuple[str, Shape]) -> TensorPlan:
    """Plans a tensor that concatenates whole checkpoint tensors, given by name and shape."""
    return TensorPlan(name, tuple(Source(*s) for s in sources))


def adaptable_modules(plan: TensorPlan) -> tuple[Module, ...]:
    """The linear modules whose rows make up a planned matrix; none where LoRA adapters would not fit: experts,
    embeddings, and matrices with moved or padded rows or columns."""
    if len(plan.shape) != 2 or is_looked_up(plan.name) or find_expert(plan.name) is not None:
        return ()
    whole = (dataclasses.replace(source, pieces=()).is_whole for source in plan.sources)
    if not all(whole) or not all(source.name.endswith(_WEIGHT) for source in plan.sources):
        return ()
    return tuple(Module(s.name.removesuffix(_WEIGHT), s.shape[0], s.scale, s.pieces) for s in plan.sources)


# Norms of experts in addition to an MLP.
_EXPERT_NORMS = ("router_input_norm", "experts_norm", "experts_post_norm", "dense_post_norm")


@dataclass(frozen=True)
class MixtureNaming:
    """Names of the tensors of a mixture, after the layer's own prefix. A checkpoint stores every expert's matrices on
    their own, or one tensor that stacks them along a first axis, as floats or as blocks of MXFP4 with scales; all are
    accepted."""

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_stacked: int = 0  # number of vectors that the tensor stacks along a first axis; 0 where it is a vector
    router_norm: str = ""  # of a "relu" router
    # Tensors with the rows of gate and up of expert `{expert}`, in this order; empty where always stacked.
    gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
    down: str = "mlp.experts.{expert}.down_proj.weight"
    # `stacked_gate_up`, `stacked_down`: names of stacked tensors; names of their biases end in "_bias".
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    turned: bool = False  # stacked floats are transposed
    by_turns: bool = False  # rows of gate and up alternate
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    shared_down: str = "mlp.shared_expert.down_proj.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    # `router_input_norm`, `experts_norm`, `experts_post_norm`, `dense_post_norm`: of experts with an MLP: norms of the
    # router's input, before and after the experts, and after the MLP.
    router_input_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"  # likewise, factors of each expert's results
    experts_norm: str = "pre_feedforward_layernorm_2.weight"
    experts_post_norm: str = "post_feedforward_layernorm_2.weight"
    dense_post_norm: str = "post_feedforward_layernorm_1.weight"


def mixture_plans(
    names: MixtureNaming, moe: MoESpec, hidden: int, layer: int, root: str, stored: Collection[str]
) -> list[TensorPlan]:
    """Plans the tensors of a mixture in the order they are written."""
    prefix, experts = f"layers.{layer}.mlp", moe.experts
    plans = [plan(f"{prefix}.router", (root + names.router, (experts, hidden)))]
    if moe.router_bias:
        plans.append(plan(f"{prefix}.router_bias", (root + names.router_bias, (experts,))))
    if moe.choice_bias:
        bias = Source(root + names.choice_bias, (experts,), stacked=names.choice_bias_stacked)
        plans.append(TensorPlan(f"{prefix}.choice_bias", (bias,)))
    if moe.with_mlp:
        for name, size in (("expert_scale", experts), *((norm, hidden) for norm in _EXPERT_NORMS)):
            plans.append(plan(f"{prefix}.{name}", (root + getattr(names, name), (size,))))
    if moe.router == "relu":
        plans.append(plan(f"{prefix}.router_norm", (root + names.router_norm, (experts,))))
    inner = "gate_up" if moe.gated else "up"
    for expert in range(experts):
        into, out = _matrices(names, moe, hidden, root, stored, expert)
        plans.append(TensorPlan(expert_tensor(layer, expert, inner), into))
        plans.append(TensorPlan(expert_tensor(layer, expert, "down"), (out,)))
    if moe.expert_bias:
        for part, name, size in ((inner, names.stacked_gate_up, moe.expert_size), ("down", names.stacked_down, hidden)):
            sources = [_rows(f"{root}{name}_bias", (size,), names, part, e, experts) for e in range(experts)]
            plans.append(TensorPlan(expert_biases(layer, part), tuple(each for some in sources for each in some)))
    if moe.shared_size:
        part, rows = ("gate_up", 2 * moe.shared_size) if moe.gated else ("up", moe.shared_size)
        rows //= len(names.shared_gate_up)
        plans.append(plan(f"{prefix}.shared.{part}", *((root + n, (rows, hidden)) for n in names.shared_gate_up)))
        plans.append(plan(f"{prefix}.shared.down", (root + names.shared_down, (hidden, moe.shared_size))))
    if moe.shared_gate:
        plans.append(plan(f"{prefix}.shared.gate", (root + names.shared_gate, (1, hidden))))
    return plans


def _matrices(
    names: MixtureNaming, moe: MoESpec, hidden: int, root: str, stored: Collection[str], expert: int
) -> tuple[tuple[Source, ...], Source]:
    """The first and last matrix of an expert."""
    inner, experts = moe.expert_size, moe.experts
    up, down = root + names.stacked_gate_up, root + names.stacked_down
    packed = mxfp4_tensors(down)[0] in stored
    if packed or down in stored or not names.gate_up:
        how: dict[str, Any] = {"packing": MXFP4} if packed else {"turned": names.turned}
        into = _rows(up, (inner, hidden), names, "gate_up" if moe.gated else "up", expert, experts, **how)
        return into, Source(down, (hidden, inner), index=expert, stacked=experts, **how)
    rows = (2 if moe.gated else 1) * inner // len(names.gate_up)
    single = tuple(Source(root + name.format(expert=expert), (rows, hidden)) for name in names.gate_up)
    return single, Source(root + names.down.format(expert=expert), (hidden, inner))


def _rows(
    name: str, shape: Shape, names: MixtureNaming, part: str, expert: int, experts: int, **how: Any
) -> tuple[Source, ...]:
    """One part of an expert among those that a tensor stacks; `shape` is that of gate and of up where it has both."""
    if part == "gate_up" and names.by_turns:
        halves = ((2, half, 1) for half in (0, 1))
        return tuple(Source(name, shape, index=expert, stacked=experts, pieces=half, **how) for half in halves)
    whole = (2 * shape[0], *shape[1:]) if part == "gate_up" else shape
    return (Source(name, whole, index=expert, stacked=experts, **how),)


def recurrent_tensors(spec: DecoderSpec, layer: int, root: str) -> Iterator[TensorPlan]:
    """The tensors of a layer's recurrence, if it has one."""
    prefix = f"layers.{layer}.mixer"
    if spec.mixer(layer) == "conv":
        yield from _conv_tensors(spec, prefix, root)
    elif spec.mixer(layer) == "delta":
        yield from _delta_tensors(spec, prefix, root)
    elif "mamba2" in spec.parts_of(layer):
        yield from _mamba2_tensors(spec, prefix, root)


def _conv_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    conv, hidden = spec.conv, spec.hidden_size
    assert conv is not None, "a layer with a convolution has its sizes"
    yield from _modules(prefix, root, "in", "in_proj", (3 * hidden, hidden), conv.bias)
    yield from _modules(prefix, root, "conv", "conv", (hidden, 1, conv.width), conv.bias)
    yield from _modules(prefix, root, "out", "out_proj", (hidden, hidden), conv.bias)


def _modules(prefix: str, root: str, name: str, module: str, shape: Shape, biased: bool) -> Iterator[TensorPlan]:
    """A module's weight and its bias, if any."""
    yield plan(f"{prefix}.{name}", (f"{root}{module}.weight", shape))
    if biased:
        yield plan(f"{prefix}.{name}_bias", (f"{root}{module}.bias", shape[:1]))


def _delta_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    delta, hidden = spec.delta, spec.hidden_size
    assert delta is not None, "a layer with a delta rule has its sizes"
    channels, heads = 2 * delta.keys + delta.values, delta.value_heads
    yield plan(
        f"{prefix}.in",
        (f"{root}in_proj_qkv.weight", (channels, hidden)),
        (f"{root}in_proj_z.weight", (delta.values, hidden)),
    )
    gates = ((f"{root}in_proj_{name}.weight", (heads, hidden)) for name in ("b", "a"))
    yield plan(f"{prefix}.gates", *gates)
    yield plan(f"{prefix}.conv", (f"{root}conv1d.weight", (channels, 1, delta.width)))
    yield plan(f"{prefix}.dt_bias", (f"{root}dt_bias", (heads,)))
    yield plan(f"{prefix}.a_log", (f"{root}A_log", (heads,)))
    yield plan(f"{prefix}.norm", (f"{root}norm.weight", (delta.value_size,)))
    yield plan(f"{prefix}.out", (f"{root}out_proj.weight", (hidden, delta.values)))


def _mamba2_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    scan, hidden = spec.mamba2, spec.hidden_size
    assert scan is not None, "a layer with a recurrence has its sizes"
    yield from _modules(prefix, root, "in", "in_proj", (scan.read_size, hidden), scan.bias)
    yield from _modules(prefix, root, "conv", "conv1d", (scan.conv_size, 1, scan.width), scan.conv_bias)
    yield from _modules(prefix, root, "out", "out_proj", (hidden, scan.inner_size), scan.bias)
    for name, source in (("dt_bias", "dt_bias"), ("a_log", "A_log"), ("d", "D")):
        yield plan(f"{prefix}.{name}", (f"{root}{source}", (scan.heads,)))
    if scan.normed:
        yield plan(f"{prefix}.norm", (f"{root}norm.weight", (scan.inner_size,)))
