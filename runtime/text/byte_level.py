"""The alphabet in which byte-level tokenizers spell bytes; knows nothing of tokenizers or streams."""

from __future__ import annotations

from functools import cache

__all__ = ["byte_token", "token_bytes"]


def token_bytes(token: str) -> bytes:
    """The bytes of text that a token spells; an added token, written as plain text, spells itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def byte_token(byte: int) -> str:
    """The spelling of one byte."""
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
