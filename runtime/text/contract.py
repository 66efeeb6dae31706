"""What a tokenizer promises, the bytes that tokens spell, and whether a text has more tokens than a context holds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Protocol

# In the place of a special token among the ids of a text in parts; no token has this id.
SPECIAL = -1
# Decoding steps of byte-level tokenizers, and how others spell a byte.
BYTE_LEVEL = ("ByteLevel",)
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# How many times shorter a tokenizer's normalizer can make a text: NFC and NFKC up to four times. Of those that leave
# out blanks, this is a cap on how many.
_SHRINKS = 4
# Characters of a token of ordinary text, at most: that many are looked at first.
_USUAL = 8
# By so much tokens of a part may outnumber those of the whole there: what stands at its end is cut differently.
_MARGIN = 2


class TokenizerLike(Protocol):
    """Text to token ids and back, for several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may have more columns."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked as special."""

    @property
    def control_texts(self) -> Mapping[str, int]:
        """Texts that `encode` makes a token of only where special tokens are parsed, with that token's id."""

    @property
    def decoder_types(self) -> tuple[str, ...]:
        """Names of the decoding steps in order, such as ("ByteLevel",); empty where tokens are joined by spaces."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text without lone surrogates. `parse_special` turns special tokens spelled out in the text
        into their ids, as a rendered template needs; without, they are plain text, as text from strangers needs. Added
        tokens that the tokenizer does not mark as special are parsed either way."""

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        """Token ids of a text in parts, every second of which is a special token and gives SPECIAL."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks add nothing."""

    def token_to_id(self, text: str) -> int | None:
        """The id of one token as the vocabulary spells it, None where it has no such token."""

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary's spelling of an id, None where it has no such id."""


@lru_cache(1024)
def token_bytes(token: str) -> bytes:
    """The bytes of text that a token spells; an added token, written as plain text, spells itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def byte_token(byte: int) -> str:
    return _spellings()[byte]


@cache
def _spellings() -> dict[int, str]:
    return {byte: character for character, byte in _byte_alphabet().items()}


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet (Radford et al. 2019): printable Latin-1 bytes spell themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def bytes_of(tokenizer: TokenizerLike, token: int) -> bytes:
    """The bytes of one token: of a special one its name, of an unknown id none."""
    text = tokenizer.id_to_token(token)
    if text is None:
        return b""
    if token in tokenizer.special_ids:
        return text.encode("utf-8")
    return token_bytes(text) if tokenizer.decoder_types == BYTE_LEVEL else piece_bytes(text)


def piece_bytes(text: str) -> bytes:
    """The bytes of a piece as SentencePiece spells it."""
    byte = BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte.group(1), 16)]) if byte else text.replace(_SPACE, " ").encode("utf-8")


def longest_token(tokenizer: TokenizerLike) -> int:
    """Bytes of the longest token."""
    return max((len(bytes_of(tokenizer, token)) for token in range(tokenizer.vocab_size)), default=1) or 1


def surely_longer(tokenizer: TokenizerLike, text: str, tokens: int, longest: Callable[[], int]) -> bool:
    """Whether a text surely has more tokens than some number, by its size or by the tokens of its beginning."""
    part = tokens * _USUAL
    if len(text) <= part:
        return False
    if len(text) > tokens * longest() * _SHRINKS:  # characters, of which none has less than a byte
        return True
    while part < len(text):
        if len(tokenizer.encode(text[:part], add_special_tokens=False)) > _MARGIN * tokens:
            return True
        part *= 2
    return False


def vocabulary_digest(tokenizer: TokenizerLike) -> str:
    """SHA-256 of all tokens in order, in hexadecimal; equal where ids mean the same."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        digest.update((tokenizer.id_to_token(token) or "").encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
