"""Cost-expanded mixture-of-experts models: a small trained one at the sizes of a larger; knows nothing of engines.

python -m edgeinfer.apps.bench.expand_moe CHECKPOINT OUT --hidden 1024 --expert-size 1024 --layers 12

As edgeinfer.apps.bench.expand does for dense models: the function of the small model at the cost of the large one, so
every figure taken on one has to say so. The routers' choices in real layers are the small model's; added layers route
at random and write nothing. Experts, those used by a token and the vocabulary stay as many as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.safetensors_file import TensorFile, encode, write_header
from edgeinfer.apps.bench.shapes import STANDARD_DEVIATION
from edgeinfer.errors import CheckpointError, UsageError

__all__ = ["MoEGrowth", "expand_moe", "main"]

Floats = npt.NDArray[np.float32]
_KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Matrices that write to the residual stream: zero but for the real part.
_WRITERS = ("o_proj", "down_proj")
_HINT = "Give a Qwen3-MoE checkpoint with tied embeddings and without biases, in one safetensors file."


@dataclass(frozen=True)
class MoEGrowth:
    """The sizes to grow to; heads and KV heads grow as the hidden size does."""

    hidden: int
    expert_size: int
    layers: int


def expand_moe(source: Path, target: Path, growth: MoEGrowth, seed: int = 0) -> None:
    """Writes a cost-expanded checkpoint in float32, with the tokenizer of its source.

    Raises:
        CheckpointError: the source is of another kind or incomplete.
        UsageError: it does not fit into these sizes.
    """
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {source / 'config.json'}: {error}.", _HINT) from error
    if config.get("model_type") != "qwen3_moe" or not config.get("tie_word_embeddings"):
        raise CheckpointError(f"{source} is not a tied Qwen3-MoE checkpoint.", _HINT)
    grown = _grow(config, growth)
    tensors = TensorFile(source / "model.safetensors")
    shapes = _shapes(tensors.shapes, config, grown)
    target.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    (target / "config.json").write_text(json.dumps(grown, indent=2) + "\n", "utf-8")
    expansion = _Expansion(tensors, config, grown, np.random.default_rng(seed))
    with (target / "model.safetensors").open("wb") as file:
        write_header(file, shapes, "float32")
        for name, shape in shapes.items():
            file.write(encode(expansion.tensor(name, shape), "float32").data)


def _grow(config: dict[str, Any], growth: MoEGrowth) -> dict[str, Any]:
    wider, left = divmod(growth.hidden, int(config["hidden_size"]))
    group, rest = divmod(growth.layers, int(config["num_hidden_layers"]))
    if left or rest or wider < 1 or group < 1 or growth.expert_size < int(config["moe_intermediate_size"]):
        message = "The checkpoint cannot be expanded to these sizes."
        raise UsageError(message, "Choose multiples of its hidden size and layers, and experts no narrower.")
    return config | {
        "hidden_size": growth.hidden,
        "num_hidden_layers": growth.layers,
        "num_attention_heads": wider * config["num_attention_heads"],
        "num_key_value_heads": wider * config["num_key_value_heads"],
        "moe_intermediate_size": growth.expert_size,
        "intermediate_size": growth.expert_size,
        "rms_norm_eps": config["rms_norm_eps"] / wider,
        "cost_expanded": {"layers_per_real_layer": group},
    }


def _shapes(
    small: dict[str, tuple[int, ...]], config: dict[str, Any], grown: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Every tensor of the grown checkpoint: the small one's, those of a layer once for each layer of its group."""
    wider = grown["hidden_size"] // config["hidden_size"]
    size, inner, wide = config["hidden_size"], config["moe_intermediate_size"], grown["moe_intermediate_size"]
    group = grown["cost_expanded"]["layers_per_real_layer"]

    def grow(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        kind = name.split(".")[-2]
        if kind in ("q_norm", "k_norm"):
            return shape
        if len(shape) == 1:
            return (shape[0] * wider,)
        rows, columns = shape
        if kind in ("gate_proj", "up_proj"):
            return (rows // inner * wide, columns * wider)
        if kind == "down_proj":
            return (rows * wider, columns // inner * wide)
        if kind in ("gate", "embed_tokens"):
            return (rows, columns * wider)
        assert size * wider == grown["hidden_size"]
        return (rows * wider, columns * wider)

    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in small.items():
        parts = name.split(".")
        if parts[1] != "layers":
            shapes[name] = grow(name, shape)
            continue
        for layer in range(int(parts[2]) * group, (int(parts[2]) + 1) * group):
            shapes[".".join([*parts[:2], str(layer), *parts[3:]])] = grow(name, shape)
    return shapes


class _Expansion:
    """The tensors of one cost-expanded checkpoint."""

    def __init__(
        self, small: TensorFile, config: dict[str, Any], grown: dict[str, Any], chance: np.random.Generator
    ) -> None:
        self._small = small
        self._chance = chance
        self._group = grown["cost_expanded"]["layers_per_real_layer"]
        # Norms divide by a vector that is longer by added zeros.
        self._gain = np.float32(math.sqrt(config["hidden_size"] / grown["hidden_size"]))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        """One tensor of this shape."""
        parts = name.split(".")
        origin: str | None = name
        if parts[1] == "layers":
            layer, added = divmod(int(parts[2]), self._group)
            origin = None if added else ".".join([*parts[:2], str(layer), *parts[3:]])
        real = None if origin is None else self._small.read(origin)
        if len(shape) == 1:
            return self._gains(parts[-2], real, shape)
        silent = parts[-2] in (*_WRITERS, "embed_tokens")
        values = np.zeros(shape, np.float32)
        if not silent:
            values = self._chance.standard_normal(shape, np.float32) * np.float32(STANDARD_DEVIATION)
        if real is not None:
            values[: real.shape[0], : real.shape[1]] = real
        return values

    def _gains(self, kind: str, real: Floats | None, shape: tuple[int, ...]) -> Floats:
        """Of a norm; those of heads are as wide as before."""
        gains = np.ones(shape, np.float32)
        if real is not None:
            gains[: len(real)] = real if kind in ("q_norm", "k_norm") else real * self._gain
        return gains


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--expert-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args(arguments)
    expand_moe(args.checkpoint, args.out, MoEGrowth(args.hidden, args.expert_size, args.layers))


if __name__ == "__main__":
    main()
