"""A whole GGUF file with a tensor of each type that the native kernel reads, and damaged ones, drawn by number."""

from __future__ import annotations

import copy
import functools
import math
import random
import struct
from typing import Any

import numpy as np

from edgeinfer.bundle.kinds import KINDS
from tests.gguf_blocks import HALVES, random_rows
from tests.gguf_builder import ARRAY, FLOAT32, INT32, STRING, UINT8, UINT32, UINT64, Builder, Raw, Tensor, small_model

_WIDTH, _SMALL = 256, 64
_MATRICES = {"attn_q": 256, "attn_k": _SMALL, "attn_v": _SMALL, "attn_output": 256}
_MATRICES |= {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}
_WORDS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "d", "e", "de", "f", "g", "<|im_end|>"]
_ODD: tuple[tuple[int, Any], ...] = (
    *((UINT32, number) for number in (0, 1, 2, 3, 7, 12, 13, 2**31, 2**32 - 1)),
    *((INT32, number) for number in (-1, 0, 5)),
    *((UINT64, number) for number in (2**63, 2**64 - 1)),
    *((FLOAT32, number) for number in (0.0, -1.0, 1e-45, 3e38, math.nan, math.inf)),
    *((STRING, text) for text in ("", "x", "\n", "a\nerror: b", "\x1b[31m", "../../x", "\0", "é" * 3000, b"\xff\xfe")),
    *((ARRAY, (UINT32, numbers)) for numbers in ([], [1], [2**32 - 1] * 3, [0] * 12)),
    *((ARRAY, (STRING, texts)) for texts in ([], [""], ["a", "a"], ["\n"] * 12, ["x y", "y x"], [b"\xff"] * 12)),
    (ARRAY, Raw(struct.pack("<IQ", UINT8, 2**40))),
    (99, Raw(b"")),
)


def whole_model() -> Builder:
    """A llama of three layers whose matrices have all types."""
    return copy.deepcopy(_whole_model())


@functools.cache
def _whole_model() -> Builder:
    metadata = {"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 4, "block_count": 3}
    changes: dict[str, tuple[int, Any]] = {
        f"llama__{key.replace('.', '__')}": (UINT32, value) for key, value in metadata.items()
    }
    changes["tokenizer__ggml__tokens"] = ARRAY, (STRING, _WORDS)
    changes["tokenizer__ggml__merges"] = ARRAY, (STRING, ["a b", "d e"])
    rng, kinds = np.random.default_rng(1), iter([*KINDS, "F32", "Q4_K"])
    builder = small_model(**changes)
    norm = struct.pack("<256f", *[1.0] * _WIDTH)
    builder.tensors = [_matrix(rng, "token_embd", "Q6_K", len(_WORDS)), Tensor("output_norm.weight", [_WIDTH], norm)]
    for layer in range(3):
        builder.tensors += [_matrix(rng, f"blk.{layer}.{name}", next(kinds), n) for name, n in _MATRICES.items()]
        builder.tensors += [Tensor(f"blk.{layer}.{name}_norm.weight", [_WIDTH], norm) for name in ("attn", "ffn")]
    return builder


def _matrix(rng: np.random.Generator, name: str, kind: str, rows: int) -> Tensor:
    if kind == "F32":
        data, number = rng.standard_normal((rows, _WIDTH), np.float32).tobytes(), 0
    else:
        data, number = random_rows(rng, kind, rows, _WIDTH, tame=True).tobytes(), KINDS[kind].number
    return Tensor(f"{name}.weight", [_WIDTH, rows], data, number)


def damaged_model(number: int) -> bytes:
    """A file with one to three things wrong in it; the same for the same number."""
    drawn = random.Random(number)
    builder = whole_model()
    if drawn.random() < 0.25:
        _spoil_scale(builder, drawn)
        return builder.build()
    for _ in range(drawn.randint(1, 3)):
        change = drawn.choice((*[_change_key, _change_tensor] * 2, _change_words, _change_counts))
        change(builder, drawn)
    data = bytearray(builder.build())
    if drawn.random() < 0.3:
        ends = builder.boundaries
        end = drawn.choice((drawn.choice(ends), drawn.randrange(len(data)))) - drawn.randint(0, 2)
        return bytes(data[: max(0, end)])
    for _ in range(drawn.choice((0, 0, 1, 4))):
        data[drawn.randrange(builder.boundaries[-2])] = drawn.randrange(256)
    return bytes(data)


def _spoil_scale(builder: Builder, drawn: random.Random) -> None:
    """Makes a scale, or a value where there is none, infinite or no number."""
    numbers = {kind.number: name for name, kind in KINDS.items()}
    # The byte of NVFP4's scales that is no number stands for 0.
    tensor = drawn.choice([each for each in builder.tensors if numbers.get(each.type) != "NVFP4"])
    data, bad = bytearray(tensor.data), drawn.choice((0x7C00, 0xFC00, 0x7E01, 0x7FFF))
    kind = numbers.get(tensor.type, "F32")
    if kind == "F32":
        at, raw = drawn.randrange(len(data) // 4) * 4, struct.pack("<f", drawn.choice((math.nan, math.inf, -math.inf)))
    else:
        block = drawn.randrange(len(data) // KINDS[kind].nbytes) * KINDS[kind].nbytes
        raw = {"MXFP4": b"\xff", "BF16": b"\x80\x7f"}.get(kind, struct.pack("<H", bad))
        at = block + (drawn.choice(HALVES[kind]) if HALVES[kind] else 0)
    data[at : at + len(raw)] = raw
    tensor.data = bytes(data)


def _change_key(builder: Builder, drawn: random.Random) -> None:
    key = drawn.choice([*builder.metadata])
    match drawn.randrange(8):
        case 0:
            del builder.metadata[key]
        case 1:
            builder.repeated.append(key)
        case 2:
            new = drawn.choice(
                ("llama.x", "llama.rope.scaling.type", "llama.expert_count", "a\nb", b"\xff", "", "x" * 900)
            )
            builder.metadata[new] = drawn.choice(_ODD)
        case _:
            builder.metadata[key] = drawn.choice(_ODD)


def _change_words(builder: Builder, drawn: random.Random) -> None:
    """Another length of the vocabulary, and words that none has."""
    name = drawn.choice(("tokens", "token_type", "scores", "merges"))
    key = f"tokenizer.ggml.{name}"
    _, value = builder.metadata.get(key, (ARRAY, (STRING, [])))
    item, items = (value[0], list(value[1])) if isinstance(value, tuple) else (STRING, [])
    odd: list[Any] = ["", "\n", "a b c", "<s>", b"\xc3", "\x1b]0;x\x07", "é" * 5000] if item == STRING else [2, 6, 7]
    match drawn.randrange(3):
        case 0:
            items = items[: drawn.randrange(len(items) + 1)]
        case 1:
            items += [drawn.choice(odd)] * drawn.randint(1, 3)
        case _ if items:
            items[drawn.randrange(len(items))] = drawn.choice(odd)
    builder.metadata[key] = (ARRAY, (item, items))


def _change_tensor(builder: Builder, drawn: random.Random) -> None:
    tensor = drawn.choice(builder.tensors)
    match drawn.randrange(6):
        case 0:
            tensor.type = drawn.choice((*range(45), 2**31, 2**32 - 1))
        case 1:
            tensor.offset = drawn.choice((1, 32, 64, 2**20, 2**40, 2**63, 2**64 - 32))
        case 2:
            tensor.dims = [drawn.choice((0, 1, 12, 64, 255, 256, 512, 2**32, 2**63)) for _ in tensor.dims]
        case 3:
            tensor.n_dims = drawn.choice((0, 1, 3, 4, 5, 2**32 - 1))
        case 4:
            tensor.name = drawn.choice(
                ("x", "", "blk.9.attn_q.weight", "blk.0.attn_q.weight", "a\nb", b"\xff", "x" * 70)
            )
        case _:
            builder.tensors.remove(tensor)


def _change_counts(builder: Builder, drawn: random.Random) -> None:
    match drawn.randrange(4):
        case 0:
            builder.version = drawn.choice((0, 1, 2, 4, 2**31, 0x03000000))
        case 1:
            builder.magic = drawn.choice((b"GGML", b"FUGG", b"\0\0\0\0"))
        case 2:
            builder.alignment = drawn.choice((1, 8, 64, 4096))
        case _:
            numbers = (0, 1, len(builder.tensors) + 1, 2**20, 2**63, 2**64 - 1)
            builder.counts = drawn.choice(numbers), drawn.choice(numbers)
