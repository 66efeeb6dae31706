"""The tokenizer of a GGUF file as a bundle has it: tokenizer.json and the small files beneath it, from the metadata.

Byte pairs are split into words as the row of `tokenizer.ggml.pre` says (edgeinfer.bundle.gguf.normalizer). Merges of
SentencePiece's vocabularies are made of the scores: each split of a token into two tokens, in the order in which
published tokenizers have them. Control tokens stay out of merges, so that no text becomes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from edgeinfer.bundle.gguf.metadata import damaged
from edgeinfer.bundle.gguf.normalizer import NORMALIZER_KEY, STEPS, PreTokenizer, normalizer_steps, pre_tokenizer
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    read_vocabulary,
)
from edgeinfer.bundle.gguf_bundle import texts_of
from edgeinfer.core.errors import CheckpointError
from edgeinfer.core.records import dataclass
from edgeinfer.export.gguf.vocabulary import UNDERLINE
from edgeinfer.export.source.sidecar import Sidecar

_BYTE_PAIRS, _SENTENCE_PIECE, _RAW_PAIRS = "gpt2", "llama", "gemma4"
_SPECIAL, _ADDED = (CONTROL, UNKNOWN), (CONTROL, UNKNOWN, USER_DEFINED)
_PADDING = re.compile(r"\[PAD\d+\]")
_REPLACED = {"trim_spaces": (r"\A +| +\z", ""), "join_spaces": (" {2,}", " ")}
_HINT = "llama.cpp runs it: install edgeinfer[gguf] and give --backend llamacpp."


def tokenizer_refusal(gguf: GgufFile) -> str | None:
    """Why the tokenizer of a file is not read, by the key; None where it is."""
    data = gguf.metadata
    model, pre = data.text("tokenizer.ggml.model", "none"), data.text("tokenizer.ggml.pre", "")
    if model not in (_BYTE_PAIRS, _SENTENCE_PIECE, _RAW_PAIRS):
        return f"tokenizer.ggml.model is {model!r}"
    if "tokenizer.ggml.token_type" not in data:
        return "tokenizer.ggml.token_type is missing"
    if model == _BYTE_PAIRS and pre_tokenizer(pre) is None:
        return f"tokenizer.ggml.pre is {pre!r}" if pre else "tokenizer.ggml.pre is missing"
    unknown = [step for step in normalizer_steps(data) if step not in STEPS]
    if unknown:
        return f"{NORMALIZER_KEY} has the unknown step {unknown[0]!r}"
    return _scores_refusal(gguf) if model == _SENTENCE_PIECE else None


def _scores_refusal(gguf: GgufFile) -> str | None:
    key = "tokenizer.ggml.scores"
    if key not in gguf.metadata:
        return f"{key} is missing"
    scores = gguf.metadata.array(key, "float32", "int32").numbers()  # (V,)
    types = gguf.metadata.array("tokenizer.ggml.token_type", "int32").numbers()  # (V,)
    words = scores[: len(types)][types[: len(scores)] == NORMAL]  # (words,)
    if len(words) > 1 and (words == words[0]).all():
        return f"{key} has one score for all tokens"
    # Of byte pairs it is the rank.
    return f"{key} is of a unigram model" if (words != np.round(words)).any() else None


def read_tokenizer(gguf: GgufFile) -> Sidecar:
    """The small files of a bundle.

    Raises:
        BundleError: the file is damaged.
        CheckpointError: `tokenizer_refusal` gives a reason.
    """
    reason = tokenizer_refusal(gguf)
    if reason is not None:
        raise _refused(gguf, reason)
    vocabulary = read_vocabulary(gguf)
    tokens = _Tokens.of(gguf, vocabulary)
    described = _tokenizer(gguf, vocabulary, tokens)
    contents = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    _check(gguf, contents, tokens)
    texts = {name: text.encode("utf-8") for name, text in texts_of(gguf, vocabulary).items()}
    return Sidecar({"tokenizer.json": contents} | texts, described)


def _refused(gguf: GgufFile, reason: str) -> CheckpointError:
    return CheckpointError(f"edgeinfer's own engine does not read the tokenizer of {gguf.path}: {reason}.", _HINT)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a file, but for rows at the end that only fill up the embedding."""

    spelled: list[str]
    types: list[int]
    # The first of those at the end that the model need not know, as they are found in texts before it.
    outside: int

    @classmethod
    def of(cls, gguf: GgufFile, vocabulary: GgufVocabulary) -> _Tokens:
        assert vocabulary.token_types is not None, "tokenizer_refusal wants types"
        types = vocabulary.token_types.numbers().tolist()
        spelled = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(vocabulary.tokens.strings())]
        while types and types[-1] in (UNUSED, USER_DEFINED, UNKNOWN) and _PADDING.fullmatch(spelled[-1]):
            types.pop(), spelled.pop()
        if vocabulary.model != _BYTE_PAIRS:
            # Converters write the spaces of such tokens as they are in texts.
            known = set(spelled)
            for id_, kind in enumerate(types):
                if kind == USER_DEFINED and (whole := spelled[id_].replace(" ", UNDERLINE)) not in known:
                    spelled[id_] = whole
        outside = len(types)
        while outside and types[outside - 1] in _ADDED:
            outside -= 1
        if vocabulary.model != _BYTE_PAIRS:
            outside = len(types)  # merges may lead to any token
        if len(set(spelled)) < len(spelled):
            raise damaged(gguf.path, "two of its tokens are spelled alike")
        return cls(spelled, types, outside)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Tokens of the model."""
        return {text: id_ for id_, text in enumerate(self.spelled[: self.outside])}

    @property
    def special(self) -> dict[int, str]:
        return {id_: self.spelled[id_] for id_, kind in enumerate(self.types) if kind in _SPECIAL}

    def added(self, strips: tuple[frozenset[int], frozenset[int]]) -> list[dict[str, Any]]:
        """Tokens that are found in texts before the model sees them."""
        found = (id_ for id_, kind in enumerate(self.types) if kind in _ADDED)
        flags = {"single_word": False, "normalized": False}
        return [
            {"id": id_, "content": self.spelled[id_], "lstrip": id_ in strips[0], "rstrip": id_ in strips[1]}
            | flags
            | {"special": self.types[id_] in _SPECIAL}
            for id_ in found
        ]


def _tokenizer(gguf: GgufFile, vocabulary: GgufVocabulary, tokens: _Tokens) -> dict[str, Any]:
    """A tokenizer.json."""
    steps = normalizer_steps(gguf.metadata)
    known = pre_tokenizer(vocabulary.pre) if vocabulary.model == _BYTE_PAIRS else None
    if known is not None:
        parts = _byte_level(known, steps)
        merges = _read_merges(gguf, tokens)
    else:
        prefixed = gguf.metadata.flag("tokenizer.ggml.add_space_prefix", vocabulary.model == _SENTENCE_PIECE)
        parts = _pieces(steps, prefixed)
        merges = _read_merges(gguf, tokens) if vocabulary.model == _RAW_PAIRS else _made_merges(vocabulary, tokens)
    unknown = vocabulary.special_texts.get("unk")
    # Half of the memory while it is parsed, where no part holds a space.
    plain = not any(" " in left or " " in right for left, right in merges)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown if known is None and unknown in tokens.vocabulary else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": known is None,
        "byte_fallback": known is None,
        "ignore_merges": known is not None and known.whole_words,
        "vocab": tokens.vocabulary,
        "merges": [" ".join(merge) for merge in merges] if plain else [list(merge) for merge in merges],
    }
    around = {"post_processor": _post_processor(vocabulary), "model": model}
    added = {"added_tokens": tokens.added(vocabulary.strips)}
    return {"version": "1.0", "truncation": None, "padding": None} | added | parts | around


def _byte_level(known: PreTokenizer, steps: Iterable[str]) -> dict[str, Any]:
    """Normalizer, pre-tokenizer and decoder of byte pairs."""
    words = known.steps[-1] == "words"
    split: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if step == "digits"
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in (known.steps[:-1] if words else known.steps)
    ]
    in_bytes = {"type": "ByteLevel", "add_prefix_space": "prefix" in steps, "trim_offsets": True, "use_regex": words}
    return {
        "normalizer": _sequence("normalizers", _normalizers(steps)),
        "pre_tokenizer": _sequence("pretokenizers", [*split, in_bytes]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def _pieces(steps: tuple[str, ...], prefixed: bool) -> dict[str, Any]:
    """Normalizer, pre-tokenizer and decoder of pieces with underlines for spaces."""
    schemes = {"first_prefix": "first", "unprefix": "always"}
    scheme = next((scheme for step, scheme in schemes.items() if step in steps), None)
    normalizers = list(_normalizers(steps))
    if scheme is None:
        normalizers += [{"type": "Prepend", "prepend": UNDERLINE}] if prefixed else []
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": UNDERLINE})
    spaces = {"type": "Metaspace", "replacement": UNDERLINE, "prepend_scheme": scheme, "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": UNDERLINE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed or scheme is not None:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": None if scheme is None else spaces,
        "decoder": _sequence("decoders", decoders),
    }


def _normalizers(steps: Iterable[str]) -> Iterator[dict[str, Any]]:
    for step in steps:
        if step in _REPLACED:
            pattern, content = _REPLACED[step]
            yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        elif step.upper() in ("NFC", "NFD", "NFKC", "NFKD"):
            yield {"type": step.upper()}


def _sequence(inner: str, steps: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    found = list(steps)
    return found[0] if len(found) == 1 else {"type": "Sequence", inner: found} if found else None


def _read_merges(gguf: GgufFile, tokens: _Tokens) -> list[tuple[str, str]]:
    """The merges of a file, of equal ones the first, but for those of control tokens."""
    known, control = tokens.vocabulary, set(tokens.special.values())
    merges: dict[tuple[str, str], None] = {}
    for text in gguf.metadata.array("tokenizer.ggml.merges", "string").strings():
        at = text.find(" ", 1)
        left, right = text[:at], text[at + 1 :]
        made = left + right
        if at < 0 or left not in known or right not in known or made not in known:
            raise damaged(gguf.path, f"its merge {text[:80]!r} is not of two tokens that make a third")
        if left not in control and right not in control and made not in control:
            merges[left, right] = None
    return list(merges)


def _made_merges(vocabulary: GgufVocabulary, tokens: _Tokens) -> list[tuple[str, str]]:
    """Merges made of scores: those of the highest first, of the same score those with the longest left part."""
    assert vocabulary.scores is not None, "tokenizer_refusal wants scores"
    ids = {text: id_ for id_, text in enumerate(tokens.spelled) if tokens.types[id_] not in (*_SPECIAL, BYTE)}
    id_of = ids.get
    found: list[tuple[int, int, int]] = []
    for text, id_ in ids.items():
        for at in range(1, len(text)):
            left = id_of(text[:at])
            if left is not None and (right := id_of(text[at:])) is not None:
                found.append((id_, left, right))
    made, left_ids, right_ids = np.array(found, np.int64).reshape(-1, 3).T  # (M,), (M,), (M,)
    # What users define is found before all else, whatever its score.
    scores = np.where(np.array(tokens.types) == USER_DEFINED, 0, vocabulary.scores.numbers()[: len(tokens.types)])
    lengths = np.array([len(text) for text in tokens.spelled])
    keys = (right_ids, left_ids, made, -lengths[right_ids], -lengths[left_ids], -scores[made])
    order = np.lexsort(keys)  # (M,)
    pairs = zip(left_ids[order].tolist(), right_ids[order].tolist(), strict=True)
    return [(tokens.spelled[left], tokens.spelled[right]) for left, right in pairs]


def _post_processor(vocabulary: GgufVocabulary) -> dict[str, Any] | None:
    """What puts tokens around a text; None where there are none."""
    names = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    around = {name: vocabulary.special[name] for name, put in names.items() if put and name in vocabulary.special}
    if not around:
        return None
    texts = {name: vocabulary.special_texts[name] for name in around}

    def template(letter: str, type_id: int) -> list[dict[str, Any]]:
        marks = {name: [{"SpecialToken": {"id": text, "type_id": type_id}}] for name, text in texts.items()}
        text = {"Sequence": {"id": letter, "type_id": type_id}}
        return [*marks.get("bos", []), text, *marks.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            texts[name]: {"id": texts[name], "ids": [id_], "tokens": [texts[name]]} for name, id_ in around.items()
        },
    }


def _check(gguf: GgufFile, contents: bytes, tokens: _Tokens) -> None:
    """Refuses what the library reads as other tokens, and texts that become control tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(contents)
    except Exception as error:  # the library raises plain Exception
        raise damaged(gguf.path, f"its tokenizer cannot be used ({error})") from error
    wanted: Mapping[int, str] = {id_: tokens.spelled[id_] for id_, kind in enumerate(tokens.types) if kind in _ADDED}
    if {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()} != wanted:
        raise damaged(gguf.path, "its added tokens are not where tokens can be added")
    tokenizer.encode_special_tokens = True
    special = tokens.special
    control = {id_ for id_ in special if tokens.types[id_] == CONTROL}
    texts = list(special.values())
    for text, encoded in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        if not control.isdisjoint(encoded.ids):
            raise _refused(gguf, f"its control token {text[:80]!r} is a word of texts, too")
