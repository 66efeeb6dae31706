"""A checkpoint as a float32 GGUF file without a vocabulary; knows nothing of quantization or of engines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.gguf_weights import interleaved
from edgeinfer.apps.bench.safetensors_file import TensorFile
from edgeinfer.errors import CheckpointError, UsageError

__all__ = ["GGUF_ARCHITECTURES", "gguf_name", "write_float_gguf"]

# What llama.cpp calls the architectures of config.json whose graphs it has and this script writes.
GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}

_HINT = "Give a Llama, Qwen2, Qwen3 or Qwen3-MoE checkpoint in one safetensors file."


def write_float_gguf(path: Path, checkpoint: Path) -> None:
    """Writes every tensor in float32, experts of a layer stacked; it is to be fed token ids.

    Memory is that of the largest tensor of the file.

    Raises:
        CheckpointError: the architecture has no GGUF here, or the checkpoint is incomplete.
        UsageError: the gguf package is not installed.
    """
    gguf = _package()
    config = _config(checkpoint)
    source = TensorFile(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[config["model_type"]])
    _add_metadata(writer, config, checkpoint.resolve().name)
    tensors = list(_tensors(config, source))
    for tensor in tensors:
        size = 4 * math.prod(tensor.shape)
        writer.add_tensor_info(gguf_name(tensor.name, config), tensor.shape, np.dtype(np.float32), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_values(tensor, config, source))
    writer.close()


def gguf_name(name: str, config: dict[str, Any]) -> str:
    """llama.cpp's name of a tensor of a checkpoint, experts of a layer being one tensor without their numbers.

    Raises:
        CheckpointError: it has none.
    """
    gguf = _package()
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == GGUF_ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise CheckpointError(f"llama.cpp has no name for the tensor {name}.", _HINT)
    return found


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its name among the checkpoint's, its shape, and the tensors of the checkpoint in it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UsageError("The gguf package is not installed.", "Install the gguf extra: edgeinfer[gguf].") from error
    return gguf


def _config(checkpoint: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {checkpoint / 'config.json'}: {error}.", _HINT) from error
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    # llama.cpp's graph of Qwen3-MoE always renormalizes, and has no dense layers.
    odd = config.get("model_type") == "qwen3_moe" and (
        not config.get("norm_topk_prob") or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    )
    if config.get("model_type") not in GGUF_ARCHITECTURES or kind != "default" or odd:
        raise CheckpointError(f"{checkpoint} cannot be written as GGUF.", _HINT)
    return config


def _tensors(config: dict[str, Any], source: TensorFile) -> Iterator[_Tensor]:
    """The tensors of the file in the checkpoint's order; a tied head is left out, as llama.cpp shares it then."""
    shapes, stacked = source.shapes, set()
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            yield _Tensor(name, shape, (name,))
            continue
        part = rest.partition(".")[2]
        whole = f"{layer}.mlp.experts.{part}"
        if whole not in stacked:
            stacked.add(whole)
            count = _experts(config)
            yield _Tensor(
                whole, (count, *shape), tuple(f"{layer}.mlp.experts.{expert}.{part}" for expert in range(count))
            )


def _values(tensor: _Tensor, config: dict[str, Any], source: TensorFile) -> npt.NDArray[np.float32]:
    """The tensor as llama.cpp wants it: it turns neighbours of a head in Llama, halves in the others."""
    values = np.stack([source.read(part) for part in tensor.parts]).reshape(tensor.shape)
    turned = config["model_type"] == "llama" and tensor.name.endswith(("q_proj.weight", "k_proj.weight"))
    return interleaved(values, _head_dim(config)) if turned else values


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def _add_metadata(writer: Any, config: dict[str, Any], name: str) -> None:
    """The keys llama.cpp requires."""
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_file_type(0)  # LLAMA_FTYPE_ALL_F32
    writer.add_quantization_version(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
