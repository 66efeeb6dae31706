"""Finds out that a text has more tokens than a context holds without making tokens of all of it; knows no models."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.runtime.text.contracts import TokenizerLike
from edgeinfer.runtime.text.spelling import bytes_of

__all__ = ["longest_token", "surely_longer"]

# How many times shorter a tokenizer's normalizer can make a text: NFC and NFKC up to four times. Of those that leave
# out blanks, this is a cap on how many.
_SHRINKS = 4
# Characters of a token of ordinary text, at most: that many are looked at first.
_USUAL = 8
# By so much tokens of a part may outnumber those of the whole there: what stands at its end is cut differently.
_MARGIN = 2


def longest_token(tokenizer: TokenizerLike) -> int:
    """Bytes of text that one token stands for at most."""
    return max((len(bytes_of(tokenizer, token)) for token in range(tokenizer.vocab_size)), default=1) or 1


def surely_longer(tokenizer: TokenizerLike, text: str, tokens: int, longest: Callable[[], int]) -> bool:
    """Whether a text has more tokens than some number, found out by its size, else by the tokens of its beginning.

    False does not say that it has no more.

    Args:
        longest: gives what `longest_token` does; asked of long texts only.
    """
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
