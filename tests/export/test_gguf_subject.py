"""What a checkpoint is in llama.cpp's terms, and what its graphs cannot express; nothing is written or run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.gguf.tensors import gguf_tensor_names
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.options import ExportConfig
from tests.export.gguf_cases import LATENT
from tests.factories import VARIANTS, make_block_ffn_checkpoint, make_checkpoint
from tests.tables import each_row

REFUSED = {
    "qwen3-tied-biases": "bias of the attention's output",
    "qwen2-moe-dense-layers": "layers without experts",
    "qwen3-moe-plain": "layers without experts",
    "olmoe": "queries that share keys",
}


@each_row(("arch", "what"), REFUSED.items())
def test_what_llama_cpp_cannot_express_is_refused(arch: str, what: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", arch)
    with pytest.raises(UnsupportedArchitectureError, match=what) as error:
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    assert "ONNX" in error.value.hint
    assert not (tmp_path / "model.gguf").exists()


@each_row(
    ("arch", "settings", "what"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}, "not renormalized"),
        ("qwen2-moe", {"norm_topk_prob": True}, "renormalized"),
        ("qwen2", {"rope_parameters": VARIANTS["llama-llama3-rope"][1]["rope_parameters"]}, "type llama3"),
        ("qwen2", {"head_dim": 32}, "128 wide together beside a hidden state of 64"),
    ],
)
def test_settings_that_a_graph_lacks_are_refused(
    arch: str, settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "checkpoint", arch, **settings)
    with pytest.raises(UnsupportedArchitectureError, match=what):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")


def test_block_ffn_has_no_gguf(tmp_path: Path) -> None:
    make_block_ffn_checkpoint(tmp_path / "checkpoint", joined=True)
    with pytest.raises(UnsupportedArchitectureError, match="has no graph with a router"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")


def test_another_type_is_not_written_directly(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Llama")
    with pytest.raises(UsageError, match="Q4_K_M"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q4_K_M")


def test_names_of_tensors() -> None:
    assert gguf_tensor_names("embed") == ("token_embd.weight",)
    assert gguf_tensor_names("layers.3.attn.qkv_bias") == (
        "blk.3.attn_q.bias",
        "blk.3.attn_k.bias",
        "blk.3.attn_v.bias",
    )
    assert gguf_tensor_names("layers.3.attn.qkv", {"attn.qkv": ("attn_qkv.weight",)}) == ("blk.3.attn_qkv.weight",)
    assert gguf_tensor_names("layers.11.mlp.experts.5.gate_up") == (
        "blk.11.ffn_gate_exps.weight",
        "blk.11.ffn_up_exps.weight",
    )
    assert gguf_tensor_names("layers.0.mlp.shared.down") == ("blk.0.ffn_down_shexp.weight",)


def test_what_lies_otherwise_than_ours_is_not_calibrated(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Youtu", **LATENT)
    config = ExportConfig(format="gguf", budget_bits=4.5)
    with pytest.raises(UsageError, match="Calibrating GGUF files of deepseek2"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", config)
    assert not (tmp_path / "bundle").exists()
