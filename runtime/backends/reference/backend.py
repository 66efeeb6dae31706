"""The reference backend: a decoder in plain numpy, slow and obvious, the oracle of the tests, and its factory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import recurrent
from edgeinfer.bundle.arithmetic import (
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
    rotation_border,
    route,
    softcapped,
)
from edgeinfer.bundle.codecs import segment_places
from edgeinfer.bundle.geometry import FLOAT32, Geometry, KVLayer
from edgeinfer.bundle.key_centres import key_centres
from edgeinfer.bundle.kinds import KINDS, read_blocks
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Capabilities, TensorEntry
from edgeinfer.bundle.packing import QuantizedShape, dequantize, expert_biases, expert_tensor
from edgeinfer.bundle.parts import LatentSpec, Mixer, MoESpec, with_sources
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.core.errors import BundleError
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice, KVCache, Pass, PassResult
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder, counting_experts
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import KVBuffers, visible_rows
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.paging.layout import PageLayout, pages_for
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.planning.plan_input import BackendChoice, ModelMemory

# Source: transformers' Gemma3nTextModel: the least mean square that a stream is divided by the root of.
_LEAST_SQUARE = np.float32(1e-5)


@dataclass(frozen=True)
class ReferenceEnds:
    """The ends of a decoder's layers."""

    spec: DecoderSpec
    # `linear`, `norm`: product and norm by the names of their weights.
    linear: Callable[[str, Floats], Floats]
    norm: Callable[[str, Floats], Floats]
    weight: Callable[[str], Floats]

    def vectors(self, tokens: Ints, embedded: Floats) -> Floats | None:  # (S,), (S, D) -> (S, L, P)
        """The vectors of per-layer embeddings, where the decoder has any."""
        spec = self.spec
        if spec.per_layer is None:
            return None
        known = np.where(tokens < spec.per_layer.vocab_size, tokens, 0)
        rows = known[:, None] * spec.num_layers + np.arange(spec.num_layers)
        product = self.linear("per_layer.projection", embedded).reshape(*rows.shape, spec.per_layer.size)
        vectors: Floats = self.norm("per_layer.norm", product) + self.weight(PER_LAYER_TABLE)[rows]
        return vectors

    def _given(self, layer: int, x: Floats, vectors: Floats) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """Output of a layer's per-layer embedding."""
        prefix = f"layers.{layer}.per_layer"
        gate = inner_values(self.spec.activation, self.linear(f"{prefix}.gate", x))
        return self.norm(f"{prefix}.norm", self.linear(f"{prefix}.out", gate * vectors[:, layer]))

    def ended(self, layer: int, x: Floats, vectors: Floats | None) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """The hidden states after a layer: with its per-layer embedding, and scaled, where the decoder has that."""
        if vectors is not None:
            x = x + self._given(layer, x, vectors)
        return x * self.weight("layer_scales")[layer] if self.spec.layer_scales else x

    def entered(self, x: Floats) -> Floats:  # (S, D) -> (S, A D)
        """Embeddings in all streams, where the decoder has more than one."""
        if self.spec.streams is None:
            return x
        return np.concatenate([x[:, None], self._alike(x, self.linear("streams.enter", x))], axis=1).reshape(len(x), -1)

    def left(self, x: Floats) -> Floats:  # (R, A D) -> (R, D)
        """Input of the head, from all streams."""
        if self.spec.streams is None:
            return x
        apart, weights = self._apart(x), self.weight("streams.leave")
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
        """Output of a layer's router."""
        prefix = f"layers.{layer}.streams"
        routed: Floats = np.tanh(self.linear(f"{prefix}.router", self.norm(f"{prefix}.router_norm", x)))
        return routed * np.float32(runs)

    def predicted(self, layer: int, x: Floats, runs: bool) -> Floats:  # (S, A D) -> (S, A, D)
        """The streams that a layer begins with."""
        apart = self._apart(x)
        weights = self.linear(f"layers.{layer}.streams.predict", self._routed(layer, apart[:, 0], runs))
        changed: Floats = apart + weights.reshape(len(x), apart.shape[1], -1) @ apart
        return changed

    def augmented(self, layer: int, normed: Floats, x: Floats) -> Floats:  # (S, D), (S, D) -> (S, D)
        """Hidden states after attention, with the augmented residual of what that read."""
        prefix = f"layers.{layer}.laurel"
        given = self.linear(f"{prefix}.up", self.linear(f"{prefix}.down", normed))
        return (x + normed + self.norm(f"{prefix}.norm", given)) * np.float32(math.sqrt(0.5))

    def corrected(
        self, layer: int, start: Floats, x: Floats, vectors: Floats | None, runs: bool
    ) -> Floats:  # (S, A, D), (S, D), (S, L, P) -> (S, A D)
        """The streams after a layer."""
        prefix = f"layers.{layer}.streams"
        shares = 1 + self.linear(f"{prefix}.correct", self._routed(layer, x, runs))  # (S, A)
        streams = start + shares[:, :, None] * (x - start[:, 0])[:, None]
        if runs and vectors is not None:
            first = streams[:, 0]
            assert self.spec.streams is not None, "only such decoders have streams"
            if self.spec.streams.scaled:
                first = first * self.weight(f"{prefix}.scale")
            streams[:, 1:] += self._given(layer, first, vectors)[:, None]
        whole: Floats = streams.reshape(len(x), -1)
        return whole


@dataclass(frozen=True)
class ReferenceMixture:
    spec: DecoderSpec
    layer: int
    moe: MoESpec
    weights: Mapping[str, Floats]
    # `linear`, `norm`: product and norm by the names of their weights.
    linear: Callable[[str, Floats], Floats]
    norm: Callable[[str, Floats], Floats]
    mlp: Callable[[str, Floats, bool], Floats]  # an MLP by the prefix of its weights, gated or not

    @property
    def _prefix(self) -> str:
        return f"layers.{self.layer}.mlp"

    def of(self, x: Floats, choice: ExpertChoice | None) -> tuple[Floats, Ints]:  # (S, D) -> (S, D), (S, k)
        """Its output, and the experts that were used."""
        if not self.moe.with_mlp:
            return self._mixed(x, x, choice)
        prefix = self._prefix
        routed, entering = (self.norm(f"{prefix}.{name}", x) for name in ("router_input_norm", "experts_norm"))
        mixed, used = self._mixed(routed, entering, choice)
        dense = self.mlp(prefix, self.norm(f"layers.{self.layer}.mlp_norm", x), True)
        normed = self.norm(f"{prefix}.experts_post_norm", mixed) + self.norm(f"{prefix}.dense_post_norm", dense)
        return normed, used

    def _mixed(
        self, routed: Floats, x: Floats, choice: ExpertChoice | None
    ) -> tuple[Floats, Ints]:  # (S, D) -> (S, D), (S, k)
        moe, prefix = self.moe, self._prefix
        bias = None if choice is None or choice.bias is None else choice.bias[self.layer]
        scores, norm = self.linear(f"{prefix}.router", routed), self.weights.get(f"{prefix}.router_norm")
        count = None if choice is None else choice.count
        judging = self.weights.get(f"{prefix}.choice_bias")
        chosen, weights = route(
            scores, moe, count=count, bias=bias, choice_bias=judging, norm=norm, eps=self.spec.norm_eps
        )
        if moe.with_mlp:
            weights = weights * self.weights[f"{prefix}.expert_scale"][chosen]
        used = np.where(weights != 0, chosen, -1)
        mixed = np.zeros_like(x)
        for expert in np.unique(used[used >= 0]).tolist():
            tokens, slots = np.nonzero(used == expert)
            given = self.mlp(f"{prefix}.experts.{expert}", x[tokens], moe.gated)
            mixed[tokens] += weights[tokens, slots, None] * given
        if moe.shared_size:
            shared = self.mlp(f"{prefix}.shared", x, moe.gated)
            mixed += shared * logistic(self.linear(f"{prefix}.shared.gate", x)) if moe.shared_gate else shared
        return mixed, used


def expert_bias_weights(spec: DecoderSpec, weights: dict[str, Floats]) -> dict[str, Floats]:
    """Biases of experts by the names of their matrices."""
    found: dict[str, Floats] = {}
    for layer, part in itertools.product(range(spec.num_layers), ("gate_up", "up", "down")):
        joined = weights.get(expert_biases(layer, part))
        if joined is not None and spec.moe is not None:
            each = enumerate(np.split(joined, spec.moe.experts))
            found |= {f"{expert_tensor(layer, expert, part)}_bias": bias for expert, bias in each}
    return found


def two_plane_weights(bundle: Bundle) -> list[TensorEntry]:
    return [t for t in bundle.manifest.tensors if t.bits == 8 and t.name.startswith("layers.")]


def high_plane(bundle: Bundle, entry: TensorEntry) -> Floats:  # (N, K)
    """An 8-bit matrix whose lower four bits are taken as their middle, 7.5."""
    n, k = entry.shape
    if entry.segments:
        places = segment_places(entry.quantized)
        parts = [_high_blocks(part, bundle.rows(entry, row, row + part.n).data) for row, _, part in places]
        return np.concatenate(parts) * np.float32(entry.factor)
    rows = bundle.rows(entry, 0, n)
    below, above = (
        dequantize(data, rows.scales, rows.zero_points, bits=8, block_size=entry.block_size, k=k)
        for data in ((rows.data & np.uint8(0xF0)) | low for low in (np.uint8(7), np.uint8(8)))
    )
    middle: Floats = (below + above) / np.float32(2)
    return middle


def _high_blocks(part: QuantizedShape, rows: NDArray[np.uint8]) -> Floats:  # (N, bytes of a row) -> (N, K)
    """A segment likewise, as it is where it has other bits."""
    kind = part.segments[0].kind
    if kind != "Q8_0":
        return read_blocks(kind, rows, part.k)
    blocks = rows.reshape(part.n, -1, KINDS[kind].nbytes)
    both = []
    for low in (np.uint8(7), np.uint8(8)):
        codes = (blocks[..., 2:] & np.uint8(0xF0)) | low
        joined = np.concatenate([blocks[..., :2], codes], axis=-1).reshape(rows.shape)
        both.append(read_blocks(kind, joined, part.k))
    middle: Floats = (both[0] + both[1]) / np.float32(2)
    return middle


@dataclass(frozen=True)
class _Pass:
    """Values that the layers of a pass share."""

    cache: KVBuffers | PagedCache
    positions: Ints  # (S,)
    seen: dict[int, NDArray[np.bool_]]  # which cached rows each row sees (S, T), by window
    mask: NDArray[np.bool_]  # whether attention and MLP of each layer run (L, 2)
    vectors: Floats | None  # per-layer embeddings (S, L, P)
    experts: ExpertChoice | None
    used: dict[int, Ints]  # the experts of each layer that has any, filled in as they are chosen


class ReferenceBackend(OneSequenceBackend):
    """Implements `contract.Backend` for every bundle with a decoder description, with a cache of any type of
    `geometry`."""

    name = "reference"
    kernel = "numpy"

    def __init__(self, bundle: Bundle, capacity: int, *, kv: str = FLOAT32) -> None:
        super().__init__()
        if bundle.manifest.decoder is None or not bundle.manifest.tensors:
            hint = "Load it with its own backend."
            raise BundleError(f"{bundle.path} has no tensor table, so the reference backend cannot run it.", hint)
        self._spec: DecoderSpec = bundle.manifest.decoder
        self._windows = {0, *self._spec.windows}
        self._bundle = bundle
        self._whole = {t.name: bundle.tensor(t.name) for t in bundle.manifest.tensors}
        self._whole |= expert_bias_weights(self._spec, self._whole)
        self._weights = self._whole  # what the pass that runs reads
        self._ends = ReferenceEnds(self._spec, self._linear, self._norm, lambda name: self._weights[name])
        self._capacity = capacity
        self.rotation_border = rotation_border(self._spec.ropes, capacity)
        self.rotates_long = self.rotation_border is not None
        self._tables = self._rotary_tables(capacity)
        self.geometry: Geometry = self._spec.geometry
        self._kv = kv
        two_planes = bool(two_plane_weights(bundle))
        counts = () if self._spec.moe is None else tuple(range(1, self._spec.moe.top_k + 1))
        self.capabilities = Capabilities(True, True, True, high_planes=two_planes, expert_counts=counts)

    def _new_cache(self, capacity: int) -> KVBuffers | PagedCache:
        geometry = self._cached_geometry()
        if self._kv == FLOAT32:
            return KVBuffers(geometry, capacity)
        pool = PagePool(PageLayout.of(geometry, self._kv), pages_for(capacity) + 64, key_centres(self._bundle))
        return PagedCache(pool, capacity)

    def _cached_geometry(self) -> Geometry:
        """The cache's geometry: it keeps the inputs of recurrences, from which states are computed again."""
        if not self.geometry.states:
            return self.geometry
        # After the layers, as one may have both attention and a recurrence.
        read = (KVLayer(1, 0, wide) if wide else KVLayer(0, 0, 0) for wide in recurrent.widths(self._spec))
        kept = (*self.geometry.kept, *read)
        return dataclasses.replace(self.geometry, num_layers=len(kept), kv_layers=kept, states=())

    def rotate_long(self, long: bool) -> None:
        if self.rotation_border is not None and long != self.rotates_long:
            self.rotates_long = long
            self._tables = self._rotary_tables(self._capacity if long else self.rotation_border)

    def _rotary_tables(self, context: int) -> list[tuple[Floats, Floats]]:
        return [rope_tables(rope, self._capacity, context) for rope in self._spec.ropes]

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, (KVBuffers, PagedCache)), "sequences are made here"
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        start, size = cache.length, len(tokens)
        self._weights = self._whole if batch.planes == 2 else self._halved
        cache.prepare(size)
        embedded = self._weights["embed"][tokens]
        x = self._ends.entered(embedded) if batch.hidden is None else batch.hidden  # (S, D), or of all streams
        mask = np.ones(2 * self._spec.num_layers, np.bool_) if batch.layer_mask is None else batch.layer_mask
        if batch.hidden is None:
            mask = with_sources(self._spec.kv_sources, mask)
        seen = {window: visible_rows(start, size, batch.tree, window) for window in self._windows}
        run = _Pass(
            cache, positions, seen, mask.reshape(-1, 2), self._ends.vectors(tokens, embedded), batch.experts, {}
        )
        for layer in range(self._spec.num_layers):
            x = self._layer(layer, x, run)
        cache.length = start + size
        last = self._norm("final_norm", self._ends.left(x[rows]))
        logits = softcapped(self._linear("head", last), self._spec.logit_softcap)
        return PassResult(logits, x, self._choices(run.used, size, batch.experts))

    def _layer(self, layer: int, x: Floats, run: _Pass) -> Floats:  # (S, D), or of all streams -> likewise
        spec, (mixes, feeds) = self._spec, run.mask[layer].tolist()
        predicted = None if spec.streams is None else self._ends.predicted(layer, x, feeds)
        before = x = x if predicted is None else predicted[:, 0]
        if mixes and spec.parts_of(layer):
            x = x + self._leaving(layer, "attn", self._mixed(layer, self._entering(layer, "attn", before), run))
        if predicted is not None and feeds:
            x = self._ends.augmented(layer, self._entering(layer, "attn", before), x)
        if feeds and layer not in spec.no_mlp:
            moe, entering = spec.experts_of(layer), before if spec.parallel else x
            if moe is None or not moe.with_mlp:
                entering = self._entering(layer, "mlp", entering)
            if moe is None:
                given = self._mlp(f"layers.{layer}.mlp", entering, cut=spec.cut(layer))
            else:
                mixture = ReferenceMixture(spec, layer, moe, self._weights, self._linear, self._norm, self._mlp)
                given, run.used[layer] = mixture.of(entering, run.experts)
            x = x + self._leaving(layer, "mlp", given)
            x = x if predicted is not None else self._ends.ended(layer, x, run.vectors)
        return x if predicted is None else self._ends.corrected(layer, predicted, x, run.vectors, feeds)

    @cached_property
    def _halved(self) -> dict[str, Floats]:
        """The weights; the layers' 8-bit matrices are read by their high plane alone."""
        return self._whole | {t.name: high_plane(self._bundle, t) for t in two_plane_weights(self._bundle)}

    def _norm(self, name: str, x: Floats) -> Floats:  # (S, D) -> (S, D)
        bias = self._weights.get(f"{name}_bias")
        return normed(x, self._weights[name], bias, kind=self._spec.norm, eps=self._spec.norm_eps)

    def _entering(self, layer: int, part: str, x: Floats) -> Floats:  # (S, D) -> (S, D)
        """Input of a layer's attention or MLP; parallel ones share a norm."""
        if not self._spec.pre_norm:
            return x
        return self._norm(f"layers.{layer}.{'attn' if self._spec.parallel else part}_norm", x)

    def _leaving(self, layer: int, part: str, given: Floats) -> Floats:  # (S, D) -> (S, D)
        """The output of attention or MLP as it is added to the hidden states."""
        return self._norm(f"layers.{layer}.{part}_post_norm", given) if self._spec.post_norm else given

    def _linear(self, name: str, x: Floats) -> Floats:  # (S, K) -> (S, N)
        y = x @ self._weights[name].T
        bias = self._weights.get(f"{name}_bias")
        return y if bias is None else y + bias

    def _mixed(self, layer: int, x: Floats, run: _Pass) -> Floats:  # (S, D) -> (S, D)
        """Output of a layer's attention, of its substitute, or the sum of both."""
        if self._spec.latent is not None:
            return self._latent_attention(layer, self._spec.latent, x, run)
        given = np.zeros_like(x)
        for part in self._spec.parts_of(layer):
            attends = part == "attention"
            given = given + (self._attention(layer, x, run) if attends else self._recurrence(layer, part, x, run))
        return given

    def _recurrence(self, layer: int, mixer: Mixer, x: Floats, run: _Pass) -> Floats:  # (S, D) -> (S, D)
        """Output of a layer's recurrence, from the kept inputs of each row's text."""
        seen = run.seen[0]
        size, total = seen.shape
        prefix = f"layers.{layer}.mixer"
        place = layer if mixer == "conv" else self._spec.num_layers + layer
        read, apart = recurrent.enter(self._spec, layer, lambda name: self._linear(f"{prefix}.{name}", x))
        run.cache.write(place, total - size, np.zeros((1, size, 0), np.float32), read[None])
        _, kept = run.cache.read(place, 0, total)  # (1, T, C)
        weights = recurrent.weights_of(self._weights, prefix)
        texts = (kept[0, np.flatnonzero(visible)] for visible in seen)  # (n, C), the row's own last
        rows = (recurrent.mix(self._spec, mixer, weights, *each) for each in zip(texts, apart[:, None], strict=True))
        return self._linear(f"{prefix}.out", np.concatenate(list(rows)))

    def _attention(
        self,
        layer: int,
        x: Floats,  # (S, D), normed where there is a norm before
        run: _Pass,
    ) -> Floats:  # (S, D)
        spec, prefix, own = self._spec, f"layers.{layer}.", self._spec.heads(layer)
        positions, visible = run.positions, run.seen[spec.window(layer)]
        size, total = visible.shape
        start = total - size
        q, *made = np.split(self._linear(f"{prefix}attn.qkv", x), np.cumsum(own.products)[:-1], axis=1)
        q = self._turned(layer, "q", q.reshape(size, own.heads, own.size), positions)
        if own.owns:
            k, v = (made[place].reshape(size, own.kv_heads, own.size) for place in (0, -1))
            k = self._turned(layer, "k", k, positions)
            if spec.value_norm:
                v = rms_norm(v, np.ones(own.size, np.float32), spec.norm_eps)
            run.cache.write(layer, start, k.swapaxes(0, 1), v.swapaxes(0, 1))
        keys, values = run.cache.read(own.source, 0, total)  # (H, T, h)
        grouped = q.swapaxes(0, 1).reshape(own.kv_heads, own.heads // own.kv_heads, size, own.size)
        mixed = self._mix(layer, grouped, keys, values, visible)  # (H, g, S, h)
        heads = self._gated(layer, x, mixed.transpose(2, 0, 1, 3).reshape(size, own.q_size))
        if spec.inner_norms:
            heads = self._norm(f"{prefix}attn.inner_norm", heads)
        return self._linear(f"{prefix}attn.out", heads)

    def _latent_attention(
        self,
        layer: int,
        latent: LatentSpec,
        x: Floats,  # (S, D)
        run: _Pass,
    ) -> Floats:  # (S, D)
        """Attention over keys and values of all heads, which are made of the cached latent rows."""
        spec, prefix, weights = self._spec, f"layers.{layer}.attn.", self._weights
        positions, visible = run.positions, run.seen[spec.window(layer)]
        size, total = visible.shape
        if latent.query_rank:
            small = rms_norm(self._linear(f"{prefix}q_a", x), weights[f"{prefix}q_a_norm"], latent.norm_eps)
            queries = self._linear(f"{prefix}q_b", small)
        else:
            queries = self._linear(f"{prefix}q", x)
        queries = queries.reshape(size, spec.num_heads, spec.head_dim)
        given, key = np.split(self._linear(f"{prefix}kv_a", x), [latent.rank], axis=1)
        given = rms_norm(given, weights[f"{prefix}kv_norm"], latent.norm_eps)
        index = spec.rope_index(layer)
        rope, (cos, sin) = spec.ropes[index], (table[positions] for table in self._tables[index])
        plain, turning = np.split(queries, [latent.plain_size], axis=2)
        turning = rotate(turning, cos, sin, interleaved=rope.interleaved)
        key = rotate(key[:, None], cos, sin, interleaved=rope.interleaved)
        queries = np.concatenate([plain, turning], axis=2)
        if rope.query_beta:
            queries = queries * query_factors(rope, positions)[:, None, None]
        run.cache.write(layer, total - size, key.swapaxes(0, 1), given[None])
        keys, (kept,) = run.cache.read(layer, 0, total)  # (1, T, r), (T, rank)
        by_head = weights[f"{prefix}k_b"].reshape(spec.num_heads, latent.rank, latent.plain_size)
        keys = np.concatenate([kept @ by_head, np.broadcast_to(keys, (spec.num_heads, *keys.shape[1:]))], axis=2)
        values = kept @ weights[f"{prefix}v_b"].reshape(spec.num_heads, latent.value_size, latent.rank).swapaxes(1, 2)
        mixed = self._mix(layer, queries.swapaxes(0, 1)[:, None], keys, values, visible)  # (H, 1, S, v)
        return self._linear(f"{prefix}out", mixed.transpose(2, 0, 1, 3).reshape(size, spec.heads_size))

    def _turned(self, layer: int, part: str, heads: Floats, positions: Ints) -> Floats:  # (S, H, h) -> (S, H, h)
        """Queries ("q") or keys ("k") of a layer after their norm and rotation, as far as it has them."""
        spec, name = self._spec, f"layers.{layer}.attn.{part}_norm"
        if not spec.norm_after_rope:
            heads = self._head_norm(heads, name)
        index = spec.rope_index(layer)
        if index >= 0:
            rope, (cos, sin) = spec.ropes[index], self._tables[index]
            heads = rotate(heads, cos[positions], sin[positions], interleaved=rope.interleaved)
            if part == "q" and rope.query_beta:
                heads = heads * query_factors(rope, positions)[:, None, None]
        return self._head_norm(heads, name) if spec.norm_after_rope else heads

    def _head_norm(self, heads: Floats, name: str) -> Floats:  # (S, H, h) -> (S, H, h)
        """Queries or keys after their norm, of each head or of all together, where the model has one."""
        if not self._spec.qk_norm:
            return heads
        vectors = heads.reshape(len(heads), -1) if self._spec.whole_norm else heads
        return self._norm(name, vectors).reshape(heads.shape)

    def _gated(self, layer: int, x: Floats, heads: Floats) -> Floats:  # (S, D), (S, q) -> (S, q)
        """Outputs of the heads, times the logistic function of the gate if there is one."""
        if not self._spec.output_gate:
            return heads
        gate = logistic(self._linear(f"layers.{layer}.attn.gate", x))
        return heads * (np.repeat(gate, self._spec.head_dim, axis=1) if self._spec.output_gate == "head" else gate)

    def _mix(
        self,
        layer: int,
        queries: Floats,  # (H, g, S, h)
        keys: Floats,  # (H, T, h)
        values: Floats,  # (H, T, h)
        visible: NDArray[np.bool_],  # (S, T)
    ) -> Floats:  # (H, g, S, h)
        """Attention output of every query head of a layer."""
        spec, sinks = self._spec, self._weights.get(f"layers.{layer}.attn.sinks")
        by_group = None if sinks is None else sinks.reshape(queries.shape[:2])
        scale, cap = spec.attention_scale, spec.attention_softcap
        return attend(queries, keys, values, visible, scale=scale, softcap=cap, sinks=by_group)

    def _mlp(self, prefix: str, x: Floats, gated: bool | None = None, cut: float = 0.0) -> Floats:  # (S, D) -> same
        """An MLP; `gated` is the decoder's own unless an expert says otherwise, `cut` as DecoderSpec.sparsity."""
        activation, xielu = self._spec.activation, self._weights.get(f"{prefix}.xielu")
        if self._spec.gated if gated is None else gated:
            gate, up = np.split(self._linear(f"{prefix}.gate_up", x), 2, axis=1)
            inner = gate_up(activation, cut_off(gate, cut), up, xielu)
        else:
            inner = inner_values(activation, self._linear(f"{prefix}.up", x), xielu)
        if f"{prefix}.inner_norm" in self._weights:
            inner = self._norm(f"{prefix}.inner_norm", inner)
        return self._linear(f"{prefix}.down", inner)

    def _choices(self, used: dict[int, Ints], size: int, choice: ExpertChoice | None) -> Ints | None:  # (L, S, k)
        if self._spec.moe is None:
            return None
        nothing = np.full((size, self._spec.moe.top_k if choice is None else choice.count), -1, np.int64)
        return np.stack([used.get(layer, nothing) for layer in range(self._spec.num_layers)])

    def cancel(self) -> None:
        """Does nothing: a numpy pass runs to its end, which is still within one step."""

    def nbytes(self) -> dict[str, int]:
        return {
            "weights": sum(w.nbytes for w in self._whole.values()),
            "kv": self._kv_bytes,
            "buffers": sum(cos.nbytes + sin.nbytes for cos, sin in self._tables),
        }

    def close(self) -> None:
        self._whole.clear()


class ReferenceFactory(BackendFactory):
    """Slow and obvious, on bundles of our own graphs."""

    def engine(self) -> str:
        return f"numpy {np.__version__}"

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return bundle.kv_types(layout)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        return "numpy"

    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        return memory_of(choice.bundle, choice.layout, floats=True)

    def make(self, order: BackendOrder) -> Backend:
        bundle, plan = order.bundle, order.configuration
        backend = ReferenceBackend(bundle, plan.context, kv=plan.kv)
        return counting_experts(bundle, backend)
