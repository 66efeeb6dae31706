"""The reference backend: `edgeinfer.nn` behind a cache, the oracle of the tests, and its factory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import segment_places
from edgeinfer.bundle.geometry import FLOAT32, Geometry, KVLayer
from edgeinfer.bundle.kinds import KINDS, read_blocks
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Capabilities, TensorEntry
from edgeinfer.bundle.packing import QuantizedShape, dequantize
from edgeinfer.bundle.parts import Mixer, with_sources
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.nn import recurrent
from edgeinfer.nn.arithmetic import rotation_border
from edgeinfer.nn.decoder import Decoder, DecoderRun, Kept
from edgeinfer.nn.key_centres import key_centres
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice, KVCache, Pass, PassResult
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder, counting_experts
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import KVBuffers, visible_rows
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.devices.providers import Device
from edgeinfer.runtime.paging.layout import PageLayout, pages_for
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.planning.facts import ModelMemory


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


class _CachedText:
    """Implements `decoder.Texts`: new rows of one text, whose keys and values are written behind those that its cache
    holds."""

    def __init__(self, spec: DecoderSpec, cache: KVBuffers | PagedCache, positions: Ints, tree: Ints | None) -> None:
        self.rows = (slice(0, len(positions)),)
        self.positions = positions
        self._spec, self._cache, self._start = spec, cache, cache.length
        windows = {0, *spec.windows}
        self._seen = {window: visible_rows(cache.length, len(positions), tree, window) for window in windows}

    def attended(
        self, layer: int, source: int, text: slice, kept: Kept | None
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        if kept is not None:
            self._cache.write(layer, self._start, *kept)
        return *self._cache.read(source, 0, self._start + text.stop), self._seen[self._spec.window(layer)]

    def histories(
        self, layer: int, mixer: Mixer, text: slice, read: Floats, own: Floats
    ) -> Iterator[tuple[Floats, Floats]]:
        """What was kept of each row's own text, which in a tree is a path."""
        place = layer if mixer == "conv" else self._spec.num_layers + layer
        self._cache.write(place, self._start, np.zeros((1, len(read), 0), np.float32), read[None])
        _, kept = self._cache.read(place, 0, self._start + text.stop)  # (1, T, C)
        for row, visible in enumerate(self._seen[0]):
            yield kept[0, np.flatnonzero(visible)], own[row : row + 1]


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
        self._bundle = bundle
        self._whole = {t.name: bundle.tensor(t.name) for t in bundle.manifest.tensors}
        self._weights = self._whole  # what the pass that runs reads
        self._decoder = Decoder(self._spec, lambda name: self._weights[name], capacity)
        self._capacity = capacity
        self.rotation_border = rotation_border(self._spec.ropes, capacity)
        self.rotates_long = self.rotation_border is not None
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
            self._decoder.rotate_as(self._capacity, self._capacity if long else self.rotation_border)

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, (KVBuffers, PagedCache)), "sequences are made here"
        tokens, spec, decoder, choice = batch.tokens, self._spec, self._decoder, batch.experts
        self._weights = self._whole if batch.planes == 2 else self._halved
        cache.prepare(len(tokens))
        x, vectors = decoder.entered(tokens, self._weights["embed"][tokens])
        mask = np.ones(2 * spec.num_layers, np.bool_) if batch.layer_mask is None else batch.layer_mask
        if batch.hidden is None:
            mask = with_sources(spec.kv_sources, mask)
        else:
            x = batch.hidden.copy()
        texts = _CachedText(spec, cache, batch.positions, batch.tree)
        count, bias = (None, None) if choice is None else (choice.count, choice.bias)
        run = DecoderRun(texts, mask.reshape(-1, 2), vectors, count, bias)
        for layer in range(spec.num_layers):
            x = decoder.layer(layer, x, run)
        cache.length += len(tokens)
        return PassResult(decoder.logits(x[batch.rows]), x, self._choices(run.used, len(tokens), choice))

    @cached_property
    def _halved(self) -> dict[str, Floats]:
        """The weights; the layers' 8-bit matrices are read by their high plane alone."""
        return self._whole | {t.name: high_plane(self._bundle, t) for t in two_plane_weights(self._bundle)}

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
            "buffers": sum(cos.nbytes + sin.nbytes for cos, sin in self._decoder.tables),
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

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        return memory_of(bundle, layout, floats=True)

    def make(self, order: BackendOrder) -> Backend:
        bundle, plan = order.bundle, order.configuration
        backend = ReferenceBackend(bundle, plan.context, kv=plan.kv)
        return counting_experts(bundle, backend)
