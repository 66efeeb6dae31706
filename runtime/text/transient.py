"""A byte-level tokenizer that is in memory only while text is encoded."""

from __future__ import annotations

import mmap
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Self

from edgeinfer.errors import TokenizerError
from edgeinfer.records import dataclass
from edgeinfer.runtime.system.allocation import allocating
from edgeinfer.runtime.system.memory import release_code, release_freed
from edgeinfer.runtime.text.contract import BYTE_LEVEL, token_bytes
from edgeinfer.runtime.text.tokenizer import Tokenizer, has_pairs

# Quotes inside a text of a JSON file are escaped, so this is never part of one.
_BYTE_LEVEL_DECODER = re.compile(rb'"decoder"\s*:\s*\{\s*"type"\s*:\s*"ByteLevel"')


@dataclass(frozen=True)
class TokenizerFacts:
    """What is known of a tokenizer.json without parsing it.

    Attributes:
        can_rest: whether `TransientTokenizer` can use it.
        merge_pairs: whether its merges are written as pairs.
    """

    can_rest: bool
    merge_pairs: bool


def tokenizer_facts(path: str | Path) -> TokenizerFacts:
    """Looks through a tokenizer.json; one that is missing or empty has nothing."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            return TokenizerFacts(_BYTE_LEVEL_DECODER.search(contents) is not None, has_pairs(contents))
    except (OSError, ValueError):
        return TokenizerFacts(False, False)


class TransientTokenizer:
    """Implements `contract.TokenizerLike` in little memory; decoding needs a table alone, encoding parses the file
    again after each `rest`.

    Attributes:
        before_parsing: called before each parse, to make room for it.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.before_parsing: Callable[[], None] = _nothing
        self.vocab_size = tokenizer.vocab_size
        self.special_ids, self.control_texts = tokenizer.special_ids, tokenizer.control_texts
        self.decoder_types = tokenizer.decoder_types
        self._path, self._version = path, _version(path)
        self._spellings = _Spellings(tokenizer)
        self._tokenizer: Tokenizer | None = tokenizer
        self._lock = Lock()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a tokenizer.json; the library's tokenizer is there until the first `rest`."""
        tokenizer = Tokenizer.from_file(path)
        if tokenizer.decoder_types != BYTE_LEVEL:
            raise TokenizerError(f"{path} is not a byte-level tokenizer.", "Keep it loaded, with a larger budget.")
        # What parsing took goes before the table, which takes something too, is made.
        release_freed()
        with allocating("The table of tokens"):
            return cls(Path(path), tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; see `contract.TokenizerLike.encode`."""
        with self._lock:
            return self._awake().encode(text, add_special_tokens, parse_special)

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        """Token ids of text with special tokens; see `contract.TokenizerLike.encode_between`."""
        with self._lock:
            return self._awake().encode_between(parts)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks add nothing."""
        spellings = (self.id_to_token(i) for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(token_bytes(token) for token in spellings if token is not None).decode("utf-8", "replace")

    def token_to_id(self, text: str) -> int | None:
        """The id of one token as the vocabulary spells it, None where it has no such token."""
        with self._lock:
            return self._awake().token_to_id(text)

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary's spelling of an id, None where it has no such id."""
        return self._spellings[id_]

    def rest(self) -> None:
        """Frees the library's tokenizer until text is encoded again."""
        with self._lock:
            if self._tokenizer is not None:
                self._tokenizer = None
                release_freed()
                release_code()

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._spellings.nbytes

    def _awake(self) -> Tokenizer:
        if self._tokenizer is None:
            self.before_parsing()
            if _version(self._path) != self._version:
                raise TokenizerError(f"{self._path} was changed while in use.", "Load the model again.")
            self._tokenizer = Tokenizer.from_file(self._path)
            release_freed()
        return self._tokenizer


class _Spellings:
    """The spelling of every token, one behind the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # One at a time: texts of all tokens side by side would leave more holes behind than the table is large.
        texts, ends = bytearray(), array("I", [0])
        for token in tokenizer.spellings():
            texts += (token or "").encode("utf-8")
            ends.append(len(texts))
        self._texts, self._ends = bytes(texts), ends

    def __getitem__(self, id_: int) -> str | None:
        """None for ids that are no token, which have no text."""
        if not 0 <= id_ < len(self._ends) - 1:
            return None
        return self._texts[self._ends[id_] : self._ends[id_ + 1]].decode("utf-8") or None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return len(self._texts) + self._ends.itemsize * len(self._ends)


def _nothing() -> None:
    """Makes no room."""


def _version(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    try:
        stat = path.stat()
    except OSError as error:
        raise TokenizerError(f"The tokenizer {path} is gone: {error}.", "Load the model again.") from error
    return stat.st_size, stat.st_mtime_ns
