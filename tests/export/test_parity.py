"""Logits of exported graphs, run by ONNX Runtime alone, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.layouts import LAYOUTS, PORTABLE, Layout
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
