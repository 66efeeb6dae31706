"""The bytes that a token adds to a text, by its spelling in the vocabulary; knows nothing of streams or grammars."""

from __future__ import annotations

import re

from edgeinfer.runtime.text.byte_level import token_bytes
from edgeinfer.runtime.text.contracts import TokenizerLike

__all__ = ["BYTE_LEVEL", "bytes_of", "piece_bytes"]

BYTE_LEVEL = ("ByteLevel",)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def bytes_of(tokenizer: TokenizerLike, token: int) -> bytes:
    """The bytes of one token; a special one's are those of its name, none of an id that stands for nothing."""
    text = tokenizer.id_to_token(token)
    if text is None:
        return b""
    if token in tokenizer.special_ids:
        return text.encode("utf-8")
    return token_bytes(text) if tokenizer.decoder_types == BYTE_LEVEL else piece_bytes(text)


def piece_bytes(text: str) -> bytes:
    """The bytes of a piece as SentencePiece spells it."""
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte.group(1), 16)]) if byte else text.replace(_SPACE, " ").encode("utf-8")
