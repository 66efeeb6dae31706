"""A tokenizer's vocabulary as a grammar engine needs it, and how many digits numbers of JSON may have. Small models
write digits for ever, and the engine's grammars let them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import TokenizerError, UsageError
from edgeinfer.runtime.planning.facts import GrammarMode
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.text.contract import BYTE_LEVEL, TokenizerLike, bytes_of, piece_bytes, token_bytes

# What stands for a bound of 0 that is excluded; numbers need not come near it.
NEXT_TO_ZERO = Decimal("1e-22")

# Before the point and behind it, as in llama.cpp's grammars; and of an exponent, of which doubles have three.
_DIGITS, _EXPONENT = 16, 3
_MOST = 330  # of a double without an exponent
_FURTHER = 6  # behind those of a longer bound
_TEXT_DIGITS = 40  # side by side in a text, of which 128 bits have 39
# Of a token that begins with what JSON never has behind a digit of a number; of one that begins a line, or ends a text.
_OTHER, _LINE, _QUOTE = 255, 254, 253
_BEHIND = frozenset(b".eE,]} \t")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_REPEATED = re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}")  # in an expression, which may count digits itself
_WRITTEN = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?")
# Not of a text: what a string or a name has before its digits is no beginning of a number.
_LAST = re.compile(rb"(?<![\w.\"+-])-?(\d+)(?:\.(\d+))?(?:[eE][+-]?(\d+))?\Z")


def digits_ahead(tokens: Sequence[bytes], special: bytes) -> NDArray[np.uint8]:  # (V,)
    """How many digits each token of a vocabulary begins with; `_OTHER` where no number of JSON goes on so."""
    return np.fromiter((_ahead(token, special) for token in tokens), np.uint8, len(tokens))


def _ahead(token: bytes, special: bytes) -> int:
    digits = len(token) - len(token.lstrip(b"0123456789"))
    if digits or not token or token.startswith(special):
        return min(digits, _QUOTE - 1)
    if token[0] in _BEHIND:
        return 0
    return {0x0A: _LINE, 0x0D: _LINE, 0x22: _QUOTE}.get(token[0], _OTHER)


class NumberLimit:
    """Finds tokens that continue a number with too many digits, among those that a grammar allows. A number that the
    grammar itself holds to more digits keeps them: constants, bounds, and whatever has no end yet."""

    def __init__(self, source: str, ahead: NDArray[np.uint8], text_of: Callable[[int], bytes]) -> None:
        written = [_size(found) for found in _WRITTEN.finditer(_TEXT.sub("", source))]
        self._whole, self._fraction = (_most(sizes) for sizes in zip(*written, (0, 0), strict=True))
        repeated = (int(count) for found in _REPEATED.findall(source) for count in found if count)
        self._text_digits = min(max(_TEXT_DIGITS, *repeated, 0), _MOST)
        self._ahead = ahead
        self._text_of = text_of

    def within(
        self, ids: NDArray[np.int64], ends: NDArray[np.int64], reply: Sequence[int]
    ) -> NDArray[np.int64]:  # (A,), (E,) -> (B,)
        """Keep the ids with which the last number of a reply stays short enough; all if there are none."""
        if not reply or not self._text_of(reply[-1])[-1:].isdigit():
            return ids
        longest = max(self._whole + self._fraction + 2 * _EXPONENT, self._text_digits + 1)
        tail = b"".join(map(self._text_of, reply[-longest:]))[-longest:]
        digits, number = len(tail) - len(tail.rstrip(b"0123456789")), _LAST.search(tail)
        if number is not None and not number.start() and len(tail) == longest:
            number = None  # it begins further back than numbers reach
        if number is None and digits < _DIGITS:
            return ids
        ahead = np.where(np.isin(ids, ends), 0, self._ahead[ids])  # (A,)
        if number is None or (ahead == _OTHER).any():
            # A text, which is JSON's where it may end by a quote and has no line ends.
            many = (ahead == _QUOTE).any() and not (ahead == _LINE).any()
            kept: NDArray[np.int64] = ids[(ahead >= _QUOTE) | (ahead <= max(0, self._text_digits - digits))]
            return kept if many else ids
        part = number.lastindex or 1
        most = (self._whole, self._fraction, _EXPONENT)[part - 1]
        kept = ids[(ahead == _LINE) | (ahead <= max(0, most - len(number[part])))]
        if len(kept):
            return kept
        # It has no end yet. Only zeros lead to no end, as behind a bound of 0 that is excluded.
        kept = ids[[self._text_of(token)[:1] != b"0" for token in ids.tolist()]]
        return kept if len(kept) else ids


def _most(sizes: Sequence[int]) -> int:
    longest = max(sizes)
    return _DIGITS if longest <= _DIGITS else min(longest + _FURTHER, _MOST)


def _size(found: re.Match[str]) -> tuple[int, int]:
    """The digits that a number has before its point and behind it, once it is written without an exponent."""
    number = Decimal(found[0])
    if number == NEXT_TO_ZERO:
        return 1, 1
    whole, _, fraction = format(number, "f").partition(".")
    return len(whole), len(fraction)


# One of these is among the decoding steps of every tokenizer that spells spaces as SentencePiece does.
_PIECES = frozenset({"Replace", "Metaspace"})
# Marks special tokens for the engine: no text contains this byte.
_SPECIAL = b"\xff"
# Texts of strings, of which the engine keeps the tokens apart. At 150 thousand tokens its own four of these took 87 MB
# where these two took 58 for the same time per mask; without any it takes 5 ms instead of 0.2 in strings of bounded
# length.
_SLICES = (r"[^\"\\\x00-\x1F\x7F]{1,10}", r"[^\"\\\x00-\x1F\x7F]{1,30}")

# Bytes of a token in its tables, and while they are made; of the engine's code and its first use; of a grammar while it
# is compiled and followed, of 265 schemas of jsonschemabench the most, and of a further one at the same time (docs/log,
# 2026-11-26).
_TOKEN_BYTES: dict[GrammarMode, tuple[int, int]] = {"none": (0, 0), "plain": (130, 190), "sliced": (240, 310)}
_ENGINE_BYTES, _GRAMMAR_BYTES, _FURTHER_GRAMMAR_BYTES = 2_000_000, 8_000_000, 4_000_000


def engine() -> Any:
    try:
        import llguidance
    except ImportError as error:
        message = "Replies by a schema, a regular expression or a grammar need llguidance, which is not installed."
        raise UsageError(message, "pip install 'edgeinfer[structured]'") from error
    return llguidance


def spelled(tokenizer: TokenizerLike, size: int) -> list[bytes]:
    """The bytes that each of the model's `size` tokens adds to a text; special ones marked, empty for unknown ids."""
    kinds = tokenizer.decoder_types
    if kinds != BYTE_LEVEL and _PIECES.isdisjoint(kinds):
        message = (
            f"Tokens of this model cannot be followed by a grammar (decoding steps: {', '.join(kinds) or 'none'})."
        )
        raise TokenizerError(message, "Leave the schema or grammar out, or take a model with byte-level tokens.")
    special = tokenizer.special_ids
    texts = map(tokenizer.id_to_token, range(size))
    text_bytes = token_bytes if kinds == BYTE_LEVEL else piece_bytes
    return [
        b"" if text is None else _SPECIAL + text.encode("utf-8") if id_ in special else text_bytes(text)
        for id_, text in enumerate(texts)
    ]


def grammar_bytes(mode: GrammarMode, size: int, replies: int) -> tuple[int, int]:
    """Bytes of replies by grammars at most: in the end, and while the vocabulary's tables are made."""
    kept, made = (_ENGINE_BYTES + each * size for each in _TOKEN_BYTES[mode])
    return kept + _GRAMMAR_BYTES + (replies - 1) * _FURTHER_GRAMMAR_BYTES, made


class GrammarVocabulary:
    """The vocabulary of one model for the grammar engine, made at first use: 0.7 s at 150 thousand tokens. If `sliced`,
    the engine keeps the tokens of strings apart, which takes memory and saves time."""

    def __init__(self, tokenizer: TokenizerLike, size: int, *, sliced: bool = True) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._slices = list(_SLICES) if sliced else []
        self.size = size

    @property
    def tokens(self) -> Any:
        """The engine's `LLTokenizer`; one id behind the model's is the end of every grammar."""
        with self._lock:
            return self._made[0]

    @property
    def digits(self) -> NDArray[np.uint8]:  # (size + 1,)
        """`digits_ahead` of every token."""
        with self._lock:
            return self._made[1]

    def text_of(self, token: int) -> bytes:
        return bytes_of(self._tokenizer, token)

    @cached_property
    def _made(self) -> tuple[Any, NDArray[np.uint8]]:
        library = engine()
        spelling = _Spelled([*spelled(self._tokenizer, self.size), _SPECIAL + b"<|end of grammar|>"])
        made = library.LLTokenizer(spelling, slices=self._slices), digits_ahead(spelling.tokens, _SPECIAL)
        # The engine has a copy, and keeps this.
        spelling.tokens = []
        release_freed()
        return made


class _Spelled:
    """What `LLTokenizer` takes for a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [id_ for id_, token in enumerate(tokens) if token.startswith(_SPECIAL)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return nothing: no spelling of a text is forced upon the model."""
        return []
