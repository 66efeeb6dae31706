"""A trained Llama checkpoint as GGUF, every matrix in Q4_0; knows nothing of engines or timing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.gguf_random import q4_0_writer
from edgeinfer.apps.bench.trained import TrainedCheckpoint
from edgeinfer.errors import UsageError

__all__ = ["interleaved", "write_gguf"]

_ROWS_AT_ONCE = 8192


def write_gguf(path: Path, checkpoint: Path) -> None:
    """Writes matrices and embedding in Q4_0, norms in float32, and no vocabulary: it is to be fed token ids.

    Raises:
        CheckpointError: it is not a Llama checkpoint with tied embeddings and without biases.
        UsageError: the gguf package is not installed, a matrix has rows that Q4_0 cannot hold, or rotary embeddings
            are scaled.
    """
    source = TrainedCheckpoint(checkpoint)
    scaling = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise UsageError("Scaled rotary embeddings cannot be written as GGUF.", "Choose another checkpoint.")
    shape = source.shape
    writer = q4_0_writer(path, shape, name=shape.name)
    for name, dimensions in shape.tensors().items():
        tensor = source.tensor(name)
        if len(dimensions) == 1:
            writer.write_tensor_data(tensor)
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, shape.head_dim)
        writer.write_tensor_data(_quantized(tensor))
    writer.close()


def interleaved(weights: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:  # (heads x head_dim, K)
    """The rows in llama.cpp's order: it turns neighbours of a head, where Hugging Face turns halves."""
    halves = weights.reshape(-1, 2, head_dim // 2, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _quantized(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:  # (N, K) -> (N, bytes)
    """Blocks of Q4_0, made in pieces: quantizing takes several times the memory of what it is given."""
    import gguf

    pieces = (weights[start : start + _ROWS_AT_ONCE] for start in range(0, len(weights), _ROWS_AT_ONCE))
    return np.concatenate([gguf.quantize(piece, gguf.GGMLQuantizationType.Q4_0) for piece in pieces])
