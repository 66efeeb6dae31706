"""Cost-expanded models: a small trained checkpoint at the sizes of a larger one.

A cost-expanded model computes the function of the small one and costs what the large one does, so its text and what
drafters guess right are those of a trained model while time and memory are those of a large one. Every figure taken on
such a model has to say so.

- Width: the added channels of the residual stream hold zeros, since nothing writes to them; norms divide by a longer
  vector, which their gains and epsilon make up for.
- Heads and feed-forward columns: added ones have random weights and are not read.
- Layers: each real layer is followed by added ones that compute random queries, keys, values and gates and write
  nothing. To leave after real layer k thus costs k/L of the layers, as in the small model; a drafter that skips layers
  must move by whole such groups, or it would drop the added ones, which do nothing, for free. `config.json` gives the
  size of a group as `cost_expanded.layers_per_real_layer`.
- Vocabulary: the logits of added tokens are pushed far below every real one by one added channel, which holds a small
  constant in every real token's embedding and a large negative number in those of the added tokens.

Weights that cannot matter are random rather than zero, so that no kernel, quantizer or compressor is given an easier
task than real weights would give it.

    python -m tests.tools.cost_expanded CHECKPOINT FOLDER [SHAPE]
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgeinfer.core.errors import CheckpointError, UsageError
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.tools.random_models import STANDARD_DEVIATION, Shape, find_shape, write_header

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
    """A Llama checkpoint with tied embeddings and without biases."""

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
        with Checkpoint(folder) as tensors:
            shapes = tensors.shapes
        missing = {name for name, size in self.shape.tensors().items() if shapes.get(name) != size}
        if missing:
            raise CheckpointError(f"{folder} lacks {min(missing)} of the shape that config.json implies.", _HINT)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32, as `Shape.tensors` names and sizes it."""
        with Checkpoint(self.folder) as tensors:
            return tensors.read(name)

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
    """Euclidean norms of the states that enter the final norm, each token being a text of its own. A single token
    attends to itself alone, so attention is its value vector whatever its position."""
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


COST_EXPANDED = "cost-expanded"
# What a tokenizer and a chat need, besides config and weights.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_KEPT = (*_TOKENIZER, "chat_template.jinja", "generation_config.json")
# Values that share a scale: the spare channel is kept in a group without real ones, so that its large numbers cost the
# real ones no precision.
_GROUP = 128
# The constant of real tokens, relative to the shortest of their embeddings: the lengths that norms divide by grow by
# 5e-11 of themselves, and half-precision scales can still hold it.
_CONSTANT = 1e-5
# The number of added tokens, within the range of half-precision scales.
_REPULSION = 3e4
# How far below the lowest real logit the added ones are to lie, and by how much the real ones may shift.
_MARGIN, _LARGEST_SHIFT = 30.0, 1e-4
# States in a text may be longer or shorter than those the constants are derived from, which are of single tokens.
_SAFETY = 4.0
_SAMPLED_TOKENS = 512
_ROWS_AT_ONCE = 8192

Floats = npt.NDArray[np.float32]


def expanded_shape(source: Shape, shape: Shape) -> Shape:
    """The sizes of `shape` with the small model's rotary embedding, context and tokens, and a scaled epsilon."""
    smaller = [n for n in ("hidden", "kv_heads", "ffn", "vocab_size") if getattr(shape, n) < getattr(source, n)]
    spare = shape.vocab_size == source.vocab_size or (shape.hidden - 1) // _GROUP * _GROUP >= source.hidden
    for reason, wrong in {
        "head_dim differs": source.head_dim != shape.head_dim,
        "the number of layers is no multiple": shape.layers % source.layers != 0,
        "fewer heads share a KV head": shape.heads // shape.kv_heads < source.heads // source.kv_heads,
        f"{', '.join(smaller)} is smaller": bool(smaller),
        f"no group of {_GROUP} channels is free of real ones": not spare,
    }.items():
        if wrong:
            hint = "Choose a larger shape, or another checkpoint."
            raise UsageError(f"The checkpoint cannot be expanded: {reason}.", hint)
    return replace(
        source,
        name=f"{source.name}-{COST_EXPANDED}-{shape.name}",
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        vocab_size=shape.vocab_size,
        norm_eps=source.norm_eps * source.hidden / shape.hidden,
    )


def expand_checkpoint(source: Path, target: Path, shape: Shape) -> None:
    """Write a cost-expanded checkpoint in float32, with the tokenizer and chat template of its source."""
    checkpoint = TrainedCheckpoint(source)
    expansion = _Expansion(checkpoint, expanded_shape(checkpoint.shape, shape))
    target.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    (target / "config.json").write_text(json.dumps(_config(checkpoint, shape), indent=2) + "\n", encoding="utf-8")
    with (target / "model.safetensors").open("wb") as file:
        write_header(file, expansion.shape.tensors())
        expansion.write(file)


def _config(checkpoint: TrainedCheckpoint, shape: Shape) -> dict[str, Any]:
    grown = expanded_shape(checkpoint.shape, shape)
    origin = {
        "source": checkpoint.shape.name,
        "shape": shape.name,
        "layers_per_real_layer": grown.layers // checkpoint.shape.layers,
    }
    return checkpoint.config | {
        "hidden_size": grown.hidden,
        "num_hidden_layers": grown.layers,
        "num_attention_heads": grown.heads,
        "num_key_value_heads": grown.kv_heads,
        "head_dim": grown.head_dim,
        "intermediate_size": grown.ffn,
        "vocab_size": grown.vocab_size,
        "rms_norm_eps": grown.norm_eps,
        "dtype": "float32",
        "cost_expanded": origin,
    }


@dataclass(frozen=True)
class _Vocabulary:
    """How added tokens are kept out: the constant of real ones, the number of added ones, the final norm's gain."""

    constant: float
    number: float
    gain: float

    @classmethod
    def of(cls, checkpoint: TrainedCheckpoint, grown: Shape) -> _Vocabulary:
        """Choose numbers that put logits of added tokens low enough and shift real ones little, with a margin."""
        source = checkpoint.shape
        if grown.vocab_size == source.vocab_size:
            return cls(0.0, 0.0, 0.0)
        embedding = checkpoint.tensor(EMBEDDING)
        lengths = np.linalg.norm(embedding, axis=1)
        constant = _CONSTANT * float(lengths[lengths > 0].min())
        # No logit lies lower, as a normed state before its gain is no longer than sqrt(hidden).
        deepest = float(np.linalg.norm(embedding * checkpoint.tensor(FINAL_NORM), axis=1).max())
        deepest *= math.sqrt(source.hidden)
        sampled = np.linspace(0, source.vocab_size - 1, min(_SAMPLED_TOKENS, source.vocab_size)).astype(np.int64)
        states = final_norms(checkpoint, sampled)
        # The spare channel after the final norm is gain * constant * sqrt(hidden) / length of the state.
        low, high = (deepest + _MARGIN) / _REPULSION, _LARGEST_SHIFT / constant
        if low * _SAFETY * float(states.max()) > high / _SAFETY * float(states.min()):
            message = f"The states of {checkpoint.folder} differ too much in length to add tokens to its vocabulary."
            raise CheckpointError(message, "Choose a shape with its vocabulary, or another checkpoint.")
        least, most = low * float(states.max()), high * float(states.min())
        return cls(constant, -_REPULSION, math.sqrt(least * most) / (constant * math.sqrt(grown.hidden)))


class _Expansion:
    """The tensors of one cost-expanded checkpoint."""

    def __init__(self, checkpoint: TrainedCheckpoint, shape: Shape) -> None:
        self.shape = shape
        self._checkpoint = checkpoint
        self._small = checkpoint.shape
        self._vocabulary = _Vocabulary.of(checkpoint, shape)
        self._generator = np.random.default_rng(0)
        self._group = shape.layers // self._small.layers

    def write(self, file: BinaryIO) -> None:
        """Write all tensors in the order of the shape."""
        for name, dimensions in self.shape.tensors().items():
            for part in self._parts(name, dimensions):
                file.write(part.astype("<f4", copy=False).data)

    def _parts(self, name: str, dimensions: tuple[int, ...]) -> Iterator[Floats]:
        """A tensor in pieces of whole rows."""  # each (rows, ...)
        if name == EMBEDDING:
            yield from self._embedding()
        elif len(dimensions) == 1:
            yield self._gains(name)
        else:
            yield self._matrix(name, dimensions)

    def _embedding(self) -> Iterator[Floats]:
        small, hidden = self._small, self.shape.hidden
        real = np.zeros((small.vocab_size, hidden), np.float32)
        real[:, : small.hidden] = self._checkpoint.tensor(EMBEDDING)
        if self.shape.vocab_size > small.vocab_size:
            real[:, -1] = self._vocabulary.constant
        yield real
        for start in range(small.vocab_size, self.shape.vocab_size, _ROWS_AT_ONCE):
            added = self._random((min(_ROWS_AT_ONCE, self.shape.vocab_size - start), hidden))
            added[:, : small.hidden] = 0
            added[:, -1] = self._vocabulary.number
            yield added

    def _gains(self, name: str) -> Floats:  # (hidden,)
        """The gains of a norm; only the head reads the spare channel."""
        small, grown = self._small, self.shape
        gains = np.ones(grown.hidden, np.float32)
        origin = self._origin(name)
        if origin is not None:
            gains[: small.hidden] = self._checkpoint.tensor(origin) * np.float32(math.sqrt(small.hidden / grown.hidden))
        if grown.vocab_size > small.vocab_size:
            gains[-1] = self._vocabulary.gain if name == FINAL_NORM else 0
        return gains

    def _matrix(self, name: str, dimensions: tuple[int, ...]) -> Floats:  # dimensions
        """A linear layer: layers that write to the residual stream are zero except for the real part, others random."""
        origin, kind = self._origin(name), name.split(".")[-2]
        writes = kind in ("o_proj", "down_proj")
        weights = np.zeros(dimensions, np.float32) if writes else self._random(dimensions)
        if origin is None:
            return weights
        real = self._checkpoint.tensor(origin)
        rows, columns = np.arange(real.shape[0]), np.arange(real.shape[1])
        if kind == "q_proj":
            rows = self._slots()
        elif kind == "o_proj":
            columns = self._slots()
        weights[np.ix_(rows, columns)] = real
        return weights

    def _slots(self) -> npt.NDArray[np.int64]:  # (heads of the small model x head_dim,)
        """Where the small model's query channels go: each head stays with its KV head."""
        small, grown = self._small, self.shape
        heads = np.arange(small.heads)
        sharing = small.heads // small.kv_heads
        places = heads // sharing * (grown.heads // grown.kv_heads) + heads % sharing
        slots: npt.NDArray[np.int64] = (places[:, None] * small.head_dim + np.arange(small.head_dim)).ravel()
        return slots

    def _origin(self, name: str) -> str | None:
        """The tensor of the small model that this one holds; None in an added layer."""
        parts = name.split(".")
        if parts[1] != "layers":
            return name
        layer, added = divmod(int(parts[2]), self._group)
        return None if added else ".".join([*parts[:2], str(layer), *parts[3:]])

    def _random(self, dimensions: tuple[int, ...]) -> Floats:  # dimensions
        return self._generator.standard_normal(dimensions, np.float32) * np.float32(STANDARD_DEVIATION)


if __name__ == "__main__":
    expand_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), find_shape(sys.argv[3] if sys.argv[3:] else "qwen2.5-0.5b"))
