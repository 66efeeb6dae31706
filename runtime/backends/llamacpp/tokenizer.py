"""Text to token ids and back with the vocabulary of a GGUF file, by llama.cpp. Texts are cut at special tokens here:
llama.cpp takes some for special by their spelling, whatever the file says."""

from __future__ import annotations

import ctypes
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.gguf.normalizer import GgufNormalizer, normalizer_steps, pre_tokenizer
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    read_vocabulary,
)
from edgeinfer.core.errors import PromptError, TokenizerError
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel
from edgeinfer.runtime.system.memory import allocating
from edgeinfer.runtime.text.contract import SPECIAL, byte_token, token_bytes
from edgeinfer.runtime.text.special_tokens import SpecialTokens

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What patterns without regard to case take for an s.
_LONG_S = "\N{LATIN SMALL LETTER LONG S}"
# A longer word is left to llama.cpp: this takes the square of a word's length.
_MOST_BYTES = 128
_SEEN_WORDS = 256
_UNMERGED = 1 << 62


class ExactWords:
    """Words that llama.cpp cuts differently from the checkpoint's tokenizer, and their tokens. Its tables of Unicode
    are of another version than the tokenizers library's, and its patterns leave out a few things. Texts with such
    characters, which are rare, are cut by the library; words that hold some are merged here."""

    def __init__(self, gguf: GgufFile, vocabulary: GgufVocabulary, steps: Sequence[str], whole_words: bool) -> None:
        self._tokens = vocabulary.tokens
        self._merges = gguf.metadata.array("tokenizer.ggml.merges", "string")
        self._steps, self._whole_words = steps, whole_words
        self._merged = lru_cache(_SEEN_WORDS)(self._tokens_of)

    @classmethod
    def of(cls, gguf: GgufFile, vocabulary: GgufVocabulary) -> Self | None:
        """The words of a file; None if its pre-tokenizer is unknown."""
        known = pre_tokenizer(vocabulary.pre) if vocabulary.model == "gpt2" and vocabulary.merges else None
        return None if known is None else cls(gguf, vocabulary, known.steps, known.whole_words)

    def needed(self, text: str) -> bool:
        """Whether a text holds characters that llama.cpp may take for others than the library does."""
        return any(map(self._is_odd, set(text)))

    def ids(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a text; `plain` makes those of a word without such characters."""
        words = (text[start:end] for _, (start, end) in self._splitter.pre_tokenize_str(text))
        return [id_ for word in words for id_ in (self._merged(word) if self.needed(word) else None) or plain(word)]

    def _is_odd(self, character: str) -> bool:
        if character < "\x7f":
            return character < " " and character in self._lost
        return character == _LONG_S or unicodedata.category(character) == "Cn"

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The tokens of single bytes, as they are spelled."""
        spelled = {byte_token(byte).encode("utf-8"): byte_token(byte) for byte in range(256)}
        return {spelled[text]: id_ for id_, text in enumerate(self._tokens.spellings()) if text in spelled}

    @cached_property
    def _lost(self) -> frozenset[str]:
        """Characters of ASCII that the vocabulary lacks. They become no token, and their neighbours merge."""
        return frozenset(chr(byte) for byte in range(128) if byte_token(byte) not in self._bytes)

    @cached_property
    def _splitter(self) -> Any:
        from tokenizers import Regex, pre_tokenizers

        steps = [
            pre_tokenizers.Digits(individual_digits=True)
            if step == "digits"
            else pre_tokenizers.Split(Regex(_GPT2 if step == "words" else step), "isolated")
            for step in self._steps
        ]
        return pre_tokenizers.Sequence(steps)

    def _tokens_of(self, word: str) -> list[int] | None:
        """Token ids of a word; None of one that is too long."""
        symbols = [c.encode("utf-8") for c in map(byte_token, word.encode("utf-8")) if c in self._bytes]
        if len(symbols) > _MOST_BYTES:
            return None
        whole = self._ids.get(b"".join(symbols)) if self._whole_words else None
        if whole is not None:
            return [whole]
        ranks = cache(lambda left, right: self._ranks.get(left + b" " + right, _UNMERGED))
        while len(symbols) > 1:
            # Those of the lowest rank are merged, of equal ones the leftmost.
            rank, place = min((ranks(*pair), place) for place, pair in enumerate(pairwise(symbols)))
            if rank == _UNMERGED:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [self._ids[symbol] for symbol in symbols]

    @cached_property
    def _ids(self) -> _Places:
        return _Places(self._tokens)

    @cached_property
    def _ranks(self) -> _Places:
        return _Places(self._merges)


class _Places:
    """Places of texts in an array of a file, in twelve bytes each, by their hashes, whose seed differs by process."""

    def __init__(self, texts: GgufArray) -> None:
        hashes = np.frombuffer(array("q", map(hash, texts.spellings())), np.int64)  # (count,)
        # Of equal ones the first.
        self._places = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._places]

    def __getitem__(self, text: bytes) -> int:
        place = self.get(text)
        assert place is not None, "merges lead to tokens alone"
        return place

    @overload
    def get(self, text: bytes) -> int | None: ...
    @overload
    def get(self, text: bytes, default: int) -> int: ...
    def get(self, text: bytes, default: int | None = None) -> int | None:
        wanted = hash(text)
        at = int(self._hashes.searchsorted(wanted))
        return int(self._places[at]) if at < len(self._hashes) and self._hashes[at] == wanted else default


_ATTR_CONTROL = 1 << 3  # llama.cpp's bit for a control token
# As the tokenizers library has it.
_WHITE = " \t\n\v\f\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_BYTE_LEVEL = ("ByteLevel",)
# Of SentencePiece's vocabularies, named as the tokenizers library names them.
_PIECES = ("Replace", "ByteFallback", "Fuse")
_STRIPPED = (*_PIECES, "Strip")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What exporters call rows of the embedding that stand for no token.
_PADDING = re.compile(rb"\[PAD\d+\]")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTERS = 2**28
_KINDS = {"gpt2": _BYTE_LEVEL, "llama": _STRIPPED, "gemma4": _PIECES}


class LlamaTokenizer:
    """Implements `contract.TokenizerLike` over a loaded model; of no use once that is closed."""

    def __init__(self, model: LlamaModel) -> None:
        vocabulary = read_vocabulary(model.gguf)
        if vocabulary.model not in _KINDS:
            message = f"{model.gguf.path} has a vocabulary of an unsupported kind, {vocabulary.model}."
            raise TokenizerError(message, "Use a model with a BPE or SentencePiece tokenizer.")
        self._model, self._lib = model, model.lib
        self._spellings = vocabulary.tokens
        # A file without types leaves it to llama.cpp to tell special tokens by their spelling.
        types = vocabulary.token_types
        self._types: NDArray[np.int32] = (
            self._types_by_spelling(model.vocab_size) if types is None else types.numbers()
        )  # (V,)
        metadata = model.gguf.metadata
        steps = normalizer_steps(metadata)
        self.decoder_types: tuple[str, ...] = _KINDS[vocabulary.model]
        prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True) or "first_prefix" in steps
        if vocabulary.model == "llama" and not prefixed:
            self.decoder_types = _PIECES
        self.special_ids = frozenset(np.flatnonzero(np.isin(self._types, (UNKNOWN, CONTROL))).tolist())
        self._user_defined = frozenset(np.flatnonzero(self._types == USER_DEFINED).tolist())
        self._normalizer = GgufNormalizer(steps)
        self._exact = ExactWords.of(model.gguf, vocabulary)
        self._strip_ids = vocabulary.strips
        self._find = lru_cache(maxsize=256)(self._scan)

    @cached_property
    def vocab_size(self) -> int:
        unused = np.flatnonzero(self._types == UNUSED)
        padding = {id_ for id_ in unused.tolist() if self._text(id_) is None}
        size = len(self._types)
        while size - 1 in padding:
            size -= 1
        return size

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        with self._encoding(text):
            marks = self._special_tokens if parse_special else self._plain
            parts = marks.split(self._spaced(text))
            ids = self._joined_ids(parts, [marks.ids[mark] for mark in parts[1::2]])
        before, behind = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *behind]

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        with self._encoding("".join(parts)):
            split: list[str] = []
            ids: list[int] = []
            for place, part in enumerate(parts):
                if place % 2:
                    split.append(part)
                    ids.append(SPECIAL)
                else:
                    found = self._plain.split(self._spaced(part))
                    split += found
                    ids += [self._plain.ids[mark] for mark in found[1::2]]
            return self._joined_ids(split, ids)

    def _joined_ids(self, parts: Sequence[str], marks: Sequence[int]) -> list[int]:
        """Token ids of texts, every second of which is a special token with an id that is given."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(marks[place // 2])
                continue
            # llama.cpp starts again behind each special token, too.
            run = self._stripped(part, parts[place - 1] if place else "", "".join(parts[place + 1 : place + 2]))
            run = self._normalizer.run(run, first=place == 0)
            if self._exact is not None and self._exact.needed(run):
                ids += self._exact.ids(run, self._ids)
            else:
                ids += self._ids(run) if run else []
        return ids

    def _spaced(self, text: str) -> str:
        """The text with spaces for what stands for them in SentencePiece's tokens, where tokens are found in it that
        are spelled with spaces."""
        return text.replace(_SPACE, " ") if self._spaces_are_tokens else text

    @contextmanager
    def _encoding(self, text: str) -> Iterator[None]:
        if len(text) > _MAX_CHARACTERS:
            raise PromptError(f"The text has {len(text)} characters.", f"The limit is {_MAX_CHARACTERS}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"The text is not valid Unicode: lone surrogate at index {error.start}."
            raise PromptError(message, "Decode the input as UTF-8.") from error
        with allocating("The text"):
            yield

    def _ids(self, text: str) -> list[int]:
        data = text.encode("utf-8")
        # Most texts have fewer tokens than that; of others, the first call tells how many.
        count, ids = self._tokenize(data, len(data) // 2 + 16)
        if count < 0:
            count, ids = self._tokenize(data, -count)
        if count < 0:
            raise TokenizerError("llama.cpp cannot turn the text into tokens.", "Shorten it.")
        found: list[int] = ids[:count].tolist()
        return found

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that are put before and behind a text."""
        count, ids = self._tokenize(b"", 8, special=True)
        around: list[int] = ids[:count].tolist()
        with self._model.vocabulary() as vocabulary:
            first = int(self._lib.llama_vocab_get_add_bos(vocabulary))
        return around[:first], around[first:]

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self._texts(self.special_ids | self._user_defined))

    @cached_property
    def _plain(self) -> SpecialTokens:
        """Special tokens that are tokens in any text, whether special tokens are parsed or not."""
        return SpecialTokens(self._texts(self._user_defined))

    @cached_property
    def _spaces_are_tokens(self) -> bool:
        spelled = "".join(self._special_tokens.ids)
        return self.decoder_types != _BYTE_LEVEL and " " in spelled and _SPACE not in spelled

    def _texts(self, ids: Iterable[int]) -> dict[str, int]:
        return {text: id_ for id_ in sorted(ids) if (text := self._text(id_))}

    def _stripped(self, text: str, before: str, behind: str) -> str:
        """Text between two special tokens without the white space that these take with them."""
        if before in self._strips[1]:
            text = text.lstrip(_WHITE)
        return text.rstrip(_WHITE) if behind in self._strips[0] else text

    @cached_property
    def control_texts(self) -> Mapping[str, int]:
        return self._texts(self.special_ids)

    @cached_property
    def _strips(self) -> tuple[frozenset[str], frozenset[str]]:
        """Special tokens that take the white space before them, and special tokens that take the white space behind."""
        ids, (before, behind) = self._special_tokens.ids, self._strip_ids
        return frozenset(t for t in ids if ids[t] in before), frozenset(t for t in ids if ids[t] in behind)

    def _types_by_spelling(self, size: int) -> NDArray[np.int32]:  # (V,)
        with self._model.vocabulary() as vocabulary:
            attributes = [int(self._lib.llama_vocab_get_attr(vocabulary, id_)) for id_ in range(size)]
        return np.where(np.array(attributes) & _ATTR_CONTROL, CONTROL, NORMAL).astype(np.int32)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        wanted = [int(i) for i in ids if not (skip_special_tokens and i in self.special_ids)]
        pairs = [(i, text) for i in wanted if (text := self.id_to_token(i)) is not None]
        if self.decoder_types == _BYTE_LEVEL:
            return b"".join(self._bytes_of(i, text) for i, text in pairs).decode("utf-8", "replace")
        text = _joined([text for _, text in pairs])
        return text[1:] if self.decoder_types == _STRIPPED and text.startswith(" ") else text

    def token_to_id(self, text: str) -> int | None:
        return self._find(text)

    def id_to_token(self, id_: int) -> str | None:
        if not 0 <= id_ < len(self._types):
            return None
        return self._text(id_)

    def _tokenize(self, data: bytes, room: int, special: bool = False) -> tuple[int, NDArray[np.int32]]:
        ids = np.empty(room, np.int32)
        target = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        with self._model.vocabulary() as vocabulary:
            return int(self._lib.llama_tokenize(vocabulary, data, len(data), target, room, special, False)), ids

    def _text(self, id_: int) -> str | None:
        with self._model.vocabulary() as vocabulary:
            spelling = bytes(self._lib.llama_vocab_get_text(vocabulary, id_))
        if self._types[id_] == UNUSED and _PADDING.fullmatch(spelling):
            return None
        return spelling.decode("utf-8", "replace")

    def _bytes_of(self, id_: int, text: str) -> bytes:
        return text.encode("utf-8") if self._types[id_] in (CONTROL, USER_DEFINED) else token_bytes(text)

    def _scan(self, text: str) -> int | None:
        wanted = text.encode("utf-8", "surrogatepass")
        found = next((i for i, spelling in enumerate(self._spellings.spellings()) if spelling == wanted), None)
        return None if found is None or self._text(found) is None else found


def _joined(spellings: list[str]) -> str:
    """The text of SentencePiece tokens: runs of byte tokens are characters, or as many replacement characters."""
    parts = []
    for in_bytes, run in groupby(spellings, key=lambda spelling: _BYTE.fullmatch(spelling) is not None):
        if not in_bytes:
            parts.append("".join(run).replace(_SPACE, " "))
            continue
        data = bytes(int(spelling[3:5], 16) for spelling in run)
        try:
            parts.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            parts.append(_REPLACEMENT * len(data))
    return "".join(parts)
