"""Random checkpoints at the sizes of published decoders, with tokenizers of any size.

python -m tests.tools.random_models SHAPE FOLDER
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer.bundle.array_file import encode_header
from edgeinfer.core.errors import UsageError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "dr", "fl", "gr", "kl", "pl", "qu", "sh", "st", "th", "tr"]
_VOWELS = [*"aeiou", "ai", "ea", "ou"]
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "nd", "st"]


def _byte_alphabet() -> list[str]:
    """GPT-2's table of printable characters for the 256 bytes of a byte-level BPE."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return [chr(byte) if byte in printing else chr(256 + next(others)) for byte in range(256)]


def _words(seed: int) -> Iterator[str]:
    """Endless pseudo-words of one to four syllables."""
    draw = random.Random(seed)
    while True:
        syllables = draw.choices((1, 2, 3, 4), weights=(4, 6, 3, 1))[0]
        parts = (draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables))
        yield "".join(parts)


def synthesize_vocabulary(entries: int, seed: int = 0) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary without special tokens, and the merges that reach all of it."""
    if entries < 256:
        raise UsageError(f"A byte-level vocabulary of {entries} entries is too small.", "It needs at least 256.")
    alphabet = _byte_alphabet()
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _words(seed):
        spelled = alphabet[ord(" ")] + word
        for end in range(2, len(spelled) + 1):
            if len(vocabulary) == entries:
                return vocabulary, merges
            if spelled[:end] not in vocabulary:
                vocabulary[spelled[:end]] = len(vocabulary)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    raise AssertionError("the words are endless")


def write_tokenizer(path: Path, entries: int) -> None:
    """Write a `tokenizer.json` of exactly `entries` tokens, the last of them special."""
    vocabulary, merges = synthesize_vocabulary(entries - len(SPECIAL_TOKENS))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(vocabulary) + index, "content": token, **flags} for index, token in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(merge) for merge in merges],
        },
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def pseudo_text(words: int, seed: int = 1) -> str:
    """Pseudo-words separated by spaces."""
    source = _words(seed)
    return " ".join(next(source) for _ in range(words))


STANDARD_DEVIATION = 0.02
SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, as in its `config.json`; `vocab_entries` are the tokens of its tokenizer, and `bias` says
    whether q, k and v have one."""

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

    def config(self) -> dict[str, Any]:
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
            "torch_dtype": "float32",
            "bos_token_id": self.special_id("<|endoftext|>"),
            "eos_token_id": self.special_id("<|im_end|>"),
        }

    def special_id(self, token: str) -> int:
        """The id of a special token, one of the last entries of the vocabulary."""
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
    """The shape with this name."""
    if name not in SHAPES:
        raise UsageError(f"Unknown shape {name!r}.", f"Known shapes: {', '.join(SHAPES)}.")
    return SHAPES[name]


def write_random_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> None:
    """Write a checkpoint of normal(0, 0.02) weights in float32, norms of one, and a tokenizer of realistic size.
    Streams slabs of 16 MB, so memory does not depend on the model."""
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
        ("config.json", shape.config()),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json", shape.vocab_entries)
    with (folder / "model.safetensors").open("wb") as file:
        write_header(file, shape.tensors())
        generator = np.random.default_rng(seed)
        for name, dimensions in shape.tensors().items():
            for slab in _slabs(generator, math.prod(dimensions), ones=name.endswith("norm.weight")):
                file.write(slab.astype("<f4", copy=False).data)


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


def write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the header of tensors in float32, whose data follow in its order."""
    file.write(encode_header({name: ("F32", shape) for name, shape in shapes.items()}, {"format": "pt"}))


if __name__ == "__main__":
    write_random_checkpoint(Path(sys.argv[2]), find_shape(sys.argv[1]))
