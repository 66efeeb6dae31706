"""Encoders on ONNX Runtime: texts of about the same length share a pass and give a vector or a score each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.embedding import Pooling
from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError, CapabilityError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.nn.arithmetic import rope_tables
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendOrder
from edgeinfer.runtime.backends.onnx.factory import OnnxFactory
from edgeinfer.runtime.backends.onnx.graph_backend import bind_input
from edgeinfer.runtime.backends.onnx.memory import LIVE_WIDTHS, OnnxMemory
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.devices.providers import Device
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.planning.facts import (
    TOKENIZER,
    BundleFacts,
    Configuration,
    Footprint,
    ModelMemory,
    TokenizerMode,
)
from edgeinfer.runtime.text.tokenizer import file_has_pairs
from edgeinfer.runtime.weights.layouts import Progress, prepare

# Tokens of a pass, padding included, unless a text is longer: products of more rows are hardly faster.
PASS_TOKENS = 512
_FLOAT_BYTES = 4
# Copies of the scores of all heads that are there at once: as multiplied, biased, and as shares.
_SCORES = 3
# Hides a token; shares of it are zero in float32.
_HIDDEN = np.float32(-1e30)
_BOTH_PLANES = np.full(1, 2, np.int32)


class Encoded(NamedTuple):
    """The tokens of a text, or of a pair, with the part that each belongs to."""

    ids: Sequence[int]
    parts: Sequence[int]


@dataclass(frozen=True)
class _EncoderMemory(OnnxMemory):
    """What an encoder takes in its largest pass."""

    def running(self, configuration: Configuration) -> Footprint:
        spec, context = self.bundle.manifest.decoder, configuration.context
        assert spec is not None, "an encoder is described"
        rows = max(context, PASS_TOKENS)
        widest = 2 * max(spec.mlp_size(layer) for layer in range(spec.num_layers)) + 2 * (
            spec.q_size + 2 * spec.kv_size
        )
        scores = _SCORES * spec.num_heads * context + (2 * context if spec.window_size else 0)
        size = _FLOAT_BYTES * rows * (LIVE_WIDTHS * (widest + spec.hidden_size) + scores)
        whole = super().running(configuration)
        return Footprint({**whole.anonymous, "kv": 0, "activations": size}, whole.file)


class EncoderFactory(OnnxFactory):
    """Says what encoders take; `Encoder` runs them, as they are no backend of a decoder."""

    tunes = ()
    graphs = "none"

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return (FLOAT32,)

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return ("mapped",) if layout == NATIVE else ("packed",)

    def head_apart(self, bundle: Bundle, layout: Layout) -> bool:
        return False

    def tokenizer_mode(self, bundle: Bundle) -> TokenizerMode:
        return "kept"

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        return _EncoderMemory(bundle, layout, file_has_pairs(bundle.path / TOKENIZER))

    def make(self, order: BackendOrder) -> Backend:
        raise encodes_only(order.bundle.manifest.name)


def encodes_only(name: str) -> CapabilityError:
    message = f"{name} makes embeddings or scores of texts, and generates no text."
    return CapabilityError(message, "Use embed() or rerank(), edgeinfer embed, or load a model that generates.")


class Encoder:
    """A loaded encoder, which evaluates texts of at most `context` tokens."""

    def __init__(self, facts: BundleFacts, context: int, pooling: Pooling, progress: Progress | None = None) -> None:
        bundle, layout = facts.bundle, facts.layout
        decoder = bundle.manifest.decoder
        if decoder is None or decoder.encoder is None:
            raise BundleError(f"{bundle.path} describes no encoder.", "Export it again.")
        self._graph = prepare(bundle, layout, progress)
        kernel = native_kernel() if layout == NATIVE else None
        self._session = OrtSession(str(self._graph.model), facts.threads, kernel, affinity=facts.settings.affinity)
        self._pooling, self._window, self._first = pooling, decoder.window_size, decoder.encoder.first_position
        self.context = context
        dense = decoder.encoder.dense
        self.width = dense[-1].size if dense else decoder.hidden_size
        self._fixed: dict[str, NDArray[Any]] = {graph.PLANES: _BOTH_PLANES}
        for index, rope in enumerate(decoder.ropes):
            self._fixed |= dict(zip(graph.rotary_names(index), rope_tables(rope, context, context), strict=True))
        self._fixed = {name: np.ascontiguousarray(table) for name, table in self._fixed.items()}

    def evaluate(self, texts: Sequence[Encoded]) -> Floats:  # (N, D)
        """The pooled vector, or the score, of each text."""
        found = np.empty((len(texts), self.width), np.float32)
        for places in passes([len(text.ids) for text in texts], max(PASS_TOKENS, self.context)):
            found[places] = self._pass([texts[place] for place in places])
        return found

    def _pass(self, texts: Sequence[Encoded]) -> Floats:  # (B, D)
        lengths = np.array([len(text.ids) for text in texts])
        shape = count, size = len(texts), int(lengths.max())
        ids, parts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, text in enumerate(texts):
            ids[row, : lengths[row]], parts[row, : lengths[row]] = text.ids, text.parts
        there = np.arange(size) < lengths[:, None]  # (B, S)
        bias = np.where(there, np.float32(0), _HIDDEN)[:, None, None]
        inputs: dict[str, NDArray[Any]] = self._fixed | {
            graph.INPUT_IDS: ids,
            graph.TOKEN_TYPES: parts,
            graph.POSITION_IDS: np.ascontiguousarray(np.broadcast_to(np.arange(size) + self._first, shape)),
            graph.ATTENTION_BIAS: bias,
            graph.POOLING: self._pooled(there, lengths)[:, None],
        }
        if self._window:
            apart = np.abs(np.arange(size)[:, None] - np.arange(size))
            inputs[graph.WINDOW_BIAS] = np.where(apart <= self._window, bias, _HIDDEN)
        binding = self._session.binding()
        for name in self._session.inputs:
            bind_input(binding, name, inputs[name])
        result = np.empty((count, 1, self.width), np.float32)
        binding.bind_ortvalue_output(graph.POOLED, ort.OrtValue.ortvalue_from_numpy(result))
        self._session.run(binding)
        return result[:, 0]

    def _pooled(self, there: NDArray[np.bool_], lengths: NDArray[np.int64]) -> Floats:  # (B, S), (B,) -> (B, S)
        """The share of each token's hidden state in its text's vector."""
        if self._pooling == "mean":
            return (there / lengths[:, None]).astype(np.float32)
        place = lengths - 1 if self._pooling == "last" else np.zeros_like(lengths)
        found: Floats = (np.arange(there.shape[1]) == place[:, None]).astype(np.float32)
        return found

    def close(self) -> None:
        del self._session
        self._graph.close()


def passes(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of texts that share a pass of at most so many tokens, padding included; similar lengths come together."""
    together = list[int]()
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if together and lengths[together[0]] * (len(together) + 1) > most:
            yield together
            together = []
        together.append(place)
    if together:
        yield together
