"""One pass of a decoder over rows of texts. Whoever runs it says what its matrices are, and what each row sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import expert_biases
from edgeinfer.bundle.parts import LatentSpec, Mixer, MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.nn import recurrent
from edgeinfer.nn.arithmetic import (
    Floats,
    Ints,
    attend,
    cut_off,
    gate_up,
    inner_values,
    logistic,
    normed,
    query_factors,
    rms_norm,
    rope_tables,
    rotate,
    route,
    softcapped,
)

Bools = NDArray[np.bool_]
# A whole tensor by its canonical name.
Tensors = Callable[[str], Floats]
# Rows of a product's input, and the matrix (R, C) that they are multiplied by.
Multiplied = Sequence[tuple[slice, Floats]]
# What each layer keeps of rows: keys and values of its heads; of latent attention the rotated key and the vector.
Kept = tuple[Floats, Floats]  # (H, n, h) each
# Rows that go through an MLP's first matrix at a time, whose product is the widest: it stays at some tens of MB.
_CHUNK = 1024
# Source: transformers' Gemma3nTextModel: the least mean square that a stream is divided by the root of.
_LEAST_SQUARE = np.float32(1e-5)


class Texts(Protocol):
    """The texts that the rows of a pass belong to."""

    @property
    def rows(self) -> Sequence[slice]:
        """The rows of each text."""

    @property
    def positions(self) -> Ints:  # (S,)
        """The position of each row in its text."""

    def attended(self, layer: int, source: int, text: slice, kept: Kept | None) -> tuple[Floats, Floats, Bools]:
        """What the rows of a text see in a layer: what it `kept` of them, or `source` did, and what was kept before
        (H, T, h); and which of that each row sees (S, T)."""

    def histories(
        self, layer: int, mixer: Mixer, text: slice, read: Floats, own: Floats
    ) -> Iterable[tuple[Floats, Floats]]:  # (n, C), (m, G) each
        """What a recurrence reads of a text up to some of its rows, and what it reads of these rows alone."""


class WholeTexts:
    """Texts that are evaluated at once from their beginnings, one after the other in the rows."""

    def __init__(self, spec: DecoderSpec, lengths: Sequence[int]) -> None:
        ends = np.cumsum([0, *lengths])
        self.rows = [slice(int(start), int(stop)) for start, stop in pairwise(ends)]
        self.positions = np.concatenate([np.arange(length) for length in lengths])
        self._spec = spec
        self._sources = set(spec.kv_sources)
        self._kept: dict[tuple[int, int], Kept] = {}

    def attended(self, layer: int, source: int, text: slice, kept: Kept | None) -> tuple[Floats, Floats, Bools]:
        if kept is None:
            kept = self._kept[source, text.start]
        elif layer in self._sources:
            self._kept[layer, text.start] = kept
        size, window = text.stop - text.start, self._spec.window(layer)
        visible = np.tri(size, dtype=np.bool_)
        if window:
            visible &= ~np.tri(size, k=-window, dtype=np.bool_)
        return *kept, visible

    def histories(
        self, layer: int, mixer: Mixer, text: slice, read: Floats, own: Floats
    ) -> Iterable[tuple[Floats, Floats]]:
        return ((read, own),)


@dataclass(frozen=True)
class DecoderRun:
    """What the layers of a pass share."""

    texts: Texts
    mask: Bools | None = None  # whether attention and MLP of each layer run (L, 2); None runs all
    vectors: Floats | None = None  # per-layer embeddings (S, L, P)
    expert_count: int | None = None  # of each token; None is the model's own
    expert_bias: Floats | None = None  # added to the routers' scores before choosing (L, E)
    used: dict[int, Ints] = field(default_factory=dict)  # filled with the experts of each row (S, k), -1 for none

    def parts(self, layer: int) -> tuple[bool, bool]:
        if self.mask is None:
            return True, True
        return bool(self.mask[layer, 0]), bool(self.mask[layer, 1])


def multiplied(x: Floats, matrices: Multiplied, bias: Floats | None = None) -> Floats:  # (S, K) -> (S, N)
    products = [multiply(x[rows], weight, bias) for rows, weight in matrices]
    return products[0] if len(products) == 1 else np.concatenate(products)


def multiply(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:  # (N, C), (R, C), (R,) -> (N, R)
    product: Floats = x @ weight.T
    if bias is not None:
        product += bias
    return product


class Decoder:
    """The layers of a decoder, and its ends. Subclasses see every matrix that is quantized before it is multiplied by,
    and may replace it."""

    def __init__(self, spec: DecoderSpec, tensor: Tensors, longest: int) -> None:
        self.spec = spec
        self.tensor = tensor
        self.rotate_as(longest, longest)

    def rotate_as(self, longest: int, context: int) -> None:
        """Rotates as in texts of `context` tokens, up to the position `longest`."""
        self.tables = [rope_tables(rope, longest, context) for rope in self.spec.ropes]

    def matrices(self, name: str, x: Floats) -> Multiplied:
        """What the rows of a product's input are multiplied by."""
        return ((slice(0, len(x)), self.tensor(name)),)

    @contextmanager
    def routed(self, share: Floats) -> Iterator[Bools]:  # (S,)
        """The rows that an expert computes, given the factors of its results; the products within are its own."""
        yield share != 0

    def experts(self, layer: int, shares: Floats) -> Sequence[int]:  # (S, E)
        """The experts of a layer that are computed, given the factors of their results."""
        used: list[int] = np.flatnonzero(shares.any(axis=0)).tolist()
        return used

    def mix(
        self,
        layer: int,
        queries: Floats,  # (H, g, S, h)
        keys: Floats,  # (H, T, h)
        values: Floats,  # (H, T, h)
        visible: Bools,  # (S, T)
    ) -> Floats:  # (H, g, S, h)
        """Attention's result for every query head of a layer."""
        spec = self.spec
        sinks = self.tensor(f"layers.{layer}.attn.sinks").reshape(queries.shape[:2]) if spec.sinks else None
        scale, cap = spec.attention_scale, spec.attention_softcap
        return attend(queries, keys, values, visible, scale=scale, softcap=cap, sinks=sinks)

    def small(self, name: str, x: Floats) -> Multiplied:
        """What the rows are multiplied by where the matrix is small, and never quantized."""
        return ((slice(0, len(x)), self.tensor(name)),)

    def product(self, name: str, x: Floats, bias: Floats | None = None) -> Floats:  # (S, K) -> (S, N)
        return multiplied(x, self.matrices(name, x), bias)

    def norm(self, name: str, x: Floats) -> Floats:  # (S, D) -> (S, D)
        bias = self._bias(name, self.spec.norm_bias)
        return normed(x, self.tensor(name), bias, kind=self.spec.norm, eps=self.spec.norm_eps)

    def entered(self, tokens: Ints, embedded: Floats) -> tuple[Floats, Floats | None]:
        """What enters the first layer, of all streams (S, A D), and the per-layer embeddings, if there are any."""
        ends = _Ends(self)
        return ends.entered(embedded), ends.vectors(tokens, embedded)

    def logits(self, x: Floats) -> Floats:  # (R, A D) -> (R, V)
        last = self.norm("final_norm", _Ends(self).left(x))
        return softcapped(self.product("head", last, self._bias("head", self.spec.head_bias)), self.spec.logit_softcap)

    def layer(self, layer: int, x: Floats, run: DecoderRun) -> Floats:  # (S, A D) -> likewise
        """The hidden states after a layer, from those before it, which are overwritten."""
        spec, feeds, ends = self.spec, run.parts(layer)[1], _Ends(self)
        if spec.streams is not None:
            predicted = ends.predicted(layer, x, feeds)
            first = self._layer(layer, predicted[:, 0].copy(), run)
            return ends.corrected(layer, predicted, first, run.vectors, feeds)
        x = self._layer(layer, x, run)
        return ends.ended(layer, x, run.vectors) if feeds and layer not in spec.no_mlp else x

    def _layer(self, layer: int, x: Floats, run: DecoderRun) -> Floats:  # (S, D) -> (S, D)
        spec, (mixes, feeds) = self.spec, run.parts(layer)
        parts = spec.parts_of(layer) if mixes else ()
        entering = self._entering(f"layers.{layer}.attn", x) if parts or spec.parallel or spec.streams else x
        if parts:
            x += self._leaving(f"layers.{layer}.attn", self._mixed(layer, parts, entering, run))
        if spec.streams is not None and feeds:
            x = _Ends(self).augmented(layer, entering, x)
        if feeds and layer not in spec.no_mlp:
            moe, part = spec.experts_of(layer), f"layers.{layer}.mlp"
            if not spec.parallel:
                entering = x if moe is not None and moe.with_mlp else self._entering(part, x)
            given = self._mlp(layer, entering) if moe is None else self._mixture(layer, moe, entering, run)
            x += self._leaving(part, given)
        return x

    def _bias(self, name: str, biased: bool) -> Floats | None:
        return self.tensor(f"{name}_bias") if biased else None

    def _entering(self, part: str, x: Floats) -> Floats:  # (S, D) -> (S, D)
        """Input of attention or MLP."""
        return self.norm(f"{part}_norm", x) if self.spec.pre_norm else x

    def _leaving(self, part: str, given: Floats) -> Floats:  # (S, D) -> (S, D)
        """The output of attention or MLP as it is added to the hidden states."""
        return self.norm(f"{part}_post_norm", given) if self.spec.post_norm else given

    def _mixed(self, layer: int, parts: Sequence[Mixer], x: Floats, run: DecoderRun) -> Floats:  # (S, D) -> (S, D)
        """Output of a layer's attention, of its substitute, or the sum of both."""
        if self.spec.latent is not None:
            return self._latent_attention(layer, self.spec.latent, x, run.texts)
        given = (
            self._attention(layer, x, run.texts) if part == "attention" else self._recur(layer, part, x, run.texts)
            for part in parts
        )
        return reduce(np.add, given)

    def _recur(self, layer: int, mixer: Mixer, x: Floats, texts: Texts) -> Floats:  # (S, D) -> (S, D)
        spec, prefix = self.spec, f"layers.{layer}.mixer"
        sizes = {"conv": spec.conv, "mamba2": spec.mamba2}.get(mixer)
        into, out = (self._bias(f"{prefix}.{name}", sizes is not None and sizes.bias) for name in ("in", "out"))
        products = {"in": self.product(f"{prefix}.in", x, into)}
        if mixer == "delta":
            products["gates"] = multiplied(x, self.small(f"{prefix}.gates", x))
        weights = {name: self.tensor(f"{prefix}.{name}") for name in recurrent.vectors(spec, mixer)}
        read, own = recurrent.enter(spec, layer, products.__getitem__)
        mixed = [
            recurrent.mix(spec, mixer, weights, *each)
            for text in texts.rows
            for each in texts.histories(layer, mixer, text, read[text], own[text])
        ]
        return self.product(f"{prefix}.out", np.concatenate(mixed), out)

    def _attention(self, layer: int, x: Floats, texts: Texts) -> Floats:  # (S, D) -> (S, D)
        spec, own, prefix = self.spec, self.spec.heads(layer), f"layers.{layer}.attn"
        products = self.product(f"{prefix}.qkv", x, self._bias(f"{prefix}.qkv", spec.qkv_bias))
        mixed = np.empty((len(x), own.q_size), np.float32)
        for text in texts.rows:
            q, *made = np.split(products[text], np.cumsum(own.products)[:-1], axis=1)
            size, positions, kept = len(q), texts.positions[text], None
            queries = self._turned(layer, "q", q.reshape(size, own.heads, own.size), positions)
            if own.owns:
                keys, values = (made[place].reshape(size, own.kv_heads, own.size) for place in (0, -1))
                keys = self._turned(layer, "k", keys, positions)
                if spec.value_norm:
                    values = rms_norm(values, np.ones(own.size, np.float32), spec.norm_eps)
                kept = keys.swapaxes(0, 1), values.swapaxes(0, 1)
            grouped = queries.swapaxes(0, 1).reshape(own.kv_heads, -1, size, own.size)
            heads = self.mix(layer, grouped, *texts.attended(layer, own.source, text, kept))  # (H, g, S, h)
            mixed[text] = heads.transpose(2, 0, 1, 3).reshape(size, -1)
        if spec.output_gate:
            gate = logistic(self.product(f"{prefix}.gate", x))
            mixed *= np.repeat(gate, own.size, axis=1) if spec.output_gate == "head" else gate
        if spec.inner_norms:
            mixed = self.norm(f"{prefix}.inner_norm", mixed)
        return self.product(f"{prefix}.out", mixed, self._bias(f"{prefix}.out", spec.output_bias))

    def _latent_attention(self, layer: int, latent: LatentSpec, x: Floats, texts: Texts) -> Floats:  # (S, D) -> (S, D)
        """Queries meet the vectors that are kept, and heads turn their sum into values."""
        spec, prefix = self.spec, f"layers.{layer}.attn"
        if latent.query_rank:
            small = self.product(f"{prefix}.q_a", x, self._bias(f"{prefix}.q_a", spec.qkv_bias))
            queries = self.product(f"{prefix}.q_b", rms_norm(small, self.tensor(f"{prefix}.q_a_norm"), latent.norm_eps))
        else:
            queries = self.product(f"{prefix}.q", x)
        made = self.product(f"{prefix}.kv_a", x, self._bias(f"{prefix}.kv_a", spec.qkv_bias))
        plain, turning = np.split(queries.reshape(-1, spec.head_dim), [latent.plain_size], axis=1)  # (S H, h)
        meeting = self._by_heads(f"{prefix}.k_b", plain)  # (S, H, rank)
        turning = turning.reshape(-1, spec.num_heads, latent.rotary_size)
        norm, mixed, rope = self.tensor(f"{prefix}.kv_norm"), np.empty_like(meeting), spec.rope_of(layer)
        for text in texts.rows:
            given, key = np.split(made[text], [latent.rank], axis=1)
            given, positions = rms_norm(given, norm, latent.norm_eps), texts.positions[text]
            turned = self._rotated(layer, np.concatenate([turning[text], key[:, None]], axis=1), positions)
            rows = np.concatenate([meeting[text], turned[:, :-1]], axis=2)  # (S, H, rank + r)
            if rope is not None and rope.query_beta:
                rows = rows * query_factors(rope, positions)[:, None, None]
            keys, vectors, visible = texts.attended(layer, layer, text, (turned[:, -1][None], given[None]))
            keys = np.concatenate([vectors, keys], axis=2)
            mixed[text] = self.mix(layer, rows.swapaxes(0, 1)[None], keys, vectors, visible)[0].swapaxes(0, 1)
        heads = self._by_heads(f"{prefix}.v_b", mixed.reshape(-1, latent.rank))
        return self.product(f"{prefix}.out", heads.reshape(len(x), -1), self._bias(f"{prefix}.out", spec.output_bias))

    def _by_heads(self, name: str, x: Floats) -> Floats:  # (S H, K) -> (S, H, R)
        """Products of each head with a matrix of its own."""
        heads = self.spec.num_heads
        products = [
            x[rows].reshape(-1, heads, x.shape[1]).swapaxes(0, 1) @ weight.reshape(heads, -1, x.shape[1]).swapaxes(1, 2)
            for rows, weight in self.matrices(name, x)
        ]
        return np.concatenate([np.ascontiguousarray(each.swapaxes(0, 1)) for each in products])

    def _turned(self, layer: int, part: str, heads: Floats, positions: Ints) -> Floats:  # (S, H, h) -> (S, H, h)
        """Queries ("q") or keys ("k") of a layer after their norm and rotation, as far as it has them."""
        spec, name, rope = self.spec, f"layers.{layer}.attn.{part}_norm", self.spec.rope_of(layer)
        if not spec.norm_after_rope:
            heads = self._head_norm(name, heads)
        heads = self._rotated(layer, heads, positions)
        if rope is not None and part == "q" and rope.query_beta:
            heads = heads * query_factors(rope, positions)[:, None, None]
        return self._head_norm(name, heads) if spec.norm_after_rope else heads

    def _rotated(self, layer: int, heads: Floats, positions: Ints) -> Floats:  # (S, H, h) -> (S, H, h)
        index = self.spec.rope_index(layer)
        if index < 0:
            return heads
        rope, (cos, sin) = self.spec.ropes[index], self.tables[index]
        return rotate(heads, cos[positions], sin[positions], interleaved=rope.interleaved)

    def _head_norm(self, name: str, heads: Floats) -> Floats:  # (S, H, h) -> (S, H, h)
        """Queries or keys after their norm, of each head or of all together, where the model has one."""
        spec = self.spec
        if not spec.qk_norm:
            return heads
        vectors = heads.reshape(len(heads), -1) if spec.whole_norm else heads
        return normed(vectors, self.tensor(name), None, kind=spec.norm, eps=spec.norm_eps).reshape(heads.shape)

    def _mlp(self, layer: int, x: Floats) -> Floats:  # (S, D) -> (S, D)
        spec, prefix = self.spec, f"layers.{layer}.mlp"
        names = f"{prefix}.{'gate_up' if spec.gated else 'up'}", f"{prefix}.down"
        biases = tuple(self._bias(name, spec.mlp_bias) for name in names)
        xielu = self.tensor(f"{prefix}.xielu") if spec.activation == "xielu" else None
        inner = self._activated(names[0], x, biases[0], gated=spec.gated, cut=spec.cut(layer), xielu=xielu)
        if spec.inner_norms:
            inner = self.norm(f"{prefix}.inner_norm", inner)
        return self.product(names[1], inner, biases[1])

    def _activated(
        self,
        name: str,
        x: Floats,  # (S, D)
        bias: Floats | None,
        *,
        gated: bool,
        cut: float = 0.0,  # as `DecoderSpec.sparsity`
        xielu: Floats | None = None,  # (2,)
    ) -> Floats:  # (S, F)
        """The inner values of an MLP."""
        activation, matrices = self.spec.activation, self.matrices(name, x)
        inner = np.empty((len(x), len(matrices[0][1]) // (2 if gated else 1)), np.float32)
        for rows, weight in matrices:
            for start in range(rows.start, rows.stop, _CHUNK):
                part = slice(start, min(start + _CHUNK, rows.stop))
                product = multiply(x[part], weight, bias)
                if gated:
                    gate, up = np.split(product, 2, axis=1)
                    inner[part] = gate_up(activation, cut_off(gate, cut), up, xielu)
                else:
                    inner[part] = inner_values(activation, product, xielu)
        return inner

    def _mixture(self, layer: int, moe: MoESpec, x: Floats, run: DecoderRun) -> Floats:  # (S, D) -> (S, D)
        """Output of a layer's experts, and of the MLP next to them if it has one."""
        if not moe.with_mlp:
            return self._experts(layer, moe, x, x, run)
        prefix = f"layers.{layer}.mlp"
        routed, entering = (self.norm(f"{prefix}.{name}", x) for name in ("router_input_norm", "experts_norm"))
        mixed = self._experts(layer, moe, routed, entering, run)
        dense = self._mlp(layer, self.norm(f"{prefix}_norm", x))
        return self.norm(f"{prefix}.experts_post_norm", mixed) + self.norm(f"{prefix}.dense_post_norm", dense)

    def _experts(
        self, layer: int, moe: MoESpec, routed: Floats, x: Floats, run: DecoderRun
    ) -> Floats:  # (S, D), (S, D) -> (S, D)
        prefix, names = f"layers.{layer}.mlp", ("gate_up" if moe.gated else "up", "down")
        router = f"{prefix}.router"
        scores = multiplied(routed, self.small(router, routed), self._bias(router, moe.router_bias))
        chosen, factors = route(
            scores,
            moe,
            count=run.expert_count,
            bias=None if run.expert_bias is None else run.expert_bias[layer],
            choice_bias=self.tensor(f"{prefix}.choice_bias") if moe.choice_bias else None,
            norm=self.tensor(f"{prefix}.router_norm") if moe.router == "relu" else None,
            eps=self.spec.norm_eps,
        )
        if moe.with_mlp:
            factors = factors * self.tensor(f"{prefix}.expert_scale")[chosen]
        run.used[layer] = np.where(factors != 0, chosen, -1)
        shares = np.zeros_like(scores)
        np.put_along_axis(shares, chosen, factors, axis=1)
        joined = [self.tensor(expert_biases(layer, name)) if moe.expert_bias else None for name in names]
        biases = [[None] * moe.experts if each is None else np.split(each, moe.experts) for each in joined]
        mixed = np.zeros_like(x)
        for expert in self.experts(layer, shares):
            share, own = np.ascontiguousarray(shares[:, expert]), (biases[0][expert], biases[1][expert])
            self._add_expert(f"{prefix}.experts.{expert}", names, own, x, share, mixed)
        if moe.shared_size:
            share = np.ones(len(x), np.float32)
            if moe.shared_gate:
                share = logistic(multiplied(x, self.small(f"{prefix}.shared.gate", x))[:, 0])
            self._add_expert(f"{prefix}.shared", names, (None, None), x, share, mixed)
        return mixed

    def _add_expert(
        self,
        prefix: str,
        names: tuple[str, str],
        biases: tuple[Floats | None, Floats | None],
        x: Floats,  # (S, D)
        share: Floats,  # (S,), the factor of its result for each row
        mixed: Floats,  # (S, D), added to
    ) -> None:
        with self.routed(share) as rows:
            inner = self._activated(f"{prefix}.{names[0]}", x[rows], biases[0], gated=names[0] == "gate_up")
            mixed[rows] += share[rows, None] * self.product(f"{prefix}.{names[1]}", inner, biases[1])


@dataclass(frozen=True)
class _Ends:
    """What is around the layers' attention and MLPs in decoders with per-layer embeddings or several streams."""

    decoder: Decoder

    @property
    def spec(self) -> DecoderSpec:
        return self.decoder.spec

    def vectors(self, tokens: Ints, embedded: Floats) -> Floats | None:  # (S,), (S, D) -> (S, L, P)
        """The vectors of per-layer embeddings, where the decoder has any."""
        spec, decoder = self.spec, self.decoder
        if spec.per_layer is None:
            return None
        known = np.where(tokens < spec.per_layer.vocab_size, tokens, 0)
        rows = known[:, None] * spec.num_layers + np.arange(spec.num_layers)
        product = decoder.product("per_layer.projection", embedded).reshape(*rows.shape, spec.per_layer.size)
        vectors: Floats = decoder.norm("per_layer.norm", product) + decoder.tensor(PER_LAYER_TABLE)[rows]
        return vectors

    def _given(self, layer: int, x: Floats, vectors: Floats) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """Output of a layer's per-layer embedding."""
        prefix, decoder = f"layers.{layer}.per_layer", self.decoder
        gate = inner_values(self.spec.activation, decoder.product(f"{prefix}.gate", x))
        return decoder.norm(f"{prefix}.norm", decoder.product(f"{prefix}.out", gate * vectors[:, layer]))

    def ended(self, layer: int, x: Floats, vectors: Floats | None) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """The hidden states after a layer: with its per-layer embedding, and scaled, where the decoder has that."""
        if vectors is not None:
            x += self._given(layer, x, vectors)
        if self.spec.layer_scales:
            x *= self.decoder.tensor("layer_scales")[layer]
        return x

    def entered(self, x: Floats) -> Floats:  # (S, D) -> (S, A D)
        """Embeddings in all streams, where the decoder has more than one."""
        if self.spec.streams is None:
            return x
        others = self._alike(x, self.decoder.product("streams.enter", x))
        return np.concatenate([x[:, None], others], axis=1).reshape(len(x), -1)

    def left(self, x: Floats) -> Floats:  # (R, A D) -> (R, D)
        """Input of the head, from all streams."""
        if self.spec.streams is None:
            return x
        apart, weights = self._apart(x), self.decoder.tensor("streams.leave")
        matrices = weights.reshape(-1, self.spec.hidden_size, self.spec.hidden_size)
        others = np.einsum("rad,aed->rae", apart[:, 1:], matrices).reshape(len(x), -1)
        mean: Floats = np.concatenate([apart[:, :1], self._alike(apart[:, 0], others)], axis=1).mean(axis=1)
        return mean

    def _apart(self, x: Floats) -> Floats:  # (S, A D) -> (S, A, D)
        return x.reshape(len(x), -1, self.spec.hidden_size)

    def _alike(self, first: Floats, others: Floats) -> Floats:  # (S, D), (S, (A - 1) D) -> (S, A - 1, D)
        """The other streams with the magnitude of the first."""
        apart = self._apart(others)
        wanted = np.square(first).mean(axis=1, keepdims=True)[:, None]
        own = np.maximum(np.square(apart).mean(axis=2, keepdims=True), _LEAST_SQUARE)
        alike: Floats = apart * np.sqrt(wanted / own)
        return alike

    def _routed(self, layer: int, x: Floats, runs: bool) -> Floats:  # (S, D) -> (S, A)
        """Output of a layer's router of streams."""
        prefix, decoder = f"layers.{layer}.streams", self.decoder
        routed: Floats = np.tanh(decoder.product(f"{prefix}.router", decoder.norm(f"{prefix}.router_norm", x)))
        return routed * np.float32(runs)

    def predicted(self, layer: int, x: Floats, runs: bool) -> Floats:  # (S, A D) -> (S, A, D)
        """The streams that a layer begins with."""
        apart = self._apart(x)
        weights = self.decoder.product(f"layers.{layer}.streams.predict", self._routed(layer, apart[:, 0], runs))
        changed: Floats = apart + weights.reshape(len(x), apart.shape[1], -1) @ apart
        return changed

    def augmented(self, layer: int, normed: Floats, x: Floats) -> Floats:  # (S, D), (S, D) -> (S, D)
        """Hidden states after attention, with the augmented residual of what that read."""
        prefix, decoder = f"layers.{layer}.laurel", self.decoder
        given = decoder.product(f"{prefix}.up", decoder.product(f"{prefix}.down", normed))
        return (x + normed + decoder.norm(f"{prefix}.norm", given)) * np.float32(math.sqrt(0.5))

    def corrected(
        self, layer: int, start: Floats, x: Floats, vectors: Floats | None, runs: bool
    ) -> Floats:  # (S, A, D), (S, D), (S, L, P) -> (S, A D)
        """The streams after a layer."""
        prefix, decoder = f"layers.{layer}.streams", self.decoder
        shares = 1 + decoder.product(f"{prefix}.correct", self._routed(layer, x, runs))  # (S, A)
        streams = start + shares[:, :, None] * (x - start[:, 0])[:, None]
        if runs and vectors is not None:
            first = streams[:, 0]
            assert self.spec.streams is not None, "only such decoders have streams"
            if self.spec.streams.scaled:
                first = first * decoder.tensor(f"{prefix}.scale")
            streams[:, 1:] += self._given(layer, first, vectors)[:, None]
        whole: Floats = streams.reshape(len(x), -1)
        return whole
