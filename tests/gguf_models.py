"""GGUF files for tests: the built-in model, whose weights are taken from its bundle, and small random ones."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.writer import write_gguf
from tests.cache import made
from tests.factories import make_checkpoint
from tests.speculation import BUILTIN

_WRITTEN = ("F32", "F16", "BF16", "Q8_0")  # by the exporter itself; other types are made by llama.cpp
_TEXTS = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


@functools.cache
def builtin_gguf(kind: str = "F16") -> Path:
    """The built-in model's weights in a GGUF file, made once for all tests."""
    return made(_write_builtin, kind, BUILTIN / MANIFEST) / f"tales-{kind}.gguf"


@functools.cache
def builtin_checkpoint() -> Path:
    """A checkpoint with the built-in model's weights multiplied out, made once for all tests."""
    return made(_write_checkpoint, BUILTIN / MANIFEST) / "tales"


def random_gguf(folder: Path, arch: str = "llama", kind: str = "F32", **settings: Any) -> Path:
    """A random model with the tokenizer of tests.factories, and its checkpoint."""
    shutil.copytree(made(_write_random, arch, kind, sorted(settings.items())), folder, dirs_exist_ok=True)
    return folder / "model.gguf"


def _write_builtin(folder: Path, kind: str, manifest: Path) -> None:
    path = folder / f"tales-{kind}.gguf"
    if kind in _WRITTEN:
        write_gguf(builtin_checkpoint(), path, kind)
    else:
        quantize_gguf(builtin_gguf("F32"), path, kind)


def _write_checkpoint(folder: Path, manifest: Path) -> None:
    bundle, folder = open_bundle(manifest.parent), folder / "tales"
    folder.mkdir()
    save_file(dict(_tensors(bundle)), folder / "model.safetensors")
    for name in _TEXTS:
        (folder / name).write_text(bundle.read_text(name), "utf-8")
    special = bundle.read_object("special_tokens.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in special.items() if v}), "utf-8")
    (folder / "config.json").write_text(json.dumps(_config(bundle)), "utf-8")


def _write_random(folder: Path, arch: str, kind: str, settings: list[tuple[str, Any]]) -> None:
    make_checkpoint(folder / "checkpoint", arch, **dict(settings))
    write_gguf(folder / "checkpoint", folder / "model.gguf", kind)


def _tensors(bundle: Bundle) -> list[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    spec = bundle.manifest.decoder
    assert spec is not None
    found = [("model.embed_tokens.weight", bundle.tensor("embed")), ("model.norm.weight", bundle.tensor("final_norm"))]
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts = np.split(bundle.tensor(f"{ours}.attn.qkv"), (spec.q_size, spec.q_size + spec.kv_size))
        gate, up = np.split(bundle.tensor(f"{ours}.mlp.gate_up"), 2)
        found += [(f"{theirs}.self_attn.{n}_proj.weight", part) for n, part in zip("qkv", parts, strict=True)]
        found += [
            (f"{theirs}.self_attn.o_proj.weight", bundle.tensor(f"{ours}.attn.out")),
            (f"{theirs}.mlp.gate_proj.weight", gate),
            (f"{theirs}.mlp.up_proj.weight", up),
            (f"{theirs}.mlp.down_proj.weight", bundle.tensor(f"{ours}.mlp.down")),
            (f"{theirs}.input_layernorm.weight", bundle.tensor(f"{ours}.attn_norm")),
            (f"{theirs}.post_attention_layernorm.weight", bundle.tensor(f"{ours}.mlp_norm")),
        ]
    return [(name, np.ascontiguousarray(tensor)) for name, tensor in found]


def _config(bundle: Bundle) -> dict[str, Any]:
    spec = bundle.manifest.decoder
    assert spec is not None and spec.tied
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 3,
    }
