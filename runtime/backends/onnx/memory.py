"""Memory of a model on onnxruntime, or on numpy, by term. All terms are upper bounds. Constants were fitted to measured
processes (docs/log/2026-11-21.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.manifest import Manifest, TensorEntry
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.spec import WAITING_ROWS
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import PER_LAYER_TABLE, is_looked_up, stored_tensors, tensors_in
from edgeinfer.bundle.tokenizer_table import TABLE
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.paging.layout import PAGE, PageLayout, pages_of
from edgeinfer.runtime.paging.states import SLOTS_IN_USE, StateLayout
from edgeinfer.runtime.planning.facts import TOKENIZER, Configuration, Footprint, ModelMemory, TokenizerMode
from edgeinfer.runtime.text.tokenizer import file_has_pairs, kept_bytes, mapped_tokenizer_bytes, parsing_bytes
from edgeinfer.runtime.weights.streaming import looked_up_bytes, packed_bytes, streamed_bytes

# Session and graph of onnxruntime: in all, and per layer; pages of code that running touches beyond those of importing,
# and what loading touches besides: of code, and of raw weights while they are packed.
_SESSION_BYTES, _SESSION_LAYER_BYTES = 3_200_000, 200_000
_RUNNING_CODE_BYTES, _LOADING_CODE_BYTES = 2_500_000, 11_000_000
_RAW_SHARE = 0.3
# Rows of the cache that are there from the start.
_FIRST_ROWS = 256
# A cache that grows by concatenation is written again by every pass, from one copy into the other.
_CONCAT_COPIES = 2
# Largest set of a layer's activations alive at once, in widths of its widest linear: of our operators, and of
# onnxruntime's, whose freed blocks do not all fit what comes next (docs/log/2026-11-26.md).
LIVE_WIDTHS, _PORTABLE_WIDTHS = 3, 6
_FLOAT_BYTES = 4
# Positions of a block of attention and what its scores lie apart; results of blocks that are kept apart at most, and
# queries that share each reading of keys (runtime/native/attention.c).
_ATTENTION_BLOCK, _ATTENTION_SCORES = 256, 272
_MOST_APART_BYTES, _SHARING_QUERIES = 2 << 20, 112
# Copies of a weight that are there at once while it is multiplied out.
_MAKING_FLOATS = 4


@dataclass(frozen=True)
class OnnxMemory:
    """Implements `ModelMemory`."""

    bundle: Bundle
    layout: Layout
    merge_pairs: bool  # whether the tokenizer's merges are pairs, which take more to parse
    floats: bool = False  # whether the backend multiplies all weights out to floats, and keeps the scores of every head
    threads: int = 1

    def import_libraries(self) -> None:
        import onnxruntime  # noqa: F401 - measured, not used

    def weights(self, configuration: Configuration) -> Footprint:
        manifest = self.bundle.manifest
        if self.floats:
            # Every weight in float32, which the tied head is a second time, and what making the largest of them takes.
            sizes = [_FLOAT_BYTES * math.prod(t.shape) for t in manifest.tensors]
            return Footprint({"weights_packed": sum(sizes) + _MAKING_FLOATS * max(sizes, default=0)}, {})
        key = configuration.window_layers, configuration.kept_layers, configuration.expert_bytes
        if (weights := self._known.get(key)) is None:
            weights = self._known[key] = _weights(manifest, self.layout, configuration, self.threads)
        table = [t for t in manifest.tensors if t.name == PER_LAYER_TABLE and self.layout == NATIVE]
        return weights + Footprint({}, {"weights_mapped": looked_up_bytes(table, configuration.prefill_chunk)})

    def running(self, configuration: Configuration) -> Footprint:
        # The largest pass reads a part of a prompt, or verifies a draft.
        rows = max(configuration.prefill_chunk, 1 + configuration.draft_max)
        key = configuration.context, rows, configuration.kv
        if (running := self._known.get(key)) is None:
            running = self._known[key] = self._running(*key)
        return running

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Footprint]:
        """Terms that were computed: a plan asks for thousands of configurations that differ in something else."""
        return {}

    def _running(self, context: int, rows: int, kv: str) -> Footprint:
        manifest = self.bundle.manifest
        if self._paged:
            attention = _attention_scratch(manifest, rows, context, self.threads)
        else:
            # Ours is one operator, which holds them once; other graphs and numpy hold what each step makes of them.
            copies = LIVE_WIDTHS if self.floats or manifest.decoder is None else 1
            attention = copies * _scores(manifest, rows, context)
        return Footprint(
            {
                "session": _SESSION_BYTES + _SESSION_LAYER_BYTES * manifest.geometry.num_layers,
                "kv": self._cache(kv, context),
                "activations": _activations(manifest, rows, 0 if self._paged else context) + attention,
            },
            {"code": _RUNNING_CODE_BYTES},
        )

    def tokenizer(self, keeping: TokenizerMode, *, used: bool) -> Footprint:
        if keeping == "mapped":
            return self._mapped_tokenizer[used]
        return Footprint({"tokenizer": kept_bytes(self.bundle.manifest.geometry.vocab_size, used=used)}, {})

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """While the tokenizer is parsed, which is before anything else is there, and while the session is made."""
        geometry = self.bundle.manifest.geometry
        mapped = configuration.tokenizer == "mapped"
        yield outside + (self.tokenizer("mapped", used=False) if mapped else self._parsing)
        weights, cache = running.anonymous["weights_packed"], 0
        # Pages of a pool take memory as they are filled.
        if not self._paged:
            cache = geometry.kv_bytes_per_token(configuration.kv) * min(_FIRST_ROWS, configuration.context + 1)
        around = outside + self.tokenizer(configuration.tokenizer, used=False)
        code = _RUNNING_CODE_BYTES + _LOADING_CODE_BYTES
        around += Footprint({"session": running.anonymous["session"]}, {"code": code})
        tensors = tensors_in(self.bundle.manifest, self.layout)
        if tensors and self.layout != NATIVE:
            # Pages of the raw weights while onnxruntime packs them.
            raw = round(_RAW_SHARE * max(t.nbytes for t in tensors))
            yield around + Footprint({"weights_packed": weights}, {"weights_mapped": raw})
        yield around + Footprint({"weights_packed": weights, "kv": cache}, {})

    @cached_property
    def _parsing(self) -> Footprint:
        size = self.bundle.manifest.files[TOKENIZER].bytes if self.bundle.has(TOKENIZER) else 0
        tokens = self.bundle.manifest.geometry.vocab_size
        return Footprint({"tokenizer": parsing_bytes(size, tokens, pairs=self.merge_pairs)}, {})

    @cached_property
    def _paged(self) -> bool:
        return self.layout == NATIVE and self.bundle.manifest.decoder is not None and not self.floats

    def _cache(self, kv: str, context: int) -> int:
        manifest = self.bundle.manifest
        if self._paged or (self.floats and kv != FLOAT32):
            states = StateLayout(manifest.geometry.states).slot_bytes * SLOTS_IN_USE if manifest.geometry.states else 0
            return PageLayout.of(manifest.geometry, kv).page_bytes * pages_of(context) + states
        size = manifest.geometry.kv_bytes_per_token(kv) * (context + 1)
        if manifest.decoder is None:
            return size * _CONCAT_COPIES
        # A layer's rows are copied when the cache grows, and the next layer's do not fit where the old ones were.
        return size + (size // manifest.geometry.num_layers if context > _FIRST_ROWS else 0)

    @cached_property
    def _mapped_tokenizer(self) -> tuple[Footprint, Footprint]:
        if not self.bundle.has(TABLE):
            return Footprint({}, {}), Footprint({}, {})
        table = self.bundle.path / TABLE
        mapped = {"tokenizer_mapped": table.stat().st_size}
        unused, used = (
            Footprint({"tokenizer": mapped_tokenizer_bytes(table, used=used)}, mapped) for used in (False, True)
        )
        return unused, used


def _weights(manifest: Manifest, layout: Layout, configuration: Configuration, threads: int) -> Footprint:
    """Anonymous bytes of packed weights, and file pages in memory."""
    if not manifest.tensors:
        # An opaque graph: float weights are packed into a copy while the file is mapped.
        size = manifest.weight_bytes
        return Footprint({"weights_packed": size}, {"weights_mapped": size})
    tensors = tensors_in(manifest, layout)
    if layout != NATIVE:
        # Packed into copies, all matrices but the embedding, whose rows stay mapped.
        packed = sum(packed_bytes(t) for t in tensors if not is_looked_up(t.name))
        return Footprint({"weights_packed": packed}, {"weights_mapped": looked_up_bytes(tensors)})
    experts, window = configuration.expert_bytes, (configuration.window_layers, configuration.kept_layers)
    apart = [t for t in tensors if find_expert(t.name) is not None and t.bits < 32]
    if any(window) or not apart:
        return _native_weights(tensors, window, threads)
    others = [t for t in tensors if find_expert(t.name) is None or t.bits == 32]
    cached = experts or sum(t.nbytes for t in apart)
    # Copies of routers guess which experts come next.
    routers = {"routers": sum(t.nbytes for t in others if t.name.endswith(".mlp.router"))} if experts else {}
    return _native_weights(others, window, threads) + Footprint(routers, {"experts": cached})


def _native_weights(tensors: Sequence[TensorEntry], window: tuple[int, int], threads: int) -> Footprint:
    """The file is used in place, but for a table of which rows are looked up; what is not quantized is multiplied by
    onnxruntime, which packs a copy."""
    tensors = [t for t in tensors if t.name != PER_LAYER_TABLE]
    packed = sum(t.nbytes for t in tensors if t.bits == 32 and t.name != "embed")
    stored = sum(t.nbytes for t in stored_tensors(tensors))
    mapped = streamed_bytes(tensors, *window, threads=threads) if any(window) else stored
    return Footprint({"weights_packed": packed}, {"weights_mapped": mapped})


def _activations(manifest: Manifest, chunk: int, context: int) -> int:
    """Bytes alive in the largest pass: hidden states in and out, a layer's widest values, attention bias (`context` is
    0 where attention reads pages), logits."""
    geometry, decoder = manifest.geometry, manifest.decoder
    hidden = geometry.hidden_size
    if decoder is None:
        # An opaque graph returns the logits of every row.
        return _FLOAT_BYTES * chunk * (LIVE_WIDTHS * 8 * hidden + geometry.vocab_size)
    layers = range(decoder.num_layers)
    widest = 2 * max(decoder.mlp_size(layer) for layer in layers) + hidden
    if (moe := decoder.moe) is not None:
        widest = max(widest, moe.top_k * (2 * moe.expert_size + hidden) + 2 * moe.shared_size + hidden)
    for state in geometry.states:
        # Inputs and outputs of the convolution, then queries, keys, values and results, and the gate.
        widest = max(widest, 3 * state.channels + 3 * state.heads * state.value_size)
    if (latent := decoder.latent) is not None:
        # What queries meet and what heads take of it, and the former put together.
        widest = max(widest, decoder.num_heads * (latent.met_size + latent.rank))
    biases = 2 if decoder.window_size else 1
    # Vectors of all layers, as a product, normed, looked up and added.
    vectors = 0 if decoder.per_layer is None else 4 * decoder.num_layers * decoder.per_layer.size
    row = 2 * hidden + (_PORTABLE_WIDTHS if context else LIVE_WIDTHS) * widest + biases * context + vectors
    if (module := manifest.module) is None:
        return _FLOAT_BYTES * (chunk * (row + 2 * len(manifest.taps) * hidden) + 2 * geometry.vocab_size)
    # Inputs of the module in a pass and those that wait for it, embeddings and states, and its drafter's logits.
    rows = max(WAITING_ROWS, 2 * module.block)
    waiting = rows * (row + 3 * module.width + 4 * hidden)
    return _FLOAT_BYTES * (waiting + (5 + module.block) * geometry.vocab_size)


def _scores(manifest: Manifest, chunk: int, context: int) -> int:
    geometry, decoder = manifest.geometry, manifest.decoder
    heads = -(-geometry.hidden_size // geometry.head_dim) if decoder is None else decoder.num_heads
    return _FLOAT_BYTES * heads * chunk * context


def _attention_scratch(manifest: Manifest, chunk: int, context: int, threads: int) -> int:
    """Working memory of a layer's attention over pages (runtime/native/attention.c), which the next layer has again."""
    decoder = manifest.decoder
    assert decoder is not None, "only our own graphs are paged"
    heads, latent = [decoder.heads(layer) for layer in range(decoder.num_layers)], decoder.latent
    group = max(each.heads // each.kv_heads for each in heads)
    met, size = (max(each.size for each in heads),) * 2 if latent is None else (latent.met_size, latent.rank)
    blocks = -(-context // _ATTENTION_BLOCK)
    apart = min(_MOST_APART_BYTES, _FLOAT_BYTES * chunk * decoder.num_heads * blocks * (size + _ATTENTION_SCORES))
    queries = min(max(_SHARING_QUERIES, group), chunk * group)
    # Scores and results of the queries that share a reading, and a page as floats; of each thread.
    own = _FLOAT_BYTES * (queries * (_ATTENTION_SCORES + 2 * size) + PAGE * (met + size))
    return _FLOAT_BYTES * chunk * decoder.num_heads * met + apart + threads * own


def memory_of(bundle: Bundle, layout: Layout, *, floats: bool = False, threads: int = 1) -> ModelMemory:
    """Memory of a bundle, optionally with all weights dequantized to floats."""
    return OnnxMemory(bundle, layout, file_has_pairs(bundle.path / TOKENIZER), floats, threads)
