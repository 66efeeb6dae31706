"""Logits of exported graphs, run by ONNX Runtime alone, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from factories import VARIANTS, make_checkpoint
from numpy.typing import NDArray

from edgeinfer.bundle import MODEL, DecoderSpec, graph, open_bundle
from edgeinfer.export import ExportConfig, export_checkpoint

TOKENS = np.array([0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31], np.int64)
TOLERANCE = 1e-4


class Runner:
    """Drives a bundle's graph without the runtime, with its cache in two shared buffers."""

    def __init__(self, bundle: Path, rotary: tuple[NDArray[np.float32], NDArray[np.float32]]) -> None:
        opened = open_bundle(bundle)
        assert opened.manifest.decoder is not None
        self.spec: DecoderSpec = opened.manifest.decoder
        self.session = ort.InferenceSession(opened.file(MODEL), providers=["CPUExecutionProvider"])
        self.cos, self.sin = rotary
        shape = (1, self.spec.num_kv_heads, 64, self.spec.head_dim)
        self.caches = [
            [ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for _ in range(2)]
            for _ in range(self.spec.num_layers)
        ]
        self.length = 0

    def run(
        self,
        tokens: NDArray[np.int64],
        rows: list[int],
        mask: NDArray[np.bool_] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """One pass over a chain; returns logits (R, V) and hidden states (S, D)."""
        spec, size, total = self.spec, len(tokens), self.length + len(tokens)
        placeholder = np.zeros((1, 1, spec.hidden_size), np.float32)
        binding = self.session.io_binding()
        inputs: dict[str, Any] = {
            graph.INPUT_IDS: tokens[None],
            graph.POSITION_IDS: np.arange(self.length, total)[None],
            graph.COS_CACHE: self.cos,
            graph.SIN_CACHE: self.sin,
            graph.ATTENTION_BIAS: np.zeros((1, 1, size, total), np.float32),
            graph.SEQLENS_K: np.array([total - 1], np.int32),
            graph.TOTAL_LENGTH: np.array(total, np.int32),
            graph.LAYER_MASK: np.ones(2 * spec.num_layers, np.bool_) if mask is None else mask,
            graph.HIDDEN_IN: placeholder if hidden is None else hidden[None],
            graph.USE_HIDDEN: np.array([hidden is not None]),
            graph.LOGIT_ROWS: np.array(rows, np.int64),
        }
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
        for layer, cache in enumerate(self.caches):
            for past, present, buffer in zip(graph.past_names(layer), graph.present_names(layer), cache, strict=True):
                binding.bind_ortvalue_input(past, buffer)
                binding.bind_ortvalue_output(present, buffer)
        binding.bind_output(graph.LOGITS)
        binding.bind_output(graph.HIDDEN_OUT)
        self.session.run_with_iobinding(binding)
        logits, states = (v.numpy() for v in binding.get_outputs()[-2:])
        self.length = total
        return logits, states[0]


def rotary_tables(model: Any, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Transformers' own rotary tables, (64, dim / 2), as it makes them for a text of this length."""
    with torch.no_grad():
        model.model.rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])
        cos, sin = model.model.rotary_emb(torch.zeros(1, 64, 1), torch.arange(length)[None].expand(1, length))
    pad = np.zeros((64 - length, cos.shape[-1] // 2), np.float32)
    return tuple(np.concatenate([t[0, :, : t.shape[-1] // 2].numpy(), pad]) for t in (cos, sin))  # type: ignore[return-value]


def expected_logits(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return logits


def export_random(folder: Path, arch: str, config: ExportConfig, **settings: Any) -> tuple[Any, Runner]:
    model = make_checkpoint(folder / "checkpoint", arch, **settings)
    bundle = export_checkpoint(folder / "checkpoint", folder / "bundle", config)
    return model, Runner(bundle, rotary_tables(model, len(TOKENS)))


@pytest.mark.parametrize("arch", VARIANTS)
def test_float_logits_match_transformers(arch: str, tmp_path: Path) -> None:
    model, runner = export_random(tmp_path, arch, ExportConfig(bits=32))
    expected = expected_logits(model, TOKENS)
    prefill, _ = runner.run(TOKENS[:7], list(range(7)))
    assert np.abs(prefill - expected[:7]).max() <= TOLERANCE
    rest, _ = runner.run(TOKENS[7:], [0, 3])
    assert np.abs(rest - expected[[7, 10]]).max() <= TOLERANCE
