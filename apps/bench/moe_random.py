"""Random mixture-of-experts checkpoints of any size, whose experts are not all liked alike; knows nothing of engines.

python -m edgeinfer.apps.bench.moe_random OUT --hidden 1024 --expert-size 512 --experts 32 --top-k 4 --layers 12

A Qwen3-MoE checkpoint of normal(0, 0.02) weights. Every embedding has a part in common, which routers answer to by
numbers of their own, so that some experts are chosen far more often than others, as in trained models.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.safetensors_file import encode, write_header
from edgeinfer.apps.bench.shapes import SLAB_ELEMENTS, STANDARD_DEVIATION
from edgeinfer.apps.bench.vocabulary import write_tokenizer
from edgeinfer.errors import UsageError

__all__ = ["MoEShape", "main", "write_random_moe"]

Floats = npt.NDArray[np.float32]
# The part in common of an embedding, in standard deviations of the rest. Random layers carry it on as something else in
# common, so that with a larger one all tokens would choose the same experts.
_COMMON = 0.2


@dataclass(frozen=True)
class MoEShape:
    """The sizes of a Qwen3-MoE decoder with tied embeddings.

    Attributes:
        skew: standard deviation of what a router adds to an expert's scores whatever the token; 0 likes all alike.
    """

    hidden: int
    expert_size: int
    experts: int
    top_k: int
    layers: int
    vocabulary: int = 4096
    head_dim: int = 64
    skew: float = 1.0

    def __post_init__(self) -> None:
        if self.hidden <= 0 or self.hidden % (4 * self.head_dim):
            message = f"A hidden size of {self.hidden} is not made."
            raise UsageError(message, f"Choose a multiple of {4 * self.head_dim}: four query heads share a KV head.")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape, in file order."""
        hidden, kv = self.hidden, self.hidden // 4
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = (hidden,)
            for name, rows, columns in (("q", hidden, hidden), ("k", kv, hidden), ("v", kv, hidden)):
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = (rows, columns)
            tensors[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{norm}.weight"] = (self.head_dim,)
            tensors[prefix + "mlp.gate.weight"] = (self.experts, hidden)
            for expert in range(self.experts):
                for name in ("gate_proj", "up_proj"):
                    tensors[f"{prefix}mlp.experts.{expert}.{name}.weight"] = (self.expert_size, hidden)
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = (hidden, self.expert_size)
        tensors["model.norm.weight"] = (hidden,)
        return tensors

    def config(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // self.head_dim,
            "num_key_value_heads": self.hidden // 4 // self.head_dim,
            "head_dim": self.head_dim,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.expert_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


def write_random_moe(folder: Path, shape: MoEShape, seed: int = 0) -> None:
    """Writes the checkpoint in bfloat16, with a tokenizer; memory does not depend on the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json", shape.vocabulary)
    chance = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        write_header(file, shape.tensors(), "bfloat16")
        for name, dimensions in shape.tensors().items():
            for slab in _slabs(chance, name, dimensions, shape.skew):
                file.write(encode(slab, "bfloat16").data)


def _slabs(chance: np.random.Generator, name: str, dimensions: tuple[int, ...], skew: float) -> Iterator[Floats]:
    """A tensor's values in pieces of whole rows."""
    if name.endswith("norm.weight"):
        yield np.ones(dimensions, np.float32)
        return
    rows, columns = dimensions
    step = max(1, SLAB_ELEMENTS // columns)
    for start in range(0, rows, step):
        values = chance.standard_normal((min(step, rows - start), columns), np.float32) * STANDARD_DEVIATION
        if name.endswith("embed_tokens.weight"):
            values += np.float32(_COMMON * STANDARD_DEVIATION)
        elif name.endswith("mlp.gate.weight"):
            # What the part in common is in every column of a normed hidden state.
            common = _COMMON / math.sqrt(1 + _COMMON**2)
            liked = chance.standard_normal((len(values), 1), np.float32)
            values += np.float32(skew / (common * columns)) * liked
        yield values


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--expert-size", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--skew", type=float, default=1.0)
    args = parser.parse_args(arguments)
    sizes = (args.hidden, args.expert_size, args.experts, args.top_k, args.layers)
    write_random_moe(args.out, MoEShape(*sizes, skew=args.skew))


if __name__ == "__main__":
    main()
