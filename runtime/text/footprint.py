"""What tokenizers take in memory, as bounds in bytes; knows nothing of budgets.

Measured for version 0.23 of the library on vocabularies of 512 to 152,000 tokens (docs/LOG.md). A token takes the same
however long the file; hash tables of a power of two of buckets, eight for seven tokens or more, come on top. Parsing a
second time takes more than the first. Words that were seen are kept, up to `SEEN_WORDS` of them.
"""

from __future__ import annotations

import mmap
import re

__all__ = ["SEEN_WORDS", "encoding_bytes", "has_pairs", "kept_bytes", "parsing_bytes", "table_bytes"]

# Quotes inside a text of a JSON file are escaped, so this is never part of one.
_PAIRS = re.compile(rb'"merges"\s*:\s*\[\s*\[')

# Words that were seen and are kept with their tokens; the library's own ten thousand take 6 MB, of which chats profit
# little.
SEEN_WORDS = 1000
_TOKEN_BYTES, _BUCKET_BYTES, _SEEN_WORD_BYTES = 190, 83, 600
# Where merges are texts, and where they are pairs.
_PARSED_TOKEN_BYTES, _PARSED_BUCKET_BYTES, _PARSER_BYTES = (320, 680), (116, 140), 2_000_000
# What parsing leaves behind: blocks too small to go back to the system.
_LEFT_TOKEN_BYTES, _LEFT_BYTES = 16, 2_500_000
_KEPT_BYTES = 2_000_000
_ENCODED_CHARACTER_BYTES, _ENCODER_BYTES = 160, 250_000


def kept_bytes(tokens: int, *, used: bool = True) -> int:
    """A tokenizer that stays in memory.

    Args:
        tokens: in its vocabulary.
        used: with the words it keeps of texts that it has seen.
    """
    parsed = _TOKEN_BYTES * tokens + _BUCKET_BYTES * _buckets(tokens)
    return parsed + _KEPT_BYTES + (_SEEN_WORD_BYTES * SEEN_WORDS if used else 0)


def has_pairs(contents: bytes | mmap.mmap) -> bool:
    """Whether a tokenizer.json has its merges as pairs, which the library parses in twice the memory of texts."""
    return _PAIRS.search(contents) is not None


def parsing_bytes(file_bytes: int, tokens: int, *, pairs: bool) -> int:
    """The most that is in use while a tokenizer.json is parsed, the result included.

    Args:
        file_bytes: its size.
        tokens: in its vocabulary.
        pairs: as `has_pairs` says.
    """
    parsed = _PARSED_TOKEN_BYTES[pairs] * tokens + _PARSED_BUCKET_BYTES[pairs] * _buckets(tokens)
    return file_bytes + parsed + _PARSER_BYTES


def table_bytes(file_bytes: int, tokens: int) -> int:
    """What stays of a tokenizer at rest: each token's spelling and where it begins.

    Args:
        file_bytes, tokens: as of `parsing_bytes`.
    """
    return file_bytes // 3 + (4 + _LEFT_TOKEN_BYTES) * (tokens + 1) + _LEFT_BYTES


def encoding_bytes(characters: int) -> int:
    """What turning a text into tokens takes besides the tokenizer."""
    return _ENCODED_CHARACTER_BYTES * characters + _ENCODER_BYTES


def _buckets(tokens: int) -> int:
    return 1 << (-(-tokens * 8 // 7) - 1).bit_length() if tokens else 0
