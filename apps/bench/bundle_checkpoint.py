"""A bundle's weights as a Hugging Face checkpoint on disk, so that other engines can be given the same function.

Knows nothing of engines.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from edgeinfer.apps.bench.safetensors_file import write_header
from edgeinfer.bundle import Bundle
from edgeinfer.export.bundle_checkpoint import checkpoint_config, checkpoint_tensors

__all__ = ["write_bundle_checkpoint"]

_KEPT = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


def write_bundle_checkpoint(bundle: Bundle, target: Path) -> None:
    """Writes a checkpoint in float32 whose weights are the bundle's, multiplied out.

    Raises:
        UsageError: it is neither Llama, Qwen2 nor Qwen3 of the plain kind.
    """
    config = checkpoint_config(bundle)
    target.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        if bundle.has(name):
            shutil.copyfile(bundle.path / name, target / name)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **bundle.read_object("special_tokens.json")}
    for name, data in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (target / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = dict(checkpoint_tensors(bundle))
    with (target / "model.safetensors").open("wb") as file:
        write_header(file, {name: values.shape for name, values in tensors.items()}, "float32")
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, "<f4").data)
