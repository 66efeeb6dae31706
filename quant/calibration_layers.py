"""One layer of a decoder over whole texts, its experts included, in one or two versions at once.

A version, a stream, computes with the weights as they are or with what quantizing made of them, layer after layer.
Every matrix is shown, with the statistics of what enters it, before it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import attend, rms_norm, rope_tables, rotate, route, silu
from edgeinfer.bundle.spec import DecoderSpec, MoESpec, RopeSpec, later_fields
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator

__all__ = ["ExpertTokens", "LayerWalk", "Signal", "Tensors", "Visit", "activate", "mix_experts", "multiply"]

Floats = NDArray[np.float32]
# The same tokens in every stream, (N, width) each.
Signal = tuple[Floats, ...]

# Tokens that go through gate and up at a time, whose product is the widest: it stays at some tens of MB.
_CHUNK_TOKENS = 1024
# A whole tensor by its canonical name.
Tensors = Callable[[str], Floats]
# What a matrix becomes, given its name, its values (R, C) and what enters it; None: no token of the texts does.
Visit = Callable[[str, Floats, InputStatistics | None], Floats]


def multiply(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:  # (N, C), (R, C) -> (N, R)
    """The product with a matrix, and a bias (R,) added."""
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
) -> Floats:  # (N, F)
    """The inner values of an MLP."""
    inner = np.empty((len(x), len(weight) // (2 if gated else 1)), np.float32)
    for start in range(0, len(x), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        product = multiply(x[rows], weight, bias)
        if gated:
            gate, up = np.split(product, 2, axis=1)
            np.multiply(silu(gate), up, out=inner[rows])
        else:
            inner[rows] = silu(product)
    return inner


# Fields that tell nothing that LayerWalk leaves out: it takes rotation from tables, and other fields than these, where
# they are not what they are by default, are parts that it does not compute.
_COMPUTED_OF_ROPES = ("beta_fast", "beta_slow", "truncate")


def _refuse_uncomputed(spec: DecoderSpec) -> None:
    """Refuses a decoder with a part that calibration would leave out."""
    parts: list[DecoderSpec | RopeSpec | MoESpec] = [spec, *spec.ropes]
    if spec.moe is not None:
        parts.append(spec.moe)
    found = [(part, name) for part in parts for name in later_fields(part) if name not in _COMPUTED_OF_ROPES]
    if spec.activation != "silu":
        found.append((spec, "activation"))
    if found:
        part, name = found[0]
        message = f"Calibration of a decoder with {name}={getattr(part, name)!r} is not supported yet."
        raise UnsupportedArchitectureError(message, "Export it without a calibration text.")


class LayerWalk:
    """Runs the layers of a decoder, one after the other, over texts.

    Raises:
        UnsupportedArchitectureError: the decoder has a part that is not computed here.

    Attributes:
        weigh_experts: what enters an expert is shown multiplied by what its result will be.

    Args:
        tensors: gives a weight; asked for once per layer and weight.
        lengths: tokens of each text. Texts do not see each other.
        visit: called for every matrix of a layer, in the order they are multiplied by; returns what stands for it in
            the streams that are quantized.
        quantized: for each stream, whether it computes with what `visit` returns. Statistics are of the last stream;
            with two streams they relate it to the first.
        hessian: whether statistics hold second moments between inputs, not only of each.
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
        _refuse_uncomputed(spec)
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
        self._cos, self._sin = rope_tables(spec.rope, longest, longest)

    def run(self, layer: int, states: Signal) -> Signal:
        """The hidden states after a layer, of those before it, which are overwritten."""
        for part in (self._attention, self._mlp):
            for state, change in zip(states, part(layer, states), strict=True):
                state += change
        return states

    def norm(self, name: str, states: Signal) -> Signal:
        """The states normed by a weight of this name."""
        weight = self.tensors(name)
        return tuple(rms_norm(x, weight, self.spec.norm_eps) for x in states)

    def statistics(self, inputs: Signal) -> InputStatistics | None:
        """Statistics of what enters a matrix; None where nothing does.

        Raises:
            UsageError: it is not finite.
        """
        if not len(inputs[-1]):
            return None
        *float_inputs, x = inputs
        gathered = StatisticsAccumulator(x.shape[1], self._hessian, self._hessian and bool(float_inputs))
        gathered.add(x, *float_inputs)
        return gathered.result()

    def weights(self, name: str, inputs: Signal) -> Signal:
        """Shows a matrix and what enters it; returns it as each stream multiplies by it, (R, C) each."""
        weight = self.tensors(name)
        replacement = self.visit(name, weight, self.statistics(inputs))
        return tuple(replacement if quantized else weight for quantized in self.quantized)

    def linear(self, name: str, inputs: Signal, bias: bool) -> Signal:
        """The products of a matrix with what enters it."""
        weights = self.weights(name, inputs)
        added = self.tensors(f"{name}_bias") if bias else None
        return tuple(multiply(x, w, added) for x, w in zip(inputs, weights, strict=True))

    def _attention(self, layer: int, states: Signal) -> Signal:
        spec, prefix = self.spec, f"layers.{layer}."
        products = self.linear(f"{prefix}attn.qkv", self.norm(f"{prefix}attn_norm", states), spec.qkv_bias)
        norms = [self.tensors(f"{prefix}attn.{n}_norm") for n in "qk"] if spec.qk_norm else None
        mixed = tuple(self._attend(layer, qkv, norms) for qkv in products)
        return self.linear(f"{prefix}attn.out", mixed, spec.output_bias)

    def _attend(self, layer: int, qkv: Floats, norms: list[Floats] | None) -> Floats:  # (N, q + 2 kv) -> (N, q)
        spec = self.spec
        mixed = np.empty((len(qkv), spec.q_size), np.float32)
        group, width = spec.num_heads // spec.num_kv_heads, spec.head_dim
        for text in self._texts:
            q, k, v = np.split(qkv[text], [spec.q_size, spec.q_size + spec.kv_size], axis=1)
            if norms is not None:
                q, k = (self._head_norm(x, weight) for x, weight in zip((q, k), norms, strict=True))
            size = len(q)
            cos, sin = self._cos[:size], self._sin[:size]
            queries = rotate(q.reshape(size, -1, width), cos, sin).swapaxes(0, 1)
            keys = rotate(k.reshape(size, -1, width), cos, sin).swapaxes(0, 1)
            values = v.reshape(size, -1, width).swapaxes(0, 1)
            grouped = queries.reshape(spec.num_kv_heads, group, size, width)
            heads = attend(grouped, keys, values, self._visible(layer, size))  # (H, g, S, h)
            mixed[text] = heads.transpose(2, 0, 1, 3).reshape(size, -1)
        return mixed

    def _head_norm(self, x: Floats, weight: Floats) -> Floats:  # (S, H h) -> (S, H h)
        width = x.shape[1] if self.spec.whole_norm else self.spec.head_dim
        return rms_norm(x.reshape(len(x), -1, width), weight, self.spec.norm_eps).reshape(x.shape)

    def _visible(self, layer: int, size: int) -> NDArray[np.bool_]:  # (S, S)
        causal = np.tri(size, dtype=np.bool_)
        window = self.spec.window(layer)
        return causal & ~np.tri(size, k=-window, dtype=np.bool_) if window else causal

    def _mlp(self, layer: int, states: Signal) -> Signal:
        prefix = f"layers.{layer}.mlp"
        normed = self.norm(f"{prefix}_norm", states)
        moe = self.spec.experts_of(layer)
        if moe is not None:
            return mix_experts(self, layer, moe, normed)
        weights = self.weights(f"{prefix}.gate_up", normed)
        bias = self.tensors(f"{prefix}.gate_up_bias") if self.spec.mlp_bias else None
        inner = tuple(activate(x, w, bias) for x, w in zip(normed, weights, strict=True))
        return self.linear(f"{prefix}.down", inner, self.spec.mlp_bias)


@dataclass(frozen=True)
class ExpertTokens:
    """How much the tokens of the texts used the experts of a layer.

    Attributes:
        counts: tokens that chose each expert.
        weights: the mean, over all tokens, of what its result was multiplied by; 0 for tokens that did not choose it.
    """

    layer: int
    counts: NDArray[np.int64]  # (E,)
    weights: Floats  # (E,)

    @property
    def reached(self) -> NDArray[np.bool_]:  # (E,)
        """Experts that any token chose."""
        return self.counts > 0


def mix_experts(walk: LayerWalk, layer: int, moe: MoESpec, normed: Signal) -> Signal:  # (N, D) -> (N, D)
    """Runs the experts of a layer, and the shared one, on its normed states."""
    prefix = f"layers.{layer}.mlp"
    router = walk.tensors(f"{prefix}.router")
    norm = walk.tensors(f"{prefix}.router_norm") if moe.router == "relu" else None
    shares = tuple(_shares(multiply(x, router), moe, norm, walk.spec.norm_eps) for x in normed)  # (N, E)
    chosen = shares[-1] != 0
    walk.uses.append(ExpertTokens(layer, chosen.sum(axis=0), shares[-1].mean(axis=0)))
    mixed = tuple(np.zeros_like(x) for x in normed)
    inner = "gate_up" if moe.gated else "up"
    for expert in range(moe.experts):
        columns = tuple(np.ascontiguousarray(share[:, expert]) for share in shares)
        _add_expert(walk, f"{prefix}.experts.{expert}", inner, normed, columns, mixed)
    if moe.shared_size:
        columns = tuple(np.ones(len(x), np.float32) for x in normed)
        if moe.shared_gate:
            gate = walk.tensors(f"{prefix}.shared.gate")
            columns = tuple(_logistic(multiply(x, gate)[:, 0]) for x in normed)
        _add_expert(walk, f"{prefix}.shared", "gate_up", normed, columns, mixed)
    return mixed


def _shares(scores: Floats, moe: MoESpec, norm: Floats | None, eps: float) -> Floats:  # (N, E) -> (N, E)
    """What each expert's result is multiplied by; 0 where a token does not use it."""
    chosen, weights = route(scores, moe, norm=norm, eps=eps)
    shares = np.zeros_like(scores)
    np.put_along_axis(shares, chosen, weights, axis=1)
    return shares


def _logistic(x: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return result


def _add_expert(
    walk: LayerWalk,
    prefix: str,
    inner_name: str,
    normed: Signal,  # (N, D)
    shares: Signal,  # (N,)
    mixed: Signal,  # (N, D), added to
) -> None:
    """Adds one expert's results for the tokens that use it, in each stream."""
    leading = shares[-1] != 0
    # The statistics relate streams token by token, so each stream also computes the tokens of the last one.
    used = [(share != 0) | leading for share in shares]
    seen = [leading[rows] for rows in used]
    weighing = shares[-1][leading, None] if walk.weigh_experts else np.float32(1)
    gated = inner_name == "gate_up"
    weights = walk.weights(f"{prefix}.{inner_name}", tuple(x[leading] * weighing for x in normed))
    inner = [activate(x[rows], w, gated=gated) for x, rows, w in zip(normed, used, weights, strict=True)]
    weights = walk.weights(f"{prefix}.down", tuple(h[s] * weighing for h, s in zip(inner, seen, strict=True)))
    for out, share, rows, hidden, weight in zip(mixed, shares, used, inner, weights, strict=True):
        out[rows] += share[rows, None] * multiply(hidden, weight)
