"""Logits of exported graphs, run by ONNX Runtime alone, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.bundle import MODEL, DecoderSpec, graph, open_bundle
from edgeinfer.export import ExportConfig, export_checkpoint
from tests.factories import MIXTURES, VARIANTS, make_checkpoint

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
        if spec.window_size:
            distance = np.arange(total - size, total)[:, None] - np.arange(total)
            inputs[graph.WINDOW_BIAS] = np.where(distance < spec.window_size, 0, -1e9).astype(np.float32)[None, None]
        if spec.moe is not None:
            inputs[graph.EXPERT_COUNT] = np.array([spec.moe.top_k])
            inputs[graph.EXPERT_BIAS] = np.zeros((spec.num_layers, spec.moe.experts), np.float32)
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


@pytest.mark.parametrize("arch", [*VARIANTS, *MIXTURES])
def test_float_logits_match_transformers(arch: str, tmp_path: Path) -> None:
    model, runner = export_random(tmp_path, arch, ExportConfig(bits=32))
    expected = expected_logits(model, TOKENS)
    prefill, _ = runner.run(TOKENS[:7], list(range(7)))
    assert np.abs(prefill - expected[:7]).max() <= TOLERANCE
    rest, _ = runner.run(TOKENS[7:], [0, 3])
    assert np.abs(rest - expected[[7, 10]]).max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_sharded_sources_match_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model, runner = export_random(tmp_path, "Qwen2", ExportConfig(bits=32), dtype=dtype, max_shard_size="60KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    logits, _ = runner.run(TOKENS, list(range(len(TOKENS))))
    assert np.abs(logits - expected_logits(model, TOKENS)).max() <= TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_checkpoint(folder / "checkpoint", "Llama")
    return model, export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32))


def test_no_logit_rows_give_no_logits_but_hidden_states(llama: tuple[Any, Path]) -> None:
    model, bundle = llama
    runner = Runner(bundle, rotary_tables(model, len(TOKENS)))
    logits, hidden = runner.run(TOKENS, [])
    assert logits.shape == (0, 320)
    assert hidden.shape == (len(TOKENS), 64)


def test_resuming_after_an_exit_layer_equals_one_pass(llama: tuple[Any, Path]) -> None:
    model, bundle = llama
    rows = list(range(len(TOKENS)))
    first = np.array([True, True, False, False, False, False])
    runner = Runner(bundle, rotary_tables(model, len(TOKENS)))
    _, hidden = runner.run(TOKENS, [], mask=first)
    runner.length = 0
    logits, _ = runner.run(TOKENS, rows, mask=~first, hidden=hidden)
    assert np.abs(logits - expected_logits(model, TOKENS)).max() <= TOLERANCE


def test_masked_blocks_leave_hidden_states_and_cache_untouched(llama: tuple[Any, Path]) -> None:
    model, bundle = llama
    runner = Runner(bundle, rotary_tables(model, len(TOKENS)))
    runner.run(TOKENS[:4], [])
    before = [[buffer.numpy().copy() for buffer in cache] for cache in runner.caches]
    _, hidden = runner.run(TOKENS[4:], [], mask=np.zeros(6, np.bool_))
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.from_numpy(TOKENS[4:])).numpy()
    np.testing.assert_array_equal(hidden, embedded)
    for cache, old in zip(runner.caches, before, strict=True):
        for buffer, kept in zip(cache, old, strict=True):
            np.testing.assert_array_equal(buffer.numpy(), kept)


@pytest.mark.parametrize("arch", ["llama-tied", "qwen2", "llama-mha-odd-sizes"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_graph_computes_with_the_dequantized_weights(arch: str, bits: int, tmp_path: Path) -> None:
    config = ExportConfig(bits=bits, head_bits=bits, keep_small=False, layout="portable")
    model, runner = export_random(tmp_path, arch, config)
    bundle = open_bundle(tmp_path / "bundle")
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(bundle.tensor("embed")))
        model.lm_head.weight.copy_(torch.from_numpy(bundle.tensor("head")))
        for i, layer in enumerate(model.model.layers):
            load_layer(layer, bundle, i)
    expected = expected_logits(model, TOKENS)
    logits, _ = runner.run(TOKENS, list(range(len(TOKENS))))
    # Activations are rounded to int8 before every product, which is all that may differ.
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert error < 0.05


def load_layer(layer: Any, bundle: Any, index: int) -> None:
    """Puts a bundle's dequantized matrices into a transformers layer, undoing the padding of heads."""
    attention, mlp, spec = layer.self_attn, layer.mlp, bundle.manifest.decoder
    q, kv, width = spec.q_size, spec.kv_size, attention.head_dim
    wide = spec.head_dim
    packed = bundle.tensor(f"layers.{index}.attn.qkv")
    parts = np.split(packed, [q, q + kv])
    scales = (np.sqrt(wide / width), 1.0, 1.0)
    for module, rows, scale in zip((attention.q_proj, attention.k_proj, attention.v_proj), parts, scales, strict=True):
        narrow = rows.reshape(-1, wide, rows.shape[1])[:, :width].reshape(-1, rows.shape[1])
        module.weight.copy_(torch.from_numpy(narrow / np.float32(scale)))
    out = bundle.tensor(f"layers.{index}.attn.out")
    narrow = out.reshape(len(out), -1, wide)[:, :, :width].reshape(len(out), -1)
    attention.o_proj.weight.copy_(torch.from_numpy(np.ascontiguousarray(narrow)))
    gate, up = np.split(bundle.tensor(f"layers.{index}.mlp.gate_up"), 2)
    mlp.gate_proj.weight.copy_(torch.from_numpy(gate))
    mlp.up_proj.weight.copy_(torch.from_numpy(up))
    mlp.down_proj.weight.copy_(torch.from_numpy(bundle.tensor(f"layers.{index}.mlp.down")))
