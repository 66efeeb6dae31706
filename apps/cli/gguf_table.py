"""A GGUF file's metadata, tensors and memory as tables and as data; knows nothing of what its architecture means."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

from edgeinfer.bundle.gguf.reader import GgufArray, GgufFile, Value
from edgeinfer.bundle.gguf_bundle import KV_TYPES, kv_bytes_per_token
from edgeinfer.config import format_size

__all__ = ["TENSOR_HEADER", "TYPE_HEADER", "gguf_facts", "memory_rows", "metadata_rows", "tensor_rows", "type_rows"]

TENSOR_HEADER = ("name", "shape", "type", "size", "offset")
TYPE_HEADER = ("type", "tensors", "size", "bits per value")
# Tokens whose keys and values are shown as an example.
_EXAMPLE_TOKENS = 2048
# What is shown of an array and of a text.
_ITEMS, _CHARACTERS = 4, 80


def metadata_rows(gguf: GgufFile) -> list[tuple[str, str]]:
    """Every key with what it says, long ones cut."""
    return [(key[:_CHARACTERS], _shown(value)) for key, value in gguf.metadata.items()]


def type_rows(gguf: GgufFile) -> list[tuple[str, str, str, str]]:
    """What each type of number takes, the largest first."""
    sizes, counts = Counter[str](), Counter[str]()
    bits = {tensor.type.name: tensor.type.bits for tensor in gguf.tensors}
    for tensor in gguf.tensors:
        sizes[tensor.type.name] += tensor.nbytes
        counts[tensor.type.name] += 1
    return [(name, str(counts[name]), format_size(size), f"{bits[name]:.4g}") for name, size in sizes.most_common()]


def tensor_rows(gguf: GgufFile) -> list[tuple[str, ...]]:
    """Every tensor; of a model in several files with the file's number before its offset."""
    several = len(gguf.splits) > 1
    return [
        (
            tensor.name,
            " x ".join(map(str, tensor.shape)),
            tensor.type.name,
            format_size(tensor.nbytes),
            f"{tensor.split + 1}: {tensor.offset:,}" if several else f"{tensor.offset:,}",
        )
        for tensor in gguf.tensors
    ]


def memory_rows(gguf: GgufFile, context: int) -> list[tuple[str, str]]:
    """What running it will take at least: weights read in place, and keys and values by their type.

    Args:
        context: the most tokens the model takes.
    """
    rows = [("weights", format_size(gguf.tensor_bytes))]
    tokens = min(_EXAMPLE_TOKENS, context)
    for kv, per_token in _kv_bytes(gguf).items():
        shown = "not possible: a head is no whole blocks of it"
        if per_token is not None:
            shown = f"{per_token:,} bytes per token, {format_size(per_token * tokens)} for {tokens:,}"
        rows.append((f"KV cache {kv}", shown))
    return rows


def gguf_facts(gguf: GgufFile, *, with_tensors: bool) -> dict[str, Any]:
    """The same as data for JSON, arrays cut."""
    facts: dict[str, Any] = {
        "version": gguf.version,
        "alignment": gguf.alignment,
        "files": [str(split.path) for split in gguf.splits],
        "fingerprint": gguf.fingerprint,
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
        "memory": {"weight_bytes": gguf.tensor_bytes, "kv_bytes_per_token": _kv_bytes(gguf)},
    }
    if with_tensors:
        facts["tensors"] = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.type.name,
                "bytes": tensor.nbytes,
                "file": tensor.split,
                "offset": tensor.offset,
            }
            for tensor in gguf.tensors
        ]
    return facts


def _kv_bytes(gguf: GgufFile) -> dict[str, int | None]:
    return {kv: kv_bytes_per_token(gguf, kv) for kv in KV_TYPES if kv != "float32"}


def _shown(value: Value) -> str:
    if isinstance(value, GgufArray):
        items = ", ".join(_shown(item) for item in _first(value))
        more = ", ..." if value.count > _ITEMS else ""
        return f"{value.count:,} x {value.item_type}: {items}{more}" if value.count else f"no {value.item_type}"
    if isinstance(value, str):
        # A file may hold anything, such as what moves a terminal's cursor.
        return repr(value) if len(value) <= _CHARACTERS else f"{value[:_CHARACTERS]!r}... ({len(value):,} characters)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _plain(value: Value) -> Any:
    if isinstance(value, GgufArray):
        return {"type": value.item_type, "count": value.count, "first": [_plain(item) for item in _first(value)]}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first(value: GgufArray) -> list[Any]:
    if value.item_type == "string":
        return [text.decode("utf-8", "replace") for text in itertools.islice(value.spellings(), _ITEMS)]
    items: list[Any] = value.numbers()[:_ITEMS].tolist()
    return items
