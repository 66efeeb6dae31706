"""Checkpoints whose weights are packed: read as transformers reads them, and damaged ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from edgeinfer.bundle import open_bundle
from edgeinfer.errors import CheckpointError
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint

EXPERTS = "model.layers.1.mlp.experts"
ROWS = np.arange(len(TOKENS))
Tensors = dict[str, torch.Tensor]


def make_mxfp4(folder: Path) -> Any:
    """A random gpt-oss whose experts are packed; returns the model that transformers reads of them."""
    model = make_checkpoint(folder, "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=32)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for layer, decoder in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            whole = tensors.pop(f"model.layers.{layer}.mlp.experts.{name}")
            experts, columns, rows = whole.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            tensors |= {
                f"model.layers.{layer}.mlp.experts.{name}_{part}": values
                for part, values in (("blocks", blocks), ("scales", scales))
            }
            read = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(decoder.mlp.experts, name).data = read
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    model = make_mxfp4(tmp_path / "checkpoint")
    bundle = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32)))
    found = ReferenceBackend(bundle, 16).forward(ForwardInput(TOKENS, ROWS, ROWS)).logits
    assert np.abs(found - expected_logits(model, TOKENS)).max() <= 1e-4


def spoil(folder: Path, name: str, spoilt: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors if spoilt is None else tensors | {name: spoilt}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "spoilt", "says"),
    [
        ("down_proj_scales", torch.full((4, 64, 3), 255, dtype=torch.uint8), "scales that are not numbers"),
        ("down_proj_scales", torch.full((4, 64, 3), 254, dtype=torch.uint8), "not finite"),
        ("down_proj_scales", None, "no tensor '.*down_proj_scales'"),
        ("gate_up_proj_blocks", torch.zeros((4, 192, 2, 8), dtype=torch.uint8), r"shape \(4, 192, 2, 8\)"),
        ("gate_up_proj_scales", torch.zeros((4, 192, 2)), "type F32"),
    ],
)
def test_damaged_mxfp4_is_refused(name: str, spoilt: torch.Tensor | None, says: str, tmp_path: Path) -> None:
    make_mxfp4(tmp_path / "checkpoint")
    spoil(tmp_path / "checkpoint", f"{EXPERTS}.{name}", spoilt)
    with pytest.raises(CheckpointError, match=says) as caught:
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=4))
    assert "\n" not in caught.value.message
    assert not (tmp_path / "bundle").exists()
