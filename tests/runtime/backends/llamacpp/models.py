"""Random GGUF models for the tests of llama.cpp's backend: Llamas and mixtures, with small vocabularies."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.runtime.text.contract import token_bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model; heads share KV heads in groups."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 96
    vocab: int = 300
    experts: int = 0
    used: int = 0
    window: int = 0
    context: int = 512

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.heads * self.head_dim


def write_gguf(path: Path, shape: Shape = Shape(), *, tokenizer: str = "gpt2", seed: int = 0) -> Path:
    """Writes a model of random float32 weights; logits are of the order of 1."""
    import gguf  # an extra's package

    arch = "gemma2" if shape.window else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocab)
    if arch == "llama":
        writer.add_rope_dimension_count(shape.head_dim)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    _add_vocabulary(writer, shape.vocab, tokenizer)
    random = np.random.default_rng(seed)
    for name, dimensions in _tensors(shape).items():
        if len(dimensions) == 1:
            values = np.ones(dimensions)
        else:
            values = random.normal(0.0, dimensions[-1] ** -0.5, dimensions)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(path: Path, file_type: int) -> Path:
    """The model in another type of llama.cpp's, in the same folder."""
    lib = llama_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    target = path.with_name(f"model-{file_type}.gguf")
    assert lib.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params)) == 0
    return target


def realigned(path: Path, alignment: int) -> Path:
    """The model with a smaller alignment of tensors, in the same folder; their sizes are multiples of 32."""
    gguf, data = read_gguf(path), path.read_bytes()
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    for filler in range(32):
        head = data[:8] + struct.pack("<QQ", tensors, pairs + 2)
        head += _key("general.alignment") + struct.pack("<II", 4, alignment)
        head += _key("general.description") + struct.pack("<IQ", 8, filler) + b"x" * filler
        head += data[24 : gguf.splits[0].header_bytes]
        head += bytes(-len(head) % alignment)
        if len(head) % 32:
            break
    target = path.with_name(f"aligned-{alignment}-{path.name}")
    target.write_bytes(head + data[gguf.splits[0].data_offset :])
    return target


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    row, hidden, kv = (shape.hidden,), shape.hidden, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.vocab, hidden),
        "output.weight": (shape.vocab, hidden),
        "output_norm.weight": row,
    }
    for layer in range(shape.layers):
        parts = {
            "attn_norm": row,
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": row,
        }
        if shape.window:
            parts |= {"post_attention_norm": row, "post_ffw_norm": row}
        if shape.experts:
            parts["ffn_gate_inp"] = (shape.experts, hidden)
            for name in ("gate", "up"):
                parts[f"ffn_{name}_exps"] = (shape.experts, shape.ffn, hidden)
            parts["ffn_down_exps"] = (shape.experts, hidden, shape.ffn)
        else:
            parts |= {"ffn_gate": (shape.ffn, hidden), "ffn_up": (shape.ffn, hidden), "ffn_down": (hidden, shape.ffn)}
        tensors |= {f"blk.{layer}.{name}.weight": dimensions for name, dimensions in parts.items()}
    if shape.window:
        del tensors["output.weight"]  # this family's head is always the embedding
    return tensors


def _add_vocabulary(writer: Any, size: int, kind: str) -> None:
    """Byte tokens, some pieces of words and the special tokens, padded to a size."""
    scores = None
    if kind == "gpt2":
        alphabet = list(
            {token_bytes(chr(code)): chr(code) for code in range(0x180) if len(token_bytes(chr(code))) == 1}.values()
        )
        merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("hell", "o")]
        tokens = ["<|begin|>", "<|end|>", *alphabet, *("".join(pair) for pair in merges)]
        types = [3, 3] + [1] * (len(tokens) - 2)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
        begin, end = 0, 1
    else:
        pieces = ["\u2581", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "\u2581hello", "\u2581w", "\u00e9"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
        scores = [0.0] * 259 + [float(len(piece)) - 20 for piece in pieces]
        begin, end = 1, 2
    padding = size - len(tokens)
    assert padding >= 0, f"{size} tokens are fewer than {len(tokens)}"
    if scores is not None:
        writer.add_token_scores(scores + [-1e4] * padding)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(padding)])
    writer.add_token_types(types + [5] * padding)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(True)
