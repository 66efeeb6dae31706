"""A corpus of malformed GGUF files, by what is wrong with them; knows nothing of the code that must refuse them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tests.gguf_builder import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Builder, Raw, Tensor, small_model

Case = Callable[[], Builder | bytes]

_UINT8, _UINT64, _FLOAT64 = 0, 10, 12
GIB = 1 << 30
_TOKENS = [f"t{i}" for i in range(12)]


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def header(**fields: Any) -> Case:
    """A good model whose header differs."""

    def make() -> Builder:
        builder = small_model()
        for name, value in fields.items():
            setattr(builder, name, value)
        return builder

    return make


def changed(**values: Any) -> Case:
    """A good model with other metadata."""
    return lambda: small_model(**values)


def keyed(key: str | bytes) -> Case:
    """A good model with one more key."""

    def make() -> Builder:
        builder = small_model()
        builder.metadata[key] = (UINT32, 1)
        return builder

    return make


def extra(kind: int, value: object) -> Case:
    """A good model with one more entry, `x.y`, of a type and value."""
    return lambda: small_model(x__y=(kind, value))


def array(item: int, count: int, data: bytes = b"") -> Case:
    """A good model with an array that claims so many items."""
    return extra(ARRAY, Raw(struct.pack("<I", item) + u64(count) + data))


def aligned(kind: int, value: object) -> Case:
    return changed(general__alignment=(kind, value))


def tensor(index: int = 1, **fields: Any) -> Case:
    """A good model one of whose tensors differs."""

    def make() -> Builder:
        builder = small_model()
        for name, value in fields.items():
            setattr(builder.tensors[index], name, value)
        return builder

    return make


def shaped(*dims: int, **fields: Any) -> Case:
    """A good model whose last tensor claims a shape."""
    return tensor(-1, dims=list(dims), **fields)


def without(index: int) -> Case:
    def make() -> Builder:
        builder = small_model()
        del builder.tensors[index]
        return builder

    return make


def added(name: str, dims: list[int], data: bytes) -> Case:
    def make() -> Builder:
        builder = small_model()
        builder.tensors.append(Tensor(name, dims, data))
        return builder

    return make


def swapped() -> Builder:
    """Tensors in another order than their data."""
    builder = small_model()
    builder.build()
    offset = 0
    for one in builder.tensors:
        one.offset = offset
        offset += len(one.data) + -len(one.data) % builder.alignment
    builder.tensors.reverse()
    return builder


def cut(by: int) -> Case:
    return lambda: small_model().build()[:-by]


def raw_key(data: bytes) -> Case:
    """A header whose first key is these bytes."""
    return lambda: b"GGUF" + struct.pack("<I", 3) + u64(0, 1) + data + bytes(4096)


HEADERS: dict[str, Case] = {
    "empty": lambda: b"",
    "magic alone": lambda: b"GGUF",
    "version alone": lambda: b"GGUF\3\0\0\0",
    "bad magic": header(magic=b"GGUG"),
    "old magic": header(magic=b"ggjt"),
    "swapped magic": header(magic=b"FUGG"),
    "a text": lambda: b"# A model card, saved under the wrong name\n" * 9,
    "version 0": header(version=0),
    "version 1": header(version=1),
    "version 4": header(version=4),
    "version 2**32 - 1": header(version=2**32 - 1),
    "byte-swapped version": header(version=0x03000000),
    "2**63 tensors": header(counts=(1 << 63, 21)),
    "-1 tensors": header(counts=((1 << 64) - 1, 21)),
    "65536 tensors": header(counts=(65536, 21)),
    "5000 entries": header(counts=(8, 5000)),
    "one tensor too many": header(counts=(9, 21)),
    "2**63 entries": header(counts=(8, 1 << 63)),
    "-1 entries": header(counts=(8, (1 << 64) - 1)),
    "one entry too many": header(counts=(8, 22)),
    "one entry too few": header(counts=(8, 20)),
    "nothing but counts": lambda: b"GGUF" + struct.pack("<I", 3) + u64(0, 0),
}
KEYS: dict[str, Case] = {
    "length 2**63": raw_key(u64(1 << 63)),
    "length -1": raw_key(u64((1 << 64) - 1)),
    "length 1 GiB": raw_key(u64(GIB)),
    "length past the end": raw_key(u64(5000) + b"a" * 64),
    "empty": keyed(""),
    "duplicate": header(repeated=["llama.block_count"]),
    "not UTF-8": keyed(b"x.\xff\xfe"),
    "control characters": keyed("x.\x1b[2J"),
    "NUL": keyed("x\0y"),
    "70,000 bytes": keyed("k" * 70_000),
}
VALUES: dict[str, Case] = {
    "type 13": extra(13, Raw(bytes(8))),
    "type -1": extra(2**32 - 1, Raw(bytes(8))),
    "string of 1 GiB": extra(STRING, Raw(u64(GIB))),
    "string of 2**64 - 1": extra(STRING, Raw(u64((1 << 64) - 1))),
    "string of 9 MB": extra(STRING, "x" * 9_000_000),
    "strings of 9 MB together": lambda: small_model(x__a=(STRING, "x" * 5_000_000), x__b=(STRING, "x" * 4_000_000)),
    "string not UTF-8": extra(STRING, b"\xc3("),
    "boolean 2": extra(BOOL, 2),
    "NaN": extra(FLOAT32, float("nan")),
    "NaN of 64 bits": extra(_FLOAT64, float("nan")),
}
ARRAYS: dict[str, Case] = {
    "nested": extra(ARRAY, (ARRAY, [(UINT32, [1]), (UINT32, [2])])),
    "nested and empty": array(ARRAY, 0),
    "nested a thousand times": array(ARRAY, 1, (struct.pack("<I", ARRAY) + u64(1)) * 1000),
    "item type 13": array(13, 1, bytes(8)),
    "item type -1": array(2**32 - 1, 1, bytes(8)),
    "1 GiB of bytes": array(_UINT8, GIB),
    "2**30 strings": array(STRING, GIB),
    "2**64 - 1 bytes": array(_UINT8, (1 << 64) - 1),
    "size that wraps to 0": array(_FLOAT64, 1 << 61),
    "strings whose size wraps to 0": array(STRING, 1 << 61),
    "a string of 1 GiB": array(STRING, 2, u64(1) + b"a" + u64(GIB)),
    "a string of 2**64 - 1": array(STRING, 2, u64(1) + b"a" + u64((1 << 64) - 1)),
    "a string of 1.5 MB": extra(ARRAY, (STRING, ["a", "b" * 1_500_000])),
    "string not UTF-8": extra(ARRAY, (STRING, ["a", b"\xff", "b"])),
    "character across strings": extra(ARRAY, (STRING, [b"\xc3", b"\xa9"])),
    "booleans of 7": extra(ARRAY, (BOOL, [0, 1, 7])),
}
ALIGNMENTS: dict[str, Case] = {
    "of 64 bits": aligned(_UINT64, 32),
    "text": aligned(STRING, "32"),
    "a number with a fraction": aligned(FLOAT32, 32.0),
    "negative": aligned(INT32, -32),
    "array": aligned(ARRAY, (UINT32, [32])),
    "0": aligned(UINT32, 0),
    "4": aligned(UINT32, 4),
    "48": aligned(UINT32, 48),
    "2**17": aligned(UINT32, 1 << 17),
    "2**31": aligned(UINT32, 1 << 31),
    "other than the data's": aligned(UINT32, 128),
}
TENSORS: dict[str, Case] = {
    "no dimensions": tensor(n_dims=0, dims=[]),
    "5 dimensions": tensor(n_dims=5, dims=[2, 2, 2, 2, 2]),
    "2**32 - 1 dimensions": tensor(n_dims=2**32 - 1),
    "dimension 0": shaped(0),
    "dimension -1": shaped(-1),
    "dimension -8 twice": shaped(-8, -8),
    "dimension 2**62": shaped(1 << 62),
    "product 2**64": shaped(1 << 32, 1 << 32),
    "product that wraps to 8": shaped(8, (1 << 61) + 1),
    "size that wraps to 0": shaped(1 << 62, type=0),
    "padded size that wraps": shaped((1 << 63) - 1, type=24),
    "type 4, withdrawn": tensor(type=4),
    "type 42": tensor(type=42),
    "type 2**32 - 1": tensor(type=2**32 - 1),
    "rows of no whole blocks": tensor(type=8),
    "offset not aligned": tensor(offset=200),
    "gap": tensor(offset=224),
    "overlap": tensor(offset=160),
    "all at 0": tensor(3, offset=0),
    "offset 2**64 - 32": tensor(offset=(1 << 64) - 32),
    "in another order": swapped,
    "duplicate name": tensor(2, name="blk.0.attn_q.weight"),
    "no name": tensor(name=""),
    "name of 64 bytes": tensor(name="n" * 64),
    "name of 1 GiB": lambda: small_model().build().replace(u64(18) + b"output_norm", u64(GIB) + b"output_norm"),
    "name with NUL": tensor(name="blk\0"),
    "name not UTF-8": tensor(name=b"\xff"),
    "a norm of half precision": tensor(-1, type=1, data=bytes(16)),
    "a matrix of integers": tensor(type=26),
    "a matrix in double precision": tensor(type=28, data=bytes(512)),
    "data one byte short": cut(1),
    "data a tensor short": cut(64),
    "no data": lambda: (b := small_model()).build()[: b.boundaries[-2]],
}
MODELS: dict[str, Case] = {
    "no architecture": changed(general__architecture=None),
    "architecture a number": changed(general__architecture=(UINT32, 1)),
    "architecture a path": changed(general__architecture=(STRING, "../llama")),
    "no layers": changed(llama__block_count=None),
    "0 layers": changed(llama__block_count=(UINT32, 0)),
    "513 layers": changed(llama__block_count=(UINT32, 513)),
    "2**32 - 1 layers": changed(llama__block_count=(UINT32, 2**32 - 1)),
    "-2 layers": changed(llama__block_count=(INT32, -2)),
    "layers in words": changed(llama__block_count=(STRING, "two")),
    "layers a truth value": changed(llama__block_count=(BOOL, 1)),
    "layers with a fraction": changed(llama__block_count=(FLOAT32, 2.0)),
    "a tensor of a layer beyond": changed(llama__block_count=(UINT32, 1)),
    "no width": changed(llama__embedding_length=None),
    "another width than the embedding's": changed(llama__embedding_length=(UINT32, 16)),
    "no context": changed(llama__context_length=None),
    "context 0": changed(llama__context_length=(UINT32, 0)),
    "context 2**60": changed(llama__context_length=(_UINT64, 1 << 60)),
    "no heads": changed(llama__attention__head_count=None),
    "0 heads": changed(llama__attention__head_count=(UINT32, 0)),
    "more heads than channels": changed(llama__attention__head_count=(UINT32, 9)),
    "heads for one layer of two": changed(llama__attention__head_count=(ARRAY, (INT32, [2]))),
    "negative heads of a layer": changed(llama__attention__head_count=(ARRAY, (INT32, [2, -2]))),
    "heads that are text": changed(llama__attention__head_count=(ARRAY, (STRING, ["2", "2"]))),
    "more key heads than heads": changed(llama__attention__head_count_kv=(UINT32, 4)),
    "0 key heads": changed(llama__attention__head_count_kv=(UINT32, 0)),
    "keys of 0 channels": changed(llama__attention__key_length=(UINT32, 0)),
    "values of 2**31 channels": changed(llama__attention__value_length=(UINT32, 1 << 31)),
    "values of other channels than keys": changed(llama__attention__value_length=(UINT32, 8)),
    "a rotation of part of a head": changed(llama__rope__dimension_count=(UINT32, 2)),
    "a window that no layer has": changed(
        llama__attention__sliding_window=(UINT32, 4), llama__attention__sliding_window_pattern=(ARRAY, (BOOL, [0, 0]))
    ),
    "a layer that attends without queries": tensor(1, name="blk.0.attn_output.weight"),
    "a rotation of nothing": changed(llama__rope__dimension_count=(UINT32, 0)),
    "a rotation of more than a sliding head": changed(llama__rope__dimension_count_swa=(UINT32, 6)),
    "a rotation of more than a head": changed(llama__rope__dimension_count=(UINT32, 6)),
    "2000 experts": changed(llama__expert_count=(UINT32, 2000), llama__expert_used_count=(UINT32, 2)),
    "more experts used than there are": changed(llama__expert_count=(UINT32, 2), llama__expert_used_count=(UINT32, 3)),
    "experts that are not used": changed(llama__expert_count=(UINT32, 2)),
    "groups of no experts": changed(llama__expert_group_count=(UINT32, 1)),
    "uneven groups of experts": changed(
        llama__expert_count=(UINT32, 4),
        llama__expert_used_count=(UINT32, 2),
        llama__expert_group_count=(UINT32, 3),
        llama__expert_group_used_count=(UINT32, 1),
    ),
    "more layers that predict further than layers": changed(llama__nextn_predict_layers=(UINT32, 3)),
    "an unknown rope scaling": changed(llama__rope__scaling__type=(STRING, "cubic")),
    "infinite rope base": changed(llama__rope__freq_base=(FLOAT32, float("inf"))),
    "negative epsilon": changed(llama__attention__layer_norm_rms_epsilon=(FLOAT32, -1.0)),
    "no embedding": without(0),
    "embedding of one dimension": tensor(0, dims=[96]),
    "a vocabulary size below the embedding's": changed(llama__vocab_size=(UINT32, 5)),
    "no tensors": lambda: Builder(small_model().metadata),
    "tensor of a far layer": added("blk.999999999.x", [8], bytes(32)),
}
TOKENS, TYPES, SCORES = "tokenizer__ggml__tokens", "tokenizer__ggml__token_type", "tokenizer__ggml__scores"
VOCABULARIES: dict[str, Case] = {
    "none": changed(tokenizer__ggml__model=(STRING, "no_vocab")),
    "no kind": changed(tokenizer__ggml__model=None),
    "kind a number": changed(tokenizer__ggml__model=(UINT32, 1)),
    "no tokens": changed(**{TOKENS: None}),
    "0 tokens": changed(**{TOKENS: (ARRAY, (STRING, []))}),
    "tokens that are numbers": changed(**{TOKENS: (ARRAY, (INT32, list(range(12))))}),
    "tokens that are one text": changed(**{TOKENS: (STRING, "abc")}),
    "a token fewer than embeddings": changed(
        **{name: (ARRAY, (kind, items)) for name, kind, items in ((TOKENS, STRING, _TOKENS[:11]),)}
    ),
    "a token more than embeddings": changed(**{TOKENS: (ARRAY, (STRING, [*_TOKENS, "more"]))}),
    "tokens spelled alike": changed(**{TOKENS: (ARRAY, (STRING, [*_TOKENS[:11], "t0"]))}),
    "spelled like an empty one": changed(**{TOKENS: (ARRAY, (STRING, ["", *_TOKENS[1:11], "[EMPTY_0]"]))}),
    "types fewer": changed(**{TYPES: (ARRAY, (INT32, [1] * 11))}),
    "types more": changed(**{TYPES: (ARRAY, (INT32, [1] * 13))}),
    "types of another type": changed(**{TYPES: (ARRAY, (_UINT8, [1] * 12))}),
    "type 9": changed(**{TYPES: (ARRAY, (INT32, [9] * 12))}),
    "type -1": changed(**{TYPES: (ARRAY, (INT32, [-1] * 12))}),
    "scores fewer": changed(**{SCORES: (ARRAY, (FLOAT32, [0.0] * 3))}),
    "scores that are text": changed(**{SCORES: (ARRAY, (STRING, ["0"] * 12))}),
    "scores NaN": changed(**{SCORES: (ARRAY, (FLOAT32, [float("nan")] * 12))}),
    "scores infinite": changed(**{SCORES: (ARRAY, (FLOAT32, [float("inf")] * 12))}),
    "byte pairs without merges": changed(tokenizer__ggml__merges=None),
    "merges that are numbers": changed(tokenizer__ggml__merges=(ARRAY, (INT32, [1]))),
    "SentencePiece without bytes": changed(tokenizer__ggml__model=(STRING, "llama")),
    "first token beyond": changed(tokenizer__ggml__bos_token_id=(UINT32, 12)),
    "last token -1": changed(tokenizer__ggml__eos_token_id=(INT32, -1)),
    "last token in words": changed(tokenizer__ggml__eos_token_id=(STRING, "</s>")),
    "end of turn beyond": changed(tokenizer__ggml__eot_token_id=(UINT32, 2**32 - 1)),
    "begins with a number": changed(tokenizer__ggml__add_bos_token=(UINT32, 1)),
    "template a number": changed(tokenizer__chat_template=(UINT32, 1)),
    "template of templates": changed(tokenizer__chat_template=(ARRAY, (STRING, ["a", "b"]))),
}
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("header", HEADERS),
        ("key", KEYS),
        ("value", VALUES),
        ("array", ARRAYS),
        ("alignment", ALIGNMENTS),
        ("tensor", TENSORS),
        ("model", MODELS),
        ("vocabulary", VOCABULARIES),
    )
    for name, case in cases.items()
}
