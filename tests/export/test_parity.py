"""Logits of exported graphs, run by ONNX Runtime alone, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.layouts import LAYOUTS, PORTABLE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.native.library import LIBRARY
from tests.export.passes import TOKENS, Runner, expected_logits, rotary_tables
from tests.factories import make_checkpoint
from tests.tables import each_row

TOLERANCE = 1e-4
# Where edgeinfer was installed without a compiler, the graph of ONNX Runtime's operators alone.
RUNNABLE = LAYOUTS if LIBRARY.is_file() else (PORTABLE,)


def export_random(
    folder: Path, arch: str, config: ExportConfig, layouts: tuple[Layout, ...] = (PORTABLE,), **settings: Any
) -> tuple[Any, list[Runner]]:
    model = make_checkpoint(folder / "checkpoint", arch, **settings)
    bundle = export_checkpoint(folder / "checkpoint", folder / "bundle", config)
    return model, [Runner(bundle, rotary_tables(model, len(TOKENS)), layout) for layout in layouts]


@each_row("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_sharded_sources_match_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model, (runner,) = export_random(tmp_path, "Qwen2", ExportConfig(bits=32), dtype=dtype, max_shard_size="60KB")
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
    for layout in RUNNABLE:
        runner = Runner(bundle, rotary_tables(model, len(TOKENS)), layout)
        _, hidden = runner.run(TOKENS, [], mask=first)
        runner.length = 0
        logits, _ = runner.run(TOKENS, rows, mask=~first, hidden=hidden)
        assert np.abs(logits - expected_logits(model, TOKENS)).max() <= TOLERANCE


def test_masked_blocks_leave_hidden_states_and_cache_untouched(llama: tuple[Any, Path]) -> None:
    model, bundle = llama
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.from_numpy(TOKENS[4:])).numpy()
    for layout in RUNNABLE:
        runner = Runner(bundle, rotary_tables(model, len(TOKENS)), layout)
        runner.run(TOKENS[:4], [])
        before = {name: buffer.copy() for name, buffer in runner.buffers.items()}
        _, hidden = runner.run(TOKENS[4:], [], mask=np.zeros(6, np.bool_))
        np.testing.assert_array_equal(hidden, embedded)
        np.testing.assert_equal(runner.buffers, before)
        assert any(buffer.any() for buffer in before.values())


@pytest.mark.parametrize("arch", ["llama-tied", "qwen2", "llama-mha-odd-sizes"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_graph_computes_with_the_dequantized_weights(arch: str, bits: int, tmp_path: Path) -> None:
    config = ExportConfig(bits=bits, head_bits=bits, keep_small=False, layout="portable")
    model, (runner,) = export_random(tmp_path, arch, config)
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
