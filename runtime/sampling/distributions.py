"""Distributions of one row of logits: truncation, log-probabilities, and draws keyed by seed and position.

The token of the largest sum of logit over temperature and Gumbel noise is distributed as softmax sampling's. Where a
drafter and its target draw by the same noise, they choose the same token far more often than by one number for both
(Gumbel-max coupling; Daliri et al. 2025, arXiv 2408.07978). Noise is made by a hash, so nothing is remembered.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass

Logits = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

# Sorting a whole vocabulary costs more than all else here, and a nucleus is nearly always inside this many tokens.
_NUCLEUS_GUESS = 256
_UNIT = 2.0**-53  # spacing of the doubles in [1/2, 1): 53 random bits fill a mantissa
_LOWEST = float(np.finfo(np.float32).min)
_COLDEST = 1e-6  # of dynamic temperatures


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities under the model itself, before bias, penalties, mask, temperature and truncation."""

    logprob: float  # of the chosen token
    # The most likely (token id, log-probability) pairs, best first, lower id first on ties.
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Logits, token: int, top: int = 0) -> TokenLogprobs:
    """Log-probabilities of a token and of the `top` most likely ones, from the untouched logits (V,)."""
    best = float(logits[argmax(logits)])
    shifted = logits.astype(np.float64)
    shifted -= best
    normaliser = float(np.log(np.exp(shifted).sum()))
    ids = _largest(logits, top) if top < len(logits) else np.arange(len(logits))
    ids = ids[np.argsort(-shifted[ids], kind="stable")]
    pairs = tuple((int(i), float(shifted[i]) - normaliser) for i in ids)
    return TokenLogprobs(float(shifted[token]) - normaliser, pairs)


def truncated(
    row: Logits, best: int, config: ReplyOptions, ids: Ids, weights: NDArray[np.float64]
) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,)
    """Indices of a row (A,) that survive truncation, and their weights, of which the largest is 1. `best` is the index
    of the largest logit. Overwrites `weights` (A,)."""
    top, dynamic = float(row[best]), config.dynatemp_range > 0
    by_min_p = config.top_p == 1 and config.min_p > 0 and not dynamic
    floor = -math.inf
    if config.top_n_sigma > 0:
        floor = top - config.top_n_sigma * float(row[row > -np.inf].std(dtype=np.float64))
    if 0 < config.top_k < len(row):
        ids = _largest(row, config.top_k)
        ids = ids[row[ids] >= floor]
        weights = row[ids].astype(np.float64)
    elif floor > -math.inf or by_min_p:
        if by_min_p:
            # Nearly all of the vocabulary goes out here, before the exponential; the slack leaves the edge to min-p.
            slack = 1e-3 + 1e-6 * abs(top)
            floor = max(floor, top + config.temperature * math.log(config.min_p) - slack)
        ids = np.flatnonzero(row >= np.float32(max(floor, _LOWEST)))
        weights = row[ids].astype(np.float64)
    else:
        np.copyto(weights, row)
    # The best value leaves before dividing, so that no temperature, however small, overflows.
    weights -= top
    temperature = _dynamic_temperature(weights, config) if dynamic else config.temperature
    plain = weights.copy() if config.xtc_probability > 0 else weights
    with np.errstate(over="ignore"):  # an overflow to -inf is a weight of 0
        weights /= temperature
    np.exp(weights, out=weights)
    if config.top_p < 1:
        keep = _nucleus(weights, config.top_p)
        ids, weights, plain = ids[keep], weights[keep], plain[keep]
    if config.min_p > 0:
        likely = weights >= config.min_p  # the best weight is 1
        ids, weights, plain = ids[likely], weights[likely], plain[likely]
    return _without_top_choices(ids, plain, temperature, config) if config.xtc_probability > 0 else (ids, weights)


def _dynamic_temperature(logits: NDArray[np.float64], config: ReplyOptions) -> float:  # (S,), the largest is 0
    """llama.cpp's dynamic temperature: from temperature - range, where one token is certain, to temperature + range,
    where all are as likely, by the entropy's share of the largest one there is."""
    logits = logits[logits > -np.inf]
    if len(logits) == 1:
        return config.temperature
    weights = np.exp(logits)
    total = float(weights.sum())
    entropy = math.log(total) - float((weights * logits).sum()) / total
    share = min(max(entropy / math.log(len(logits)), 0.0), 1.0)
    low, high = max(config.temperature - config.dynatemp_range, 0.0), config.temperature + config.dynatemp_range
    return max(low + (high - low) * math.pow(share, config.dynatemp_exponent), _COLDEST)


def _without_top_choices(
    ids: Ids, logits: NDArray[np.float64], temperature: float, config: ReplyOptions
) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,) -> (S,), (S,)
    """llama.cpp's XTC: with a chance, all tokens are excluded whose probability before temperature reaches the
    threshold, but the least likely of them. These are the weights of what is drawn with that chance and without it
    together, so that a position has one distribution, whoever asks for it."""
    weights = np.exp(logits)
    above = np.flatnonzero((weights >= config.xtc_threshold * weights.sum()) & (weights > 0))
    with np.errstate(over="ignore", divide="ignore"):
        scores = logits / temperature
        if len(above) > 1:
            gone = np.zeros(len(ids), np.bool_)
            gone[above] = True
            gone[above[weights[above].argmin()]] = False
            rest = _log_sum(scores[~gone])
            total = np.logaddexp(rest, _log_sum(scores[gone]))
            kept = np.log1p(-config.xtc_probability) - total
            scores += np.where(gone, kept, np.logaddexp(kept, math.log(config.xtc_probability) - rest))
            scores -= scores.max()
    weights = np.exp(scores)
    left = weights > 0
    return ids[left], weights[left]


def _log_sum(values: NDArray[np.float64]) -> float:  # (S,)
    most = float(values.max())
    return most + math.log(float(np.exp(values - most).sum()))


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The number in [0, 1) of this seed, position and stream, each in [0, 2**64). A counter-based generator: nothing is
    remembered, so the number is the same on every platform and whatever was drawn before. That is why sampled text does
    not depend on speculation."""
    from numpy.random import Philox  # which replies without draws do not wait for

    bits: int = Philox(counter=position, key=seed | stream << 64).random_raw()
    return (bits >> 11) * _UNIT


def draw_from(probabilities: NDArray[np.float64], draw: float) -> int:
    """Draw a token from probabilities or weights (V,) in order of id by a number in [0, 1); never an impossible one."""
    cumulative = np.cumsum(probabilities)
    # The largest double below 1 takes more than half a rounding off any sum: some token always lies beyond the product.
    return int(cumulative.searchsorted(draw * cumulative[-1], side="right"))


def argmax(row: Logits) -> int:
    """Index of the largest logit, the lowest on ties, having checked that the row is usable."""
    best = int(row.argmax())
    # argmax counts NaN as largest, so this one look finds NaN anywhere in the row.
    if not np.isfinite(row[best]):
        raise BackendError(
            f"No token can be chosen: the largest logit is {row[best]}.",
            "The model's weights or its export are broken: export it again.",
        )
    return best


def _largest(row: NDArray[Any], count: int) -> Ids:
    """Ascending indices of the `count` largest values, count < len(row); lower indices win ties at the edge."""
    if count == 0:
        return np.empty(0, np.int64)
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    surplus = len(ids) - count
    if surplus:
        tied = np.flatnonzero(row[ids] == edge)
        ids = np.delete(ids, tied[len(tied) - surplus :])
    return ids


def _nucleus(weights: NDArray[np.float64], mass: float) -> Ids:
    """Ascending indices of the smallest set of largest weights whose share of the total reaches `mass`."""
    wanted = mass * weights.sum()
    size = _NUCLEUS_GUESS
    while True:
        some = _largest(weights, size) if size < len(weights) else np.arange(len(weights))
        order = some[np.argsort(-weights[some], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted or len(some) == len(weights):
            return np.sort(order[: int(reached.searchsorted(wanted)) + 1])
        size *= 8


# Tokens of the largest noise that are looked at first. Of 32 to 512, all are as fast at 4 thousand and 152 thousand.
_LOUD = 128
_BITS = 32
_NOISE_UNIT = 2.0**-_BITS * (1 - 2.0**-52)  # which rounding lifts no number to 1 by
# Odd factors of well-known mixers: of 32 bits Wellons' "lowbias32", of 64 bits Vigna's "splitmix64".
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_STEP, _THIRD, _FOURTH = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD, _LOW_WORD = 2**64 - 1, 2**32 - 1

_Words = NDArray[np.uint32]


class GumbelNoise:
    """The noise of one seed in [0, 2**64) for token ids below `vocab_size`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = _mixed(seed)
        self._tokens = _token_words(vocab_size)
        self._high, self._spare = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.uint32)

    def of(self, ids: Ids, position: int) -> NDArray[np.float64]:  # (S,) -> (S,)
        """The noise of some tokens at a position in [0, 2**64), by 64 random bits each."""
        words, keys = self._tokens[ids], self._keys(position)
        high, low = (_hashed(words, two, np.empty_like(words), np.empty_like(words)) for two in (keys[:2], keys[2:]))
        uniform = (high + (low + 0.5) * 2.0**-_BITS) * _NOISE_UNIT
        noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
        return noise

    def draw(self, row: Logits, best: int, temperature: float, position: int, ids: Ids | None = None) -> int:  # (A,)
        """Draw the index of a token from the softmax of a row (A,) at a temperature above 0; `ids` are its tokens, None
        all. Tokens of large noise are tried first. Others have less noise, so only those of large logits can still win,
        and no exponential of the whole vocabulary is needed."""
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
    word = (word + _STEP) & _WORD
    word = ((word ^ word >> 30) * _THIRD) & _WORD
    word = ((word ^ word >> 27) * _FOURTH) & _WORD
    return word ^ word >> 31
