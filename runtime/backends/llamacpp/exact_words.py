"""Words that llama.cpp would cut otherwise than the checkpoint's tokenizer does, and their tokens.

Its tables of Unicode are of another version than the tokenizers library's, and its patterns leave out a few things.
Texts with such characters, which are rare, are cut by the library; words that hold some are merged here.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self, overload

import numpy as np

from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.gguf.normalizer import steps_of
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.gguf.vocabulary import GgufVocabulary
from edgeinfer.runtime.text.contract import byte_token

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What patterns without regard to case take for an s.
_LONG_S = "\N{LATIN SMALL LETTER LONG S}"
# A longer word is left to llama.cpp: this takes the square of a word's length.
_MOST_BYTES = 128
_SEEN_WORDS = 256
_UNMERGED = 1 << 62


class ExactWords:
    """The words of one file's texts.

    Args:
        gguf, vocabulary: the file.
        steps: of its pre-tokenizer.
        whole_words: words of the vocabulary are taken whole.
    """

    def __init__(self, gguf: GgufFile, vocabulary: GgufVocabulary, steps: Sequence[str], whole_words: bool) -> None:
        self._tokens = vocabulary.tokens
        self._merges = gguf.metadata.array("tokenizer.ggml.merges", "string")
        self._steps, self._whole_words = steps, whole_words
        self._merged = lru_cache(_SEEN_WORDS)(self._tokens_of)

    @classmethod
    def of(cls, gguf: GgufFile, vocabulary: GgufVocabulary) -> Self | None:
        """Those of a file; None where nothing is known of its pre-tokenizer."""
        known = steps_of(vocabulary.pre) if vocabulary.model == "gpt2" and vocabulary.merges else None
        return None if known is None else cls(gguf, vocabulary, *known)

    def needed(self, text: str) -> bool:
        """Whether a text holds characters that llama.cpp may take for others than the library does."""
        return any(map(self._is_odd, set(text)))

    def ids(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a text.

        Args:
            plain: makes those of a word without such characters.
        """
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
        """Characters of ASCII that the vocabulary lacks. They become no token, and what is around them merges."""
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
    """Where texts stand in an array of a file, in twelve bytes each: by their hashes, which are seeded anew in every
    process."""

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
        """The place of a text."""
        wanted = hash(text)
        at = int(self._hashes.searchsorted(wanted))
        return int(self._places[at]) if at < len(self._hashes) and self._hashes[at] == wanted else default
