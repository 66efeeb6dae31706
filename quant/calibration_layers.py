"""One layer of a decoder over whole texts, its experts included, in one or two versions at once. A version, a stream,
computes with the weights as they are or with what quantizing made of them, layer after layer. Every matrix is shown,
with the statistics of what enters it, before it is multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import expert_biases
from edgeinfer.bundle.parts import LatentSpec, Mixer, MoESpec
from edgeinfer.bundle.spec import Activation, DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.nn import recurrent
from edgeinfer.nn.arithmetic import (
    attend,
    gate_up,
    inner_values,
    logistic,
    normed,
    query_factors,
    rms_norm,
    rope_tables,
    rotate,
    route,
)
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator

Floats = NDArray[np.float32]
# The same tokens in every stream, (N, width) each.
Signal = tuple[Floats, ...]

_UNCOMPUTED = ("kv_sources", "per_layer")  # parts of a decoder
# A whole tensor by its canonical name.
Tensors = Callable[[str], Floats]
# What a matrix becomes, given its name, its values (R, C) and what enters it; None: no token of the texts does.
Visit = Callable[[str, Floats, InputStatistics | None], Floats]


def uncomputed(spec: DecoderSpec) -> list[str]:
    """Parts of a decoder that cannot be computed here."""
    found = ["experts next to an MLP"] if spec.moe is not None and spec.moe.with_mlp else []
    return [*found, *(name for name in _UNCOMPUTED if getattr(spec, name))]


class LayerWalk:
    """Runs the layers of a decoder, one after the other, over texts, which do not see each other.

    `visit` is called for every matrix of a layer, in the order of computation, and returns its replacement in quantized
    streams. Statistics are of the last stream; with two streams they relate it to the first. With `hessian` they have
    second moments between inputs. Where `weigh_experts`, an expert's inputs are shown multiplied by its result's
    factor.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        tensors: Tensors,
        lengths: Sequence[int],
        visit: Visit,
        quantized: tuple[bool, ...],
        *,
        hessian: bool,
    ) -> None:
        for name in uncomputed(spec):
            what = f"Calibration of a decoder with {name}"
            raise UnsupportedArchitectureError(f"{what} is not supported yet.", "Export it without a calibration text.")
        self.spec = spec
        self.tensors = tensors
        self.visit = visit
        self.quantized = quantized
        self.uses: list[ExpertTokens] = []
        self.weigh_experts = True
        self._hessian = hessian
        ends = np.cumsum([0, *lengths])
        self._texts = [slice(int(start), int(stop)) for start, stop in pairwise(ends)]
        longest = max(lengths)
        self._tables = [rope_tables(rope, longest, longest) for rope in spec.ropes]

    def run(self, layer: int, states: Signal) -> Signal:
        """The hidden states after a layer, from those before it, which are overwritten."""
        parts, feeds = self.spec.parts_of(layer), layer not in self.spec.no_mlp
        entering = self._entering(f"layers.{layer}.attn", states) if parts else states
        given = [
            self._attention(layer, entering) if p == "attention" else self._recur(layer, p, entering) for p in parts
        ]
        if given:
            changes = tuple(reduce(np.add, each) for each in zip(*given, strict=True))
            self._add(f"layers.{layer}.attn", changes, states)
        if feeds and not self.spec.parallel:
            entering = self._entering(f"layers.{layer}.mlp", states)
        if feeds:
            self._add(f"layers.{layer}.mlp", self._mlp(layer, entering), states)
        for state in states if self.spec.layer_scales else ():
            state *= self.tensors("layer_scales")[layer]
        return states

    def _entering(self, part: str, states: Signal) -> Signal:
        """Input of attention or MLP."""
        return self.norm(f"{part}_norm", states) if self.spec.pre_norm else states

    def _add(self, part: str, changes: Signal, states: Signal) -> None:
        """Adds the result of attention or MLP to the states."""
        if self.spec.post_norm:
            changes = self.norm(f"{part}_post_norm", changes)
        for state, change in zip(states, changes, strict=True):
            state += change

    def norm(self, name: str, states: Signal) -> Signal:
        """The states after the norm of this name."""
        weight, bias = self.tensors(name), self.tensors(f"{name}_bias") if self.spec.norm_bias else None
        return tuple(normed(x, weight, bias, kind=self.spec.norm, eps=self.spec.norm_eps) for x in states)

    def statistics(self, inputs: Signal) -> InputStatistics | None:
        """Statistics of a matrix's inputs; None without inputs."""
        if not len(inputs[-1]):
            return None
        *float_inputs, x = inputs
        gathered = StatisticsAccumulator(x.shape[1], self._hessian, self._hessian and bool(float_inputs))
        gathered.add(x, *float_inputs)
        return gathered.result()

    def weights(self, name: str, inputs: Signal) -> Signal:
        """Shows a matrix and its inputs; returns it as each stream multiplies by it, (R, C) each."""
        weight = self.tensors(name)
        replacement = self.visit(name, weight, self.statistics(inputs))
        return tuple(replacement if quantized else weight for quantized in self.quantized)

    def linear(self, name: str, inputs: Signal, bias: bool) -> Signal:
        weights = self.weights(name, inputs)
        added = self.tensors(f"{name}_bias") if bias else None
        return tuple(multiply(x, w, added) for x, w in zip(inputs, weights, strict=True))

    def _attention(self, layer: int, entering: Signal) -> Signal:
        spec, prefix = self.spec, f"layers.{layer}.attn"
        if spec.latent is not None:
            return self._latent_attention(layer, spec.latent, entering)
        products = self.linear(f"{prefix}.qkv", entering, spec.qkv_bias)
        norms = [self.tensors(f"{prefix}.{n}_norm") for n in "qk"] if spec.qk_norm else None
        sinks = self.tensors(f"{prefix}.sinks") if spec.sinks else None
        mixed = tuple(self._attend(layer, qkv, norms, sinks) for qkv in products)
        if spec.output_gate:
            gates = self.linear(f"{prefix}.gate", entering, False)
            each = spec.heads(layer).size if spec.output_gate == "head" else 1
            mixed = tuple(x * np.repeat(logistic(g), each, axis=1) for x, g in zip(mixed, gates, strict=True))
        if spec.inner_norms:
            mixed = self.norm(f"{prefix}.inner_norm", mixed)
        return self.linear(f"{prefix}.out", mixed, spec.output_bias)

    def _recur(self, layer: int, mixer: Mixer, entering: Signal) -> Signal:
        spec, prefix = self.spec, f"layers.{layer}.mixer"
        sizes = {"conv": spec.conv, "mamba2": spec.mamba2}.get(mixer)
        biased = sizes is not None and sizes.bias
        products = {"in": self.linear(f"{prefix}.in", entering, biased)}
        if mixer == "delta":
            gates = self.tensors(f"{prefix}.gates")
            products["gates"] = tuple(multiply(x, gates) for x in entering)
        weights = {name: self.tensors(f"{prefix}.{name}") for name in recurrent.vectors(spec, mixer)}

        def mixed(stream: int) -> Floats:
            read, own = recurrent.enter(spec, layer, lambda name: products[name][stream])
            return np.concatenate([recurrent.mix(spec, mixer, weights, read[t], own[t]) for t in self._texts])

        return self.linear(f"{prefix}.out", tuple(map(mixed, range(len(entering)))), biased)

    def _attend(
        self,
        layer: int,
        qkv: Floats,  # (N, q + 2 kv), or q + kv where the keys are values too
        norms: list[Floats] | None,
        sinks: Floats | None,  # (heads,)
    ) -> Floats:  # (N, q)
        spec, own = self.spec, self.spec.heads(layer)
        mixed = np.empty((len(qkv), own.q_size), np.float32)
        by_group = None if sinks is None else sinks.reshape(own.kv_heads, -1)
        for text in self._texts:
            q, *made = np.split(qkv[text], np.cumsum(own.products)[:-1], axis=1)
            size, width = len(q), own.size
            queries, keys = (
                self._turned(layer, x.reshape(size, -1, width), None if norms is None else norms[place], place == 0)
                for place, x in enumerate((q, made[0]))
            )
            values = made[-1].reshape(size, -1, width)
            if spec.value_norm:
                values = rms_norm(values, np.ones(width, np.float32), spec.norm_eps)
            heads = attend(
                queries.swapaxes(0, 1).reshape(own.kv_heads, -1, size, width),
                keys.swapaxes(0, 1),
                values.swapaxes(0, 1),
                self._visible(layer, size),
                scale=spec.attention_scale,
                softcap=spec.attention_softcap,
                sinks=by_group,
            )  # (H, g, S, h)
            mixed[text] = heads.transpose(2, 0, 1, 3).reshape(size, -1)
        return mixed

    def _latent_attention(self, layer: int, latent: LatentSpec, entering: Signal) -> Signal:
        """As at run time: queries meet the cached vector, and heads turn its sum into their values."""
        spec, prefix = self.spec, f"layers.{layer}.attn"
        if latent.query_rank:
            weight, small = self.tensors(f"{prefix}.q_a_norm"), self.linear(f"{prefix}.q_a", entering, spec.qkv_bias)
            normed_small = tuple(rms_norm(x, weight, latent.norm_eps) for x in small)
            queries = self.linear(f"{prefix}.q_b", normed_small, False)
        else:
            queries = self.linear(f"{prefix}.q", entering, False)
        given = self.linear(f"{prefix}.kv_a", entering, spec.qkv_bias)
        by_head = tuple(q.reshape(-1, spec.head_dim) for q in queries)  # (N H, h) each
        meeting = self._by_heads(f"{prefix}.k_b", tuple(q[:, : latent.plain_size] for q in by_head))
        shape = (-1, spec.num_heads, latent.rotary_size)
        turning = tuple(q[:, latent.plain_size :].reshape(shape) for q in by_head)
        weight = self.tensors(f"{prefix}.kv_norm")
        mixed = tuple(self._meet(layer, latent, *each, weight) for each in zip(meeting, turning, given, strict=True))
        heads = self._by_heads(f"{prefix}.v_b", tuple(x.reshape(-1, latent.rank) for x in mixed))
        return self.linear(f"{prefix}.out", tuple(x.reshape(len(x), -1) for x in heads), spec.output_bias)

    def _by_heads(self, name: str, inputs: Signal) -> Signal:  # (N H, K) each -> (N, H, R) each
        def product(x: Floats, weight: Floats) -> Floats:
            heads, inputs = self.spec.num_heads, x.shape[1]
            by_head = x.reshape(-1, heads, inputs).swapaxes(0, 1) @ weight.reshape(heads, -1, inputs).swapaxes(1, 2)
            return np.ascontiguousarray(by_head.swapaxes(0, 1))

        return tuple(product(x, weight) for x, weight in zip(inputs, self.weights(name, inputs), strict=True))

    def _meet(
        self,
        layer: int,
        latent: LatentSpec,
        meeting: Floats,  # (N, H, rank)
        turning: Floats,  # (N, H, r)
        given: Floats,  # (N, rank + r)
        norm: Floats,  # (rank,)
    ) -> Floats:  # (N, H, rank)
        spec, mixed = self.spec, np.empty_like(meeting)
        for text in self._texts:
            kept, key = np.split(given[text], [latent.rank], axis=1)
            kept = rms_norm(kept, norm, latent.norm_eps)
            turned = self._turned(layer, np.concatenate([turning[text], key[:, None]], axis=1), None, False)
            queries = np.concatenate([meeting[text], turned[:, :-1]], axis=2)
            rope = spec.rope_of(layer)
            if rope is not None and rope.query_beta:
                queries = queries * query_factors(rope, np.arange(len(queries)))[:, None, None]
            keys = np.concatenate([kept, turned[:, -1]], axis=1)
            visible, scale = self._visible(layer, len(kept)), spec.attention_scale
            heads = attend(
                queries.swapaxes(0, 1)[None], keys[None], kept[None], visible, scale=scale
            )  # (1, H, S, rank)
            mixed[text] = heads[0].swapaxes(0, 1)
        return mixed

    def _turned(self, layer: int, heads: Floats, norm: Floats | None, are_queries: bool) -> Floats:
        """Queries or keys (S, H, h) after their norm and rotation, if any."""
        spec, index = self.spec, self.spec.rope_index(layer)
        if not spec.norm_after_rope:
            heads = self._head_norm(heads, norm)
        if index >= 0:
            size, rope, (cos, sin) = len(heads), spec.ropes[index], self._tables[index]
            heads = rotate(heads, cos[:size], sin[:size], interleaved=rope.interleaved)
            if are_queries and rope.query_beta:
                heads = heads * query_factors(rope, np.arange(size))[:, None, None]
        return self._head_norm(heads, norm) if spec.norm_after_rope else heads

    def _head_norm(self, heads: Floats, weight: Floats | None) -> Floats:  # (S, H, h) -> (S, H, h)
        if weight is None:
            return heads
        spec = self.spec
        vectors = heads.reshape(len(heads), 1, -1) if spec.whole_norm else heads
        return normed(vectors, weight, None, kind=spec.norm, eps=spec.norm_eps).reshape(heads.shape)

    def _visible(self, layer: int, size: int) -> NDArray[np.bool_]:  # (S, S)
        causal = np.tri(size, dtype=np.bool_)
        window = self.spec.window(layer)
        return causal & ~np.tri(size, k=-window, dtype=np.bool_) if window else causal

    def _mlp(self, layer: int, entering: Signal) -> Signal:
        spec, prefix = self.spec, f"layers.{layer}.mlp"
        moe = spec.experts_of(layer)
        if moe is not None:
            return mix_experts(self, layer, moe, entering)
        name = f"{prefix}.{'gate_up' if spec.gated else 'up'}"
        weights = self.weights(name, entering)
        bias = self.tensors(f"{name}_bias") if spec.mlp_bias else None
        xielu = self.tensors(f"{prefix}.xielu") if spec.activation == "xielu" else None
        kind: dict[str, Any] = {"gated": spec.gated, "activation": spec.activation, "xielu": xielu}
        inner = tuple(activate(x, w, bias, **kind) for x, w in zip(entering, weights, strict=True))
        if spec.inner_norms:
            inner = self.norm(f"{prefix}.inner_norm", inner)
        return self.linear(f"{prefix}.down", inner, spec.mlp_bias)


@dataclass(frozen=True)
class ExpertTokens:
    """Use of a layer's experts by the tokens of the texts."""

    layer: int
    # Tokens that chose each expert.
    counts: NDArray[np.int64]  # (E,)
    # Mean factor of its result over all tokens; 0 for tokens that did not choose it.
    weights: Floats  # (E,)

    @property
    def reached(self) -> NDArray[np.bool_]:  # (E,)
        """Experts that any token chose."""
        return self.counts > 0


def mix_experts(walk: LayerWalk, layer: int, moe: MoESpec, normed: Signal) -> Signal:  # (N, D) -> (N, D)
    """Runs the experts of a layer, and the shared one, on its normed states."""
    prefix = f"layers.{layer}.mlp"
    router = walk.tensors(f"{prefix}.router")
    given: dict[str, Any] = {
        "norm": walk.tensors(f"{prefix}.router_norm") if moe.router == "relu" else None,
        "choice_bias": walk.tensors(f"{prefix}.choice_bias") if moe.choice_bias else None,
    }
    bias, eps = walk.tensors(f"{prefix}.router_bias") if moe.router_bias else None, walk.spec.norm_eps
    shares = tuple(_shares(multiply(x, router, bias), moe, eps, given) for x in normed)  # (N, E)
    chosen = shares[-1] != 0
    walk.uses.append(ExpertTokens(layer, chosen.sum(axis=0), shares[-1].mean(axis=0)))
    mixed = tuple(np.zeros_like(x) for x in normed)
    inner = "gate_up" if moe.gated else "up"
    biases = _biases(walk, layer, moe, inner)
    for expert in range(moe.experts):
        columns = tuple(np.ascontiguousarray(share[:, expert]) for share in shares)
        _add_expert(walk, f"{prefix}.experts.{expert}", inner, normed, columns, mixed, biases[expert])
    if moe.shared_size:
        columns = tuple(np.ones(len(x), np.float32) for x in normed)
        if moe.shared_gate:
            gate = walk.tensors(f"{prefix}.shared.gate")
            columns = tuple(logistic(multiply(x, gate)[:, 0]) for x in normed)
        _add_expert(walk, f"{prefix}.shared", inner, normed, columns, mixed)
    return mixed


# What an expert's two products add.
_Biases = tuple[Floats | None, Floats | None]


def _biases(walk: LayerWalk, layer: int, moe: MoESpec, inner: str) -> list[_Biases]:
    if not moe.expert_bias:
        return [(None, None)] * moe.experts
    into, out = (np.split(walk.tensors(expert_biases(layer, part)), moe.experts) for part in (inner, "down"))
    return list(zip(into, out, strict=True))


def _shares(scores: Floats, moe: MoESpec, eps: float, given: dict[str, Any]) -> Floats:  # (N, E) -> (N, E)
    """Factors of each expert's result; 0 where a token does not use it."""
    chosen, weights = route(scores, moe, eps=eps, **given)
    shares = np.zeros_like(scores)
    np.put_along_axis(shares, chosen, weights, axis=1)
    return shares


def _add_expert(
    walk: LayerWalk,
    prefix: str,
    inner_name: str,
    normed: Signal,  # (N, D)
    shares: Signal,  # (N,)
    mixed: Signal,  # (N, D), added to
    biases: _Biases = (None, None),
) -> None:
    """Adds one expert's results for the tokens that use it, in each stream."""
    leading = shares[-1] != 0
    # The statistics relate streams token by token, so each stream also computes the tokens of the last one.
    used = [(share != 0) | leading for share in shares]
    seen = [leading[rows] for rows in used]
    weighing = shares[-1][leading, None] if walk.weigh_experts else np.float32(1)
    gated = inner_name == "gate_up"
    weights = walk.weights(f"{prefix}.{inner_name}", tuple(x[leading] * weighing for x in normed))
    kind: dict[str, Any] = {"gated": gated, "activation": walk.spec.activation}
    inner = [activate(x[rows], w, biases[0], **kind) for x, rows, w in zip(normed, used, weights, strict=True)]
    weights = walk.weights(f"{prefix}.down", tuple(h[s] * weighing for h, s in zip(inner, seen, strict=True)))
    for out, share, rows, hidden, weight in zip(mixed, shares, used, inner, weights, strict=True):
        out[rows] += share[rows, None] * multiply(hidden, weight, biases[1])


# Tokens that go through gate and up at a time, whose product is the widest: it stays at some tens of MB.
_CHUNK_TOKENS = 1024


def multiply(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:  # (N, C), (R, C) -> (N, R)
    """The product with a matrix, plus a bias (R,)."""
    product: Floats = x @ weight.T
    if bias is not None:
        product += bias
    return product


def activate(
    x: Floats,  # (N, D)
    weight: Floats,  # (2 F, D), or (F, D) where not gated
    bias: Floats | None = None,  # (2 F,)
    *,
    gated: bool = True,
    activation: Activation = "silu",
    xielu: Floats | None = None,  # (2,)
) -> Floats:  # (N, F)
    """The inner values of an MLP."""
    inner = np.empty((len(x), len(weight) // (2 if gated else 1)), np.float32)
    for start in range(0, len(x), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        product = multiply(x[rows], weight, bias)
        if gated:
            gate, up = np.split(product, 2, axis=1)
            inner[rows] = gate_up(activation, gate, up, xielu)
        else:
            inner[rows] = inner_values(activation, product, xielu)
    return inner
