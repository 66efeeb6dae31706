"""GGUF files of a shape with every matrix in Q4_0, and random ones; knows nothing of engines or timing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.shapes import STANDARD_DEVIATION, Shape
from edgeinfer.errors import UsageError

__all__ = ["q4_0_writer", "write_random_gguf"]

# A Q4_0 block is a half-precision scale d and 32 nibbles q, each standing for d * (q - 8).
BLOCK_VALUES = 32
BLOCK_BYTES = 18
# The standard deviation of q - 8 for uniform nibbles is sqrt((16**2 - 1) / 12).
_NIBBLE_DEVIATION = math.sqrt(255 / 12)


def write_random_gguf(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write random weights of the shape: matrices and embedding in Q4_0, norms and biases in float32, no vocabulary.

    Tensors are written one by one, so memory is that of the largest. Scaling of the rotary embedding is left out: it
    changes no timing.

    Raises:
        UsageError: the gguf package is not installed, or a matrix has rows that Q4_0 cannot hold.
    """
    writer = q4_0_writer(path, shape, name=f"{shape.name} random")
    generator = np.random.default_rng(seed)
    for name, dimensions in shape.tensors().items():
        writer.write_tensor_data(_random_tensor(generator, name, dimensions))
    writer.close()


def q4_0_writer(path: Path, shape: Shape, name: str) -> Any:
    """A GGUF writer that has written everything but the tensors' data, which are to follow in the shape's order.

    Raises:
        UsageError: the gguf package is not installed, or a matrix has rows that Q4_0 cannot hold.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UsageError("The gguf package is not installed.", "Install the gguf extra: edgeinfer[gguf].") from error
    if shape.hidden % BLOCK_VALUES or shape.ffn % BLOCK_VALUES:
        raise UsageError(f"Q4_0 cannot hold the shape {shape.name}.", f"Rows must be multiples of {BLOCK_VALUES}.")
    writer = gguf.GGUFWriter(path, shape.model_type)
    _add_metadata(writer, shape, name)
    arch = gguf.MODEL_ARCH.QWEN2 if shape.model_type == "qwen2" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, shape.layers)
    for tensor, dimensions in shape.tensors().items():
        target = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert target is not None, tensor
        if len(dimensions) == 1:
            writer.add_tensor_info(target, dimensions, np.dtype(np.float32), 4 * dimensions[0])
            continue
        blocks = (dimensions[0], dimensions[1] // BLOCK_VALUES * BLOCK_BYTES)
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor_info(target, blocks, np.dtype(np.uint8), math.prod(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _add_metadata(writer: Any, shape: Shape, name: str) -> None:
    """The keys llama.cpp requires of both architectures."""
    writer.add_name(name)
    writer.add_file_type(2)  # LLAMA_FTYPE_MOSTLY_Q4_0
    writer.add_quantization_version(2)
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _random_tensor(generator: np.random.Generator, name: str, dimensions: tuple[int, ...]) -> npt.NDArray[Any]:
    """Norms of one, normal biases, and Q4_0 blocks whose values deviate by 0.02."""  # dimensions, or (rows, bytes)
    if name.endswith("norm.weight"):
        return np.ones(dimensions, np.float32)
    if len(dimensions) == 1:
        return generator.normal(0.0, STANDARD_DEVIATION, dimensions).astype(np.float32)
    blocks = generator.integers(0, 256, (math.prod(dimensions) // BLOCK_VALUES, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = np.full(1, STANDARD_DEVIATION / _NIBBLE_DEVIATION, "<f2").view(np.uint8)
    return blocks.reshape(dimensions[0], -1)
