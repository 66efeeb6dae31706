"""Named model shapes and random checkpoints of them; knows nothing of engines or timing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.safetensors_file import Dtype, encode, write_header
from edgeinfer.apps.bench.vocabulary import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer
from edgeinfer.errors import UsageError

__all__ = ["SHAPES", "Dtype", "Shape", "find_shape", "write_random_checkpoint"]

STANDARD_DEVIATION = 0.02
SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, as published in its `config.json`.

    Attributes:
        vocab_size: rows of the embedding; real vocabularies are a little smaller and padded.
        vocab_entries: tokens of the tokenizer.
        bias: whether q, k and v have one.
        rope_scaling: Hugging Face's dictionary, or None.
    """

    name: str
    model_type: Literal["llama", "qwen2"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    vocab_entries: int
    max_position: int
    rope_theta: float
    norm_eps: float
    bias: bool = False
    tied: bool = True
    rope_scaling: dict[str, Any] | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape, in file order."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            tensors[prefix + "input_layernorm.weight"] = (self.hidden,)
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = (width, self.hidden)
                if self.bias:
                    tensors[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
            tensors[prefix + "self_attn.o_proj.weight"] = (self.hidden, q)
            tensors[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            tensors[prefix + "mlp.gate_proj.weight"] = (self.ffn, self.hidden)
            tensors[prefix + "mlp.up_proj.weight"] = (self.ffn, self.hidden)
            tensors[prefix + "mlp.down_proj.weight"] = (self.hidden, self.ffn)
        tensors["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            tensors["lm_head.weight"] = (self.vocab_size, self.hidden)
        return tensors

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    def config(self, dtype: Dtype) -> dict[str, Any]:
        """The `config.json` of the checkpoint."""
        return {
            "architectures": ["Qwen2ForCausalLM" if self.model_type == "qwen2" else "LlamaForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "bos_token_id": self.special_id("<|endoftext|>"),
            "eos_token_id": self.special_id("<|im_end|>"),
        }

    def special_id(self, token: str) -> int:
        """The id of a special token: they are the last entries of the vocabulary."""
        return self.vocab_entries - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(token)


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Sizes from the published config.json files of Qwen/Qwen2.5-0.5B and meta-llama/Llama-3.2-1B.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", "qwen2", 896, 24, 14, 2, 64, 4864, 151936, 151665, 32768, 1e6, 1e-6, bias=True),
        Shape(
            "llama-3.2-1b", "llama", 2048, 16, 32, 8, 64, 8192, 128256, 128256, 131072, 5e5, 1e-5,
            rope_scaling=_LLAMA3_SCALING,
        ),
        Shape("60m", "llama", 512, 12, 8, 2, 64, 2048, 32000, 32000, 4096, 1e4, 1e-5),
        Shape("15m", "llama", 256, 8, 4, 2, 64, 768, 32000, 32000, 2048, 1e4, 1e-5),
        Shape("tales", "llama", 256, 6, 4, 2, 64, 640, 4096, 4096, 1024, 1e4, 1e-5),
        Shape("tiny", "qwen2", 128, 2, 2, 1, 64, 256, 512, 500, 256, 1e4, 1e-6, bias=True),
    )
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """The shape of that name.

    Raises:
        UsageError: no such shape.
    """
    if name not in SHAPES:
        raise UsageError(f"Unknown shape {name!r}.", f"Known shapes: {', '.join(SHAPES)}.")
    return SHAPES[name]


def write_random_checkpoint(folder: Path, shape: Shape, dtype: Dtype = "float32", seed: int = 0) -> None:
    """Write a Hugging Face checkpoint of normal(0, 0.02) weights, norms of one, and a tokenizer of realistic size.

    Streams slabs of 16 MB, so memory does not depend on the model.

    Raises:
        UsageError: an unknown dtype.
    """
    if dtype not in get_args(Dtype):
        raise UsageError(f"Unknown dtype {dtype!r}.", f"Known dtypes: {', '.join(get_args(Dtype))}.")
    folder.mkdir(parents=True, exist_ok=True)
    eos = shape.special_id("<|im_end|>")
    generation = {"bos_token_id": shape.special_id("<|endoftext|>"), "eos_token_id": eos, "do_sample": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    for name, data in (
        ("config.json", shape.config(dtype)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json", shape.vocab_entries)
    with (folder / "model.safetensors").open("wb") as file:
        write_header(file, shape.tensors(), dtype)
        generator = np.random.default_rng(seed)
        for name, dimensions in shape.tensors().items():
            for slab in _slabs(generator, math.prod(dimensions), ones=name.endswith("norm.weight")):
                file.write(encode(slab, dtype).data)


def _slabs(generator: np.random.Generator, size: int, *, ones: bool) -> Iterator[npt.NDArray[np.float32]]:
    """A tensor's values in pieces of at most `SLAB_ELEMENTS`."""  # each (slab,)
    for start in range(0, size, SLAB_ELEMENTS):
        count = min(SLAB_ELEMENTS, size - start)
        if ones:
            yield np.ones(count, np.float32)
        else:
            slab = generator.standard_normal(count, np.float32)
            slab *= STANDARD_DEVIATION
            yield slab
