"""Makes GGUF files byte by byte, well-formed ones and any other; knows nothing of the code that reads them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_LAYOUTS = {
    UINT8: "<B",
    INT8: "<b",
    UINT16: "<H",
    INT16: "<h",
    UINT32: "<I",
    INT32: "<i",
    FLOAT32: "<f",
    BOOL: "<B",
    UINT64: "<Q",
    INT64: "<q",
    FLOAT64: "<d",
}
F32, F16 = 0, 1


@dataclass
class Raw:
    """Bytes that stand where a value should."""

    data: bytes


@dataclass
class Tensor:
    """An entry of the table and its data; `dims` are in the file's order, the rows' length first."""

    name: str | bytes
    dims: list[int]
    data: bytes
    type: int = F32
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class Builder:
    """A file in the making."""

    # Types and values by key. A key that is listed in `repeated` is written once more.
    metadata: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int, int] | None = None  # of tensors and of metadata, where they should not be what is there
    alignment: int = 32
    repeated: list[str] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)  # filled by `build`: where something ends

    def build(self) -> bytes:
        """The file."""
        out = bytearray()
        ends = self.boundaries = []
        pairs = [*self.metadata.items(), *((key, self.metadata[key]) for key in self.repeated)]
        tensors, entries = self.counts or (len(self.tensors), len(pairs))
        for part in (
            self.magic,
            struct.pack("<I", self.version),
            struct.pack("<Q", tensors),
            struct.pack("<Q", entries),
        ):
            out += part
            ends.append(len(out))
        for key, (kind, value) in pairs:
            for part in (_text(key), struct.pack("<I", kind), *_parts(kind, value)):
                out += part
                ends.append(len(out))
        data = bytearray()
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            shape = b"".join(struct.pack("<Q", dim % (1 << 64)) for dim in tensor.dims)
            for part in (_text(tensor.name), struct.pack("<I", dims), shape, struct.pack("<IQ", tensor.type, offset)):
                out += part
                ends.append(len(out))
            data += tensor.data
            data += bytes(-len(data) % self.alignment)
        out += bytes(-len(out) % self.alignment)
        ends += [len(out), len(out) + len(data) - 1]
        return bytes(out + data)

    def write(self, path: Path) -> Path:
        """Writes the file."""
        path.write_bytes(self.build())
        return path


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _parts(kind: int, value: Any) -> list[bytes]:
    """A value in the pieces that it may be cut between."""
    if isinstance(value, Raw):
        return [value.data]
    if kind == ARRAY:
        item, items = value
        head = [struct.pack("<I", item), struct.pack("<Q", len(items))]
        return [*head, b"".join(part for one in items for part in _parts(item, one))]
    return [_text(value)] if kind == STRING else [struct.pack(_LAYOUTS[kind], value)]


def small_model(**changes: Any) -> Builder:
    """A whole llama of two layers, eight channels and twelve tokens; changes are of metadata, `None` removes a key. In
    the names of changes two underscores stand for a dot."""
    tokens = ["<unk>", "<s>", "</s>", "\u0120a", "b", "é", "\U0001f600", "d", "e", "f", "g", "<|im_end|>"]
    metadata: dict[Any, tuple[int, Any]] = {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "Tiny"),
        "general.tags": (ARRAY, (STRING, ["small", ""])),
        "llama.block_count": (UINT32, 2),
        "llama.context_length": (UINT32, 64),
        "llama.embedding_length": (UINT32, 8),
        "llama.feed_forward_length": (UINT32, 16),
        "llama.attention.head_count": (UINT32, 2),
        "llama.attention.head_count_kv": (UINT32, 1),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 0.5),
        "llama.rope.freq_base": (FLOAT32, 10000.0),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2"),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["d e", "f g"])),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [-float(i) for i in range(12)])),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3, *[1] * 8, 3])),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, 1),
        "tokenizer.chat_template": (STRING, "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"),
    }
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    layers = [
        Tensor(f"blk.{layer}.{name}.weight", dims, bytes(range(64)) * (dims[0] * dims[1] // 16))
        for layer in range(2)
        for name, dims in (("attn_q", [8, 8]), ("attn_k", [8, 4]), ("ffn_down", [16, 8]))
    ]
    norm = Tensor("output_norm.weight", [8], struct.pack("<8f", *range(8)))
    return Builder(metadata, [Tensor("token_embd.weight", [8, 12], bytes(8 * 12 * 2), F16), *layers, norm])
