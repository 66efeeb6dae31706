"""A small random checkpoint whose experts are packed as MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.factories import make_checkpoint


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
