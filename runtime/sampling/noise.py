"""Gumbel noise that belongs to a seed, a position and a token, and draws by it from logits, whoever has them.

The token of the largest sum of logit over temperature and Gumbel noise is distributed as softmax sampling's. Where a
drafter and its target draw by the same noise, they choose the same token far more often than by one number for both
(Gumbel-max coupling; Daliri et al. 2025, arXiv 2408.07978). Noise is made by a hash, so nothing is remembered.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.sampling.distributions import Ids, Logits

# Tokens of the largest noise that are looked at first. Of 32 to 512, all are as fast at 4 thousand and 152 thousand.
_LOUD = 128
_BITS = 32
_UNIT = 2.0**-_BITS * (1 - 2.0**-52)  # which rounding lifts no number to 1 by
_LOWEST = float(np.finfo(np.float32).min)
# Odd factors of well-known mixers: of 32 bits Wellons' "lowbias32", of 64 bits Vigna's "splitmix64".
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_STEP, _THIRD, _FOURTH = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD, _LOW_WORD = 2**64 - 1, 2**32 - 1

_Words = NDArray[np.uint32]


class GumbelNoise:
    """The noise of one seed.

    Args:
        seed: in [0, 2**64).
        vocab_size: V; token ids lie in [0, V).
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = _mixed(seed)
        self._tokens = _token_words(vocab_size)
        self._high, self._spare = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.uint32)

    def of(self, ids: Ids, position: int) -> NDArray[np.float64]:  # (S,) -> (S,)
        """The noise of some tokens at a position in [0, 2**64), by 64 random bits each."""
        words, keys = self._tokens[ids], self._keys(position)
        high, low = (_hashed(words, two, np.empty_like(words), np.empty_like(words)) for two in (keys[:2], keys[2:]))
        uniform = (high + (low + 0.5) * 2.0**-_BITS) * _UNIT
        noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
        return noise

    def draw(self, row: Logits, best: int, temperature: float, position: int, ids: Ids | None = None) -> int:  # (A,)
        """The index in a row of logits of the token drawn from their softmax at this temperature.

        Tokens of large noise are tried first. Of the others it is known that their noise is smaller, so only those of
        large logits can still win, and no exponential of the whole vocabulary is needed.

        Args:
            temperature: above 0.
            position: absolute position of the token, in [0, 2**64).
            ids: of the tokens of the row; None is all in order. (A,)
        """
        size, words = len(row), self._tokens if ids is None else self._tokens[ids]
        # Noise is the larger, the smaller these are.
        high = _hashed(words, self._keys(position)[:2], self._high[:size], self._spare[:size])
        edge = min(_LOUD * 2**_BITS // size, 2**_BITS) - 1
        loud = np.flatnonzero(high <= np.uint32(edge))
        tried = np.append(loud, best)
        top = float(row[best])

        def chosen(some: Ids) -> tuple[float, int]:
            with np.errstate(over="ignore"):  # an overflow to -inf is a token that never wins
                scores = (row[some].astype(np.float64) - top) / temperature
            scores += self.of(some if ids is None else ids[some], position)
            first = int(scores.argmax())
            return float(scores[first]), int(some[first])

        won, index = chosen(tried)
        if edge == 2**_BITS - 1:
            return index
        quiet = -math.log(-math.log1p(-(edge + 1) * 2.0**-_BITS))  # no other token has more noise
        floor = top + temperature * (won - quiet)
        likely = np.flatnonzero(row >= np.float32(max(floor - 1e-6 * (1 + abs(floor)), _LOWEST)))
        return max((won, index), chosen(likely))[1] if len(likely) else index

    def _keys(self, position: int) -> tuple[np.uint32, ...]:
        """What the words of tokens are hashed with at a position: two keys for the high bits, two for the low ones."""
        high = _mixed(self._seed ^ _mixed(position))
        low = _mixed(high)
        # Factors must be odd.
        return tuple(np.uint32(word) for key in (high, low) for word in (key >> _BITS, key & _LOW_WORD | 1))


@lru_cache(maxsize=2)
def _token_words(vocab_size: int) -> _Words:  # (V,)
    """A different word of 32 bits for every token."""
    words = np.arange(vocab_size, dtype=np.uint32)
    for factor, shift in ((_FIRST, 16), (_SECOND, 15)):
        words ^= words >> np.uint32(shift)
        words *= factor
    words ^= words >> np.uint32(16)
    words.flags.writeable = False
    return words


def _hashed(words: _Words, keys: tuple[np.uint32, ...], out: _Words, spare: _Words) -> _Words:  # (S,) -> (S,)
    """Words hashed with two keys, the second of them odd; different ones stay different."""
    key, factor = keys
    np.bitwise_xor(words, key, out=out)
    np.multiply(out, factor, out=out)
    np.right_shift(out, np.uint32(15), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, _SECOND, out=out)
    np.right_shift(out, np.uint32(16), out=spare)
    np.bitwise_xor(out, spare, out=out)
    return out


def _mixed(word: int) -> int:
    """A step of splitmix64."""
    word = (word + _STEP) & _WORD
    word = ((word ^ word >> 30) * _THIRD) & _WORD
    word = ((word ^ word >> 27) * _FOURTH) & _WORD
    return word ^ word >> 31
