"""A small trained Llama checkpoint on disk: its shape and its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.synthetic import Shape
from edgeinfer.errors import CheckpointError

if TYPE_CHECKING:
    from edgeinfer.export.source.checkpoint import Checkpoint

__all__ = ["EMBEDDING", "FINAL_NORM", "TrainedCheckpoint", "final_norms"]

EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
_HINT = "Give a Llama checkpoint with tied embeddings and without biases, in one safetensors file."
# What a config.json must say, or leave out, for the decoder to be what is computed here.
_REQUIRED = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}


class TrainedCheckpoint:
    """A Llama checkpoint with tied embeddings and without biases.

    Attributes:
        config: its config.json.
        shape: its sizes; the scaling of rotary embeddings is left to `config`.

    Raises:
        CheckpointError: it is of another kind, or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"Cannot read {folder / 'config.json'}: {error}.", _HINT) from error
        for name, required in _REQUIRED.items():
            if self.config.get(name, required if name != "tie_word_embeddings" else False) != required:
                raise CheckpointError(f"{folder} has {name} = {self.config.get(name)!r}, not {required!r}.", _HINT)
        self.shape = self._shape()
        with self._open() as tensors:
            shapes = tensors.shapes
        missing = {name for name, size in self.shape.tensors().items() if shapes.get(name) != size}
        if missing:
            raise CheckpointError(f"{folder} lacks {min(missing)} of the shape that config.json implies.", _HINT)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32, as `Shape.tensors` names and sizes it."""
        with self._open() as tensors:
            return tensors.read(name)

    def _open(self) -> Checkpoint:
        # Not at the top of the file: it needs the export extra.
        from edgeinfer.export.source.checkpoint import Checkpoint

        return Checkpoint(self.folder)

    def _shape(self) -> Shape:
        config = self.config
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        try:
            heads = int(config["num_attention_heads"])
            return Shape(
                name=self.folder.resolve().name,
                model_type="llama",
                hidden=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                ffn=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                vocab_entries=int(config["vocab_size"]),
                max_position=int(config["max_position_embeddings"]),
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
                norm_eps=float(config["rms_norm_eps"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json of {self.folder} is incomplete: {error}.", _HINT) from error


def final_norms(checkpoint: TrainedCheckpoint, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:  # (N,)
    """Euclidean norms of the states that enter the final norm, each token being a text of its own.

    A single token attends to itself alone, so attention is its value vector whatever its position.  # (N,)
    """
    shape = checkpoint.shape
    states: npt.NDArray[np.float32] = checkpoint.tensor(EMBEDDING)[ids]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        v, o = (checkpoint.tensor(f"{prefix}self_attn.{name}_proj.weight") for name in "vo")
        normed = _normed(states, checkpoint.tensor(f"{prefix}input_layernorm.weight"), shape.norm_eps)
        values = (normed @ v.T).reshape(len(ids), shape.kv_heads, shape.head_dim)
        attended: npt.NDArray[np.float32] = np.repeat(values, shape.heads // shape.kv_heads, axis=1).reshape(
            len(ids), -1
        )
        states = states + attended @ o.T
        normed = _normed(states, checkpoint.tensor(f"{prefix}post_attention_layernorm.weight"), shape.norm_eps)
        gate, up, down = (checkpoint.tensor(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        gates = normed @ gate.T
        activated: npt.NDArray[np.float32] = gates / (1 + np.exp(-gates)) * (normed @ up.T)
        states = states + activated @ down.T
    norms: npt.NDArray[np.float32] = np.sqrt(np.sum(states**2, axis=1))
    return norms


def _normed(
    states: npt.NDArray[np.float32], gain: npt.NDArray[np.float32], eps: float
) -> npt.NDArray[np.float32]:  # (N, D), (D,) -> (N, D)
    normed: npt.NDArray[np.float32] = states / np.sqrt(np.mean(states**2, axis=1, keepdims=True) + eps) * gain
    return normed
