"""Bytes of every term as a formula of bundle, configuration and device; knows nothing of choosing among configurations.

All terms are upper bounds, as a plan that fits has to be kept. Constants were fitted to measured processes
(docs/LOG.md, 2026-11-21); `edgeinfer bench memory` shows how near they are on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from edgeinfer.bundle import NATIVE, PORTABLE, Bundle, Layout, Manifest, TensorEntry
from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.tables import stored_tensors, tensors_in
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.memory import ProcessMemory
from edgeinfer.runtime.overflow.registry import planned_bytes as overflow_bytes
from edgeinfer.runtime.planning.configuration import TOKENIZER, Configuration, Keeping, Subject, draft_configuration
from edgeinfer.runtime.planning.footprint import Footprint
from edgeinfer.runtime.prefix_cache import planned_bytes as prefix_bytes
from edgeinfer.runtime.speculation.memory import drafting_bytes
from edgeinfer.runtime.streaming import loading_bytes, looked_up_bytes, mapped_bytes, packed_bytes, streamed_bytes
from edgeinfer.runtime.text.footprint import kept_bytes, parsing_bytes, table_bytes

__all__ = ["GROWTH_BYTES", "NEEDED_SHARE", "OUTSIDE", "MemoryModel"]

# Terms of the process around the model.
OUTSIDE = ("interpreter", "libraries")

# Session and graph of onnxruntime: in all, and per layer; pages of code that running touches beyond those of importing,
# and what loading touches besides: of code, and of raw weights while they are packed.
_SESSION_BYTES, _SESSION_LAYER_BYTES = 3_200_000, 200_000
_RUNNING_CODE_BYTES, _LOADING_CODE_BYTES = 2_500_000, 11_000_000
_RAW_SHARE = 0.3
# Of the pages of libraries that are resident when a model is loaded, those that come back while it runs.
NEEDED_SHARE = 0.72
# Anonymous memory that a session keeps of weights that are read from a file of packed ones.
_PACKING_LEFT_BYTES = 4_000_000
# Rows of the cache that are there from the start.
_FIRST_ROWS = 256
# What importing and planning itself add to the process between two plans, and Python's objects while replies are made.
GROWTH_BYTES = 4_000_000
_OBJECTS_BYTES = 2_000_000
# A cache that grows by concatenation is written anew by every pass, from one copy into the other.
_CONCAT_COPIES = 2
# Largest set of a layer's activations alive at once, in widths of its widest linear.
_LIVE_WIDTHS = 3
_FLOAT_BYTES = 4
# Copies of a weight that are there at once while it is multiplied out.
_MAKING_FLOATS = 4


class MemoryModel:
    """What configurations of one subject take.

    Args:
        config: what the caller asked for.
        process: memory of this process now, with the libraries that loading will import.
    """

    def __init__(self, subject: Subject, config: LoadConfig, process: ProcessMemory) -> None:
        self._subject = subject
        self._config = config
        self.process = process
        self._weights: dict[tuple[str, int, int], Footprint] = {}

    def footprint(self, configuration: Configuration) -> Footprint:
        """The largest this process will be from loading on."""
        config, subject, manifest = self._config, self._subject, self._subject.manifest
        key = configuration.weights, configuration.window_layers, configuration.expert_bytes
        if key not in self._weights:
            self._weights[key] = (
                _multiplied_out(manifest) if subject.floats else _weights(manifest, subject.layout, *key)
            )
        running = (
            self._outside(running=True)
            + self._weights[key]
            + _running(manifest, configuration, floats=subject.floats)
            + _tokenizer(subject.bundle, configuration.tokenizer, used=True)
        )
        if configuration.draft_max:
            size = drafting_bytes(
                configuration.drafters, manifest.geometry, configuration.context, configuration.draft_max
            )
            running += Footprint({"drafting": size}, {})
            if subject.drafter is not None:
                running += _drafter(*subject.drafter, configuration)
        if config.prefix_cache:
            running += Footprint({"prefix_cache": prefix_bytes(config.prefix_cache, manifest.geometry.num_layers)}, {})
        if overflow := overflow_bytes(config.overflow, manifest.decoder, configuration.context):
            running += Footprint({"overflow": overflow}, {})
        return running + self._loading(running, configuration)

    def _outside(self, *, running: bool) -> Footprint:
        """The process without a model: while it runs, pages of libraries that only loading needed have been dropped."""
        libraries = round(NEEDED_SHARE * self.process.file) if running else self.process.file
        objects = _OBJECTS_BYTES if running else 0
        return Footprint({"interpreter": self.process.anonymous, "objects": objects}, {"libraries": libraries})

    def _loading(self, running: Footprint, configuration: Configuration) -> Footprint:
        """What loading, or parsing the tokenizer again, takes at its worst beyond all that is there afterwards."""
        counted = self._config.counted
        worst = max(phase.total(counted) for phase in self._phases(running, configuration))
        return Footprint({"loading": max(0, worst - running.total(counted))}, {})

    def _phases(self, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """What else the process is at times: while the tokenizer is parsed, which is before anything else is there;
        while the session is made; and while a transient tokenizer is parsed for a prompt, when the pages of the weights
        are dropped and no pass runs."""
        bundle, manifest = self._subject.bundle, self._subject.manifest
        parsed = parsing_bytes(_tokenizer_size(bundle), manifest.geometry.vocab_size, pairs=self._subject.merge_pairs)
        parsing = Footprint({"tokenizer": parsed}, {})
        yield self._outside(running=False) + parsing
        rows = min(_FIRST_ROWS, configuration.context + 1)
        packing, raw = self._packing(configuration)
        yield (
            self._outside(running=False)
            + _tokenizer(bundle, configuration.tokenizer, used=False)
            + Footprint(
                {
                    "session": running.anonymous["session"],
                    "weights_packed": running.anonymous["weights_packed"] + packing,
                    "kv": manifest.geometry.kv_bytes_per_token(configuration.kv) * rows,
                },
                {
                    "code": _RUNNING_CODE_BYTES + _LOADING_CODE_BYTES,
                    "weights_mapped": raw,
                },
            )
        )
        if configuration.tokenizer == "transient":
            idle = dict(running.anonymous) | {"activations": 0}
            yield Footprint(idle, dict(running.file) | {"weights_mapped": 0, "experts": 0}) + parsing

    def _packing(self, configuration: Configuration) -> tuple[int, int]:
        """What packing the weights takes for a moment: anonymous bytes, and pages of raw weights."""
        tensors = tensors_in(self._subject.manifest, self._subject.layout)
        if self._subject.layout == NATIVE or not tensors:
            return 0, 0
        if configuration.weights != "packed":
            packed, raw = loading_bytes(tensors)
            # Making the file holds the raw weight, its packed copy and what is written of it at once.
            return (packed, raw) if self._subject.packed_ready else (packed + 2 * raw, raw)
        return 0, round(_RAW_SHARE * max(t.nbytes for t in tensors))


def _running(manifest: Manifest, configuration: Configuration, *, floats: bool = False) -> Footprint:
    """One model's session, cache and passes."""
    geometry = manifest.geometry
    context, chunk = configuration.context, configuration.prefill_chunk
    copies = 1 if manifest.decoder else _CONCAT_COPIES
    return Footprint(
        {
            "session": _SESSION_BYTES + _SESSION_LAYER_BYTES * geometry.num_layers,
            "kv": geometry.kv_bytes_per_token(configuration.kv) * (context + 1) * copies,
            "activations": _activations(manifest, chunk, context)
            + (_scores(manifest, chunk, context) if floats else 0),
        },
        {"code": _RUNNING_CODE_BYTES},
    )


def _tokenizer(bundle: Bundle, keeping: Keeping, *, used: bool) -> Footprint:
    """What stays of it: all, or what decoding needs."""
    size, tokens = _tokenizer_size(bundle), bundle.manifest.geometry.vocab_size
    held = kept_bytes(tokens, used=used) if keeping == "kept" else table_bytes(size, tokens)
    return Footprint({"tokenizer": held}, {})


def _tokenizer_size(bundle: Bundle) -> int:
    return bundle.manifest.files[TOKENIZER].bytes if bundle.has(TOKENIZER) else 0


def _drafter(bundle: Bundle, layout: Layout, target: Configuration) -> Footprint:
    """A draft model, which shares tokenizer and libraries with its target; one term for each kind of page."""
    manifest = bundle.manifest
    own = draft_configuration(manifest, layout, target)
    whole = _weights(manifest, layout, own.weights, 0, 0) + _running(manifest, own)
    file = sum(whole.file.values()) - whole.file["code"]
    return Footprint({"draft_model": sum(whole.anonymous.values())}, {"draft_model": file})


def _multiplied_out(manifest: Manifest) -> Footprint:
    """Every weight in float32, which the tied head is a second time, and what making the largest of them takes."""
    sizes = [_FLOAT_BYTES * math.prod(t.shape) for t in manifest.tensors]
    return Footprint({"weights_packed": sum(sizes) + _MAKING_FLOATS * max(sizes, default=0)}, {})


def _weights(manifest: Manifest, layout: Layout, mode: str, window: int, experts: int) -> Footprint:
    """Anonymous bytes of packed weights, and file pages that are resident."""
    if not manifest.tensors:
        # An opaque graph: float weights are packed into a copy while the file is mapped.
        size = manifest.weight_bytes
        return Footprint({"weights_packed": size}, {"weights_mapped": size})
    tensors = tensors_in(manifest, layout)
    apart = [t for t in tensors if find_expert(t.name) is not None and t.bits < 32 and layout == NATIVE]
    if window or not apart:
        return _WEIGHTS[layout](tensors, mode, window)
    others = [t for t in tensors if find_expert(t.name) is None or t.bits == 32]
    resident = experts or sum(t.nbytes for t in apart)
    return _WEIGHTS[layout](others, mode, window) + Footprint({}, {"experts": resident})


def _portable_weights(tensors: Sequence[TensorEntry], mode: str, window: int) -> Footprint:
    """Packed into copies, all matrices but the embedding, whose rows stay mapped; or read from a file of copies."""
    if mode == "packed":
        packed = sum(packed_bytes(t) for t in tensors if t.name != "embed")
        return Footprint({"weights_packed": packed}, {"weights_mapped": looked_up_bytes(tensors)})
    mapped = streamed_bytes(tensors, window) if window else mapped_bytes(tensors)
    return Footprint({"weights_packed": _PACKING_LEFT_BYTES}, {"weights_mapped": mapped})


def _native_weights(tensors: Sequence[TensorEntry], mode: str, window: int) -> Footprint:
    """The file is used in place; what is not quantized is multiplied by onnxruntime, which packs a copy."""
    packed = sum(t.nbytes for t in tensors if t.bits == 32 and t.name != "embed")
    mapped = streamed_bytes(tensors, window) if window else sum(t.nbytes for t in stored_tensors(tensors))
    return Footprint({"weights_packed": packed}, {"weights_mapped": mapped})


_WEIGHTS: dict[Layout, Callable[[Sequence[TensorEntry], str, int], Footprint]] = {
    NATIVE: _native_weights,
    PORTABLE: _portable_weights,
}


def _activations(manifest: Manifest, chunk: int, context: int) -> int:
    """Bytes alive in the largest pass: hidden states in and out, a layer's widest values, attention bias, logits."""
    geometry, decoder = manifest.geometry, manifest.decoder
    hidden = geometry.hidden_size
    if decoder is None:
        # An opaque graph returns the logits of every row, and its attention holds the scores of every head.
        logits = chunk * (_LIVE_WIDTHS * 8 * hidden + geometry.vocab_size)
        return _FLOAT_BYTES * logits + _scores(manifest, chunk, context)
    widest = 2 * decoder.intermediate_size + hidden
    if (moe := decoder.moe) is not None:
        widest = max(widest, moe.top_k * (2 * moe.expert_size + hidden) + 2 * moe.shared_size + hidden)
    biases = 2 if decoder.window_size else 1
    return _FLOAT_BYTES * (chunk * (2 * hidden + _LIVE_WIDTHS * widest + biases * context) + 2 * geometry.vocab_size)


def _scores(manifest: Manifest, chunk: int, context: int) -> int:
    """Bytes of attention's scores where those of every head are there at once."""
    heads = -(-manifest.geometry.hidden_size // manifest.geometry.head_dim)
    return _FLOAT_BYTES * _LIVE_WIDTHS * heads * chunk * context
