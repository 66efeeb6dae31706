"""How many digits numbers of JSON may have: small models write them for ever, and the engine's grammars let them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

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
    """Which of the tokens that a grammar allows go on with a number of too many digits.

    A number that the grammar itself holds to more digits keeps them: constants, bounds, and whatever has no end yet.

    Args:
        source: of the grammar, whose own numbers may be longer.
        ahead: `digits_ahead` of the vocabulary.
        text_of: the bytes of a token.
    """

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
        """Those of `ids` by which the last number of a reply stays short enough; all where none does."""
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
