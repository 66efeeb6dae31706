"""`tokenizer.table`: vocabulary and merges of a byte-pair tokenizer as sorted arrays, which are mapped and not parsed.

What stands around the merges (normalizers, splitting into words, added tokens, templates, decoding) stays with the
`tokenizers` library: the file holds a tokenizer.json whose vocabulary is the symbols that merging begins with. Merging
itself is the part that is done here, and `encode_table` makes no table of a tokenizer that does anything else there.

The file is one of arrays (`array_file`):

- `pairs` (M,) U64: ids of the two tokens of each merge, the left one in the upper half, ascending.
- `merges` (M,) U64: rank of each of these merges, in the upper half, and the id of the token it makes.
- `sorted` (V,) U32: ids of the vocabulary by the UTF-8 of their spellings.
- `ends` (N + 1,) U32: where the spelling of each id below N begins and ends; one that is no token has none.
- `symbols` (S,) U32: ids of the symbols, by their ids in the small tokenizer.json.
- `spellings` U8: UTF-8 of all tokens.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, encode_header, read_index

TABLE = "tokenizer.table"
VERSION = "1"
_NAMES = ("pairs", "merges", "sorted", "ends", "symbols", "spellings")
# Types by their bytes, as the file spells them, and their names in memoryview.
_TYPES = {8: "U64", 4: "U32", 1: "U8"}
_FORMATS: dict[str, Literal["Q", "I", "B"]] = {"U64": "Q", "U32": "I", "U8": "B"}
_HALF = 32
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Values of a model's fields with which it only merges; other fields are checked below.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (None, False, True),
    "byte_fallback": (None, False, True),
}
_MODEL = {"type", "vocab", "merges", "unk_token", "ignore_merges", *_PLAIN}
# Ids may leave gaps, but not so many that the table is larger than its source.
_MOST_GAPS = 4


def encode_table(source: bytes | dict[str, Any]) -> bytes | None:
    """The table of a tokenizer.json, or of what it holds; None for tokenizers that are not plain byte-pair ones."""
    try:
        tokenizer = source if isinstance(source, dict) else json.loads(source)
        model = tokenizer["model"]
        vocab, added = model["vocab"], _added_ids(tokenizer["added_tokens"], model["vocab"])
        if added is None or not _is_plain(tokenizer, model) or len({type(m) for m in model["merges"]}) > 1:
            return None
        ids = np.array(list(vocab.values()), np.int64)  # (V,)
        last, order = int(ids.max(initial=-1)), np.argsort(ids)  # (V,)
        named = len(np.unique(ids)) == len(vocab) and ids.min(initial=0) >= 0
        if not named or last >= _MOST_GAPS * max(len(vocab), 256):
            return None
        sizes = np.zeros(last + 2, "<u4")  # (N + 1,)
        sizes[ids + 1] = [len(text.encode()) for text in vocab]
        pairs, merges = _merges_of(model["merges"], vocab)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):  # a merge of no tokens
        return None
    texts = list(vocab)
    symbols = sorted(id_ for text, id_ in vocab.items() if _is_symbol(text, model))
    spelled = {id_: text for text, id_ in vocab.items() if _is_symbol(text, model)}
    small = model | {
        "vocab": {spelled[id_]: at for at, id_ in enumerate(symbols)},
        "merges": [],
        "ignore_merges": False,
    }
    arrays = {
        "pairs": pairs,
        "merges": merges,
        # UTF-8 sorts as its characters do.
        "sorted": np.array([vocab[text] for text in sorted(vocab)], "<u4"),
        "ends": np.cumsum(sizes, dtype="<u4"),
        "symbols": np.array(symbols, "<u4"),
        "spellings": np.frombuffer("".join([texts[at] for at in order]).encode(), "u1"),
    }
    notes = {
        "version": VERSION,
        "tokenizer": json.dumps(tokenizer | {"model": small}),
        "added": json.dumps(added),
        "size": json.dumps(len(vocab.keys() | added.keys())),
        "whole_words": json.dumps(bool(model.get("ignore_merges"))),
    }
    shapes = {name: (_TYPES[array.itemsize], array.shape) for name, array in arrays.items()}
    return b"".join([encode_header(shapes, notes), *(array.tobytes() for array in arrays.values())])


def _merges_of(merges: list[Any], vocab: dict[str, int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:  # (M,), (M,)
    """Pairs of ids, ascending, and rank and id of what each makes."""
    parts = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    left, right, made = (
        np.array(ids, "<u8")
        for ids in ([vocab[a] for a, _ in parts], [vocab[b] for _, b in parts], [vocab[a + b] for a, b in parts])
    )
    pairs = left << _HALF | right
    # Of two merges of one pair the library takes the latter.
    order = np.argsort(pairs, kind="stable")
    order = order[np.append(pairs[order][1:] != pairs[order][:-1], True)[: len(order)]]
    return pairs[order], order.astype("<u8") << _HALF | made[order]


def _is_plain(tokenizer: dict[str, Any], model: dict[str, Any]) -> bool:
    """Whether the model only merges, and its words can be distinguished from their symbols."""
    vocab, unknown = model["vocab"], model.get("unk_token")
    if model["type"] != "BPE" or not model.keys() <= _MODEL or "" in vocab:
        return False
    if not all(model.get(name) in values for name, values in _PLAIN.items()):
        return False
    if unknown is not None and unknown not in vocab:
        return False
    from tokenizers.pre_tokenizers import ByteLevel

    # Words of the vocabulary that are taken whole are looked up by their spelling, so it must have all characters.
    splitting = tokenizer.get("pre_tokenizer") or {}
    last = splitting.get("pretokenizers", [splitting])[-1]
    return not model.get("ignore_merges") or (
        last.get("type") == "ByteLevel" and vocab.keys() >= set(ByteLevel.alphabet())
    )


def _added_ids(tokens: list[dict[str, Any]], vocab: dict[str, int]) -> dict[str, int] | None:
    """Ids of added tokens as the library gives them; None where the file has others, which the library ignores."""
    ids: dict[str, int] = {}
    free = len(vocab)
    for token in tokens:
        text = token["content"]
        if text in ids or not text or vocab.get(text, free) != token["id"]:
            return None
        ids[text] = token["id"]
        free = max(free, token["id"] + 1)
    known = set(vocab.values())
    return None if any(id_ in known for text, id_ in ids.items() if text not in vocab) else ids


def _is_symbol(text: str, model: dict[str, Any]) -> bool:
    """Whether words are cut into this before merging: characters, bytes of unknown ones, and what is for the rest."""
    in_bytes = bool(model.get("byte_fallback")) and _BYTE.fullmatch(text) is not None
    return len(text) == 1 or in_bytes or text == model.get("unk_token")


class TokenizerTable:
    """A mapped file, which must not change meanwhile; ArrayFileError where it is of another version or none."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            index = read_index(file, size)
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        notes = index.notes
        if notes.get("version") != VERSION or tuple(stored.name for stored in index.arrays) != _NAMES:
            raise ArrayFileError("is no table of a tokenizer that this version reads")
        views = [
            mapped[stored.offset : stored.offset + stored.nbytes].cast(_FORMATS.get(stored.dtype, "B"))
            for stored in index.arrays
        ]
        # `symbols` are ids by those of the small tokenizer.json.
        self._pairs, self._merges, self._sorted, self._ends, self.symbols, self._spellings = views
        self.tokenizer: bytes = notes["tokenizer"].encode()  # the small tokenizer.json
        self.added: dict[str, int] = json.loads(notes["added"])  # ids by text
        self.size: int = json.loads(notes["size"])  # tokens, added ones included
        self.whole_words: bool = json.loads(notes["whole_words"])  # those of the vocabulary are not made by merges

    def merge(self, left: int, right: int) -> int | None:
        """The rank of the merge of two tokens, from bit 32 on, and below that the id it makes; None without one."""
        pair = left << _HALF | right
        at = bisect_left(self._pairs, pair)
        return self._merges[at] if at < len(self._pairs) and self._pairs[at] == pair else None

    def id_of(self, text: str) -> int | None:
        """The id of a token of the vocabulary; None where it has none of this spelling."""
        wanted = text.encode("utf-8", "surrogatepass")
        at = bisect_left(self._sorted, wanted, key=self._spelling)
        found = self._sorted[at] if at < len(self._sorted) else None
        return found if found is not None and self._spelling(found) == wanted else None

    def spelling(self, id_: int) -> str | None:
        """The spelling of an id, None where the vocabulary has no such id."""
        return self._spelling(id_).decode("utf-8", "replace") or None if 0 <= id_ < self.ids else None

    @property
    def ids(self) -> int:
        """Ids of the vocabulary are below this."""
        return len(self._ends) - 1

    def _spelling(self, id_: int) -> bytes:
        return bytes(self._spellings[self._ends[id_] : self._ends[id_ + 1]])
