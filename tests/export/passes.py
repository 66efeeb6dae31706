"""What passes over exported graphs are fed, for tests that run graphs without the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.backends.contract import ExpertChoice
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.paging.layout import PageLayout

Array = NDArray[Any]
Rotary = tuple[NDArray[np.float32], NDArray[np.float32]]

TOKENS = np.array([0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31], np.int64)


def feeds(
    spec: DecoderSpec,
    tokens: NDArray[np.int64],
    rotary: Rotary,
    *,
    start: int = 0,
    rows: NDArray[np.int64] | None = None,
    mask: Array | None = None,
    hidden: Array | None = None,
    experts: ExpertChoice | None = None,
    planes: int = 2,
) -> dict[str, Array]:
    """Every input that a graph may have but the caches, for a pass over a chain after `start` others.

    A paged graph's page 1 of the pool holds the first slots, page 0 those after them.

    Args:
        rotary: cosines and sines of every position.
        rows: that have logits; None is all.
        mask: which blocks run; None is all.
        hidden: states to go on with, (S, D); None begins with the tokens.
        experts: None is the model's own choice.
    """
    size, total = len(tokens), start + len(tokens)
    distance = np.arange(start, total)[:, None] - np.arange(total)
    inputs: dict[str, Array] = {
        graph.INPUT_IDS: tokens[None],
        graph.POSITION_IDS: np.arange(start, total)[None],
        graph.COS_CACHE: rotary[0],
        graph.SIN_CACHE: rotary[1],
        graph.ATTENTION_BIAS: np.zeros((1, 1, size, total), np.float32),
        graph.WINDOW_BIAS: np.where(distance < spec.window_size, 0, -1e9).astype(np.float32)[None, None],
        graph.SEQLENS_K: np.array([total - 1], np.int32),
        graph.TOTAL_LENGTH: np.array(total, np.int32),
        graph.LAYER_MASK: np.ones(2 * spec.num_layers, np.bool_) if mask is None else mask,
        graph.HIDDEN_IN: np.zeros((1, 1, spec.hidden_size), np.float32) if hidden is None else hidden[None],
        graph.USE_HIDDEN: np.array([hidden is not None]),
        graph.LOGIT_ROWS: np.arange(size) if rows is None else rows,
        graph.PLANES: np.array([planes], np.int32),
        graph.KV_PAGES: np.array([[1, 0]], np.int32),
        graph.ROWS: np.array([(0, slot + 1, 0, 0) for slot in range(start, total)], np.int32),
        graph.PATH_SLOTS: np.zeros(1, np.int32),
    }
    if spec.moe is not None:
        choice = experts or ExpertChoice(spec.moe.top_k)
        nothing = np.zeros((spec.num_layers, spec.moe.experts), np.float32)
        inputs[graph.EXPERT_COUNT] = np.array([choice.count])
        inputs[graph.EXPERT_BIAS] = nothing if choice.bias is None else choice.bias
    return inputs


def pool(spec: DecoderSpec) -> dict[str, Array]:
    """The pool of two float32 pages that `feeds` speaks of, empty, and its layout."""
    layout = PageLayout.of(spec.geometry, FLOAT32)
    room = np.zeros(2 * layout.page_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return {graph.KV_POOL: room[start : start + 2 * layout.page_bytes], graph.KV_LAYOUT: layout.array}


class Runner:
    """Drives a bundle's graph by ONNX Runtime alone, with its cache in shared buffers or pages."""

    def __init__(self, bundle: Path, rotary: Rotary, layout: Layout = PORTABLE) -> None:
        opened = open_bundle(bundle)
        assert opened.manifest.decoder is not None
        self.spec: DecoderSpec = opened.manifest.decoder
        options = ort.SessionOptions()
        if layout == NATIVE:
            options.register_custom_ops_library(str(native_kernel().path))
        path = opened.model_file(layout)
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.rotary = rotary
        self.buffers = pool(self.spec) if layout == NATIVE else self._past()  # of the cache, by the names of the inputs
        self.length = 0

    def _past(self) -> dict[str, Array]:
        shape = (1, self.spec.num_kv_heads, 64, self.spec.head_dim)
        names = [name for layer in range(self.spec.num_layers) for name in graph.past_names(layer)]
        return {name: np.zeros(shape, np.float32) for name in names}

    def run(
        self,
        tokens: NDArray[np.int64],
        rows: list[int],
        mask: NDArray[np.bool_] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """One pass over a chain; returns logits (R, V) and hidden states (S, D)."""
        binding = self.session.io_binding()
        wanted = np.array(rows, np.int64)
        given = feeds(self.spec, tokens, self.rotary, start=self.length, rows=wanted, mask=mask, hidden=hidden)
        for name in {i.name for i in self.session.get_inputs()}:
            value = self.buffers[name] if name in self.buffers else given[name]
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
        for name in {o.name for o in self.session.get_outputs()} - {graph.LOGITS, graph.HIDDEN_OUT, graph.EXPERT_IDS}:
            buffer = self.buffers[name.replace("present", "past")]
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(buffer))
        binding.bind_output(graph.LOGITS)
        binding.bind_output(graph.HIDDEN_OUT)
        self.session.run_with_iobinding(binding)
        logits, states = (v.numpy() for v in binding.get_outputs()[-2:])
        self.length += len(tokens)
        return logits, states[0]


def rotary_tables(model: Any, length: int) -> Rotary:
    """Transformers' own rotary tables, (64, dim / 2), as it makes them for a text of this length."""
    with torch.no_grad():
        model.model.rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])
        cos, sin = model.model.rotary_emb(torch.zeros(1, 64, 1), torch.arange(length)[None].expand(1, length))
    pad = np.zeros((64 - length, cos.shape[-1] // 2), np.float32)
    return tuple(np.concatenate([t[0, :, : t.shape[-1] // 2].numpy(), pad]) for t in (cos, sin))  # type: ignore[return-value]


def expected_logits(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:  # (S, V)
    """What transformers computes."""
    with torch.no_grad():
        # Its cache cannot be made where no layer attends.
        logits: NDArray[np.float32] = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    return logits
