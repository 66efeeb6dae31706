"""A caller's own check of texts: tokens are drawn until one passes (AWRS, adaptive weighted rejection sampling).

No set of tokens that may follow is ever made. Tokens are taken in the order in which the keyed noise ranks them, which
is drawing without replacement, and the first whose text passes is the very token that drawing among all those gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.text.contract import TokenizerLike

# What a caller gives: whether a text may still become a reply, or, where it has ended, is one.
Checker = Callable[[str, bool], bool]
Accepts = Callable[[int], bool]

# Tokens of which the text is checked for one place at most, so that a check that refuses all ends the reply.
_MOST_CHECKS = 4096
# Verdicts that are kept: drafted places are judged again when they are accepted.
_KEPT = 4096
# Tokens that are ranked at first; the first few nearly always suffice.
_RANKED = 64
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCheck:
    """What a caller's check says of the tokens that may follow; a stack, as constraints are.

    Args:
        checker: of the caller.
        tokenizer: of the model.
        stop_ids: that end the reply.
    """

    def __init__(self, checker: Checker, tokenizer: TokenizerLike, stop_ids: frozenset[int]) -> None:
        self._verdict = lru_cache(_KEPT)(checker)
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._tokens: list[int] = []

    def push(self, token: int) -> None:
        """Appends one token to the reply."""
        self._tokens.append(token)

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""
        assert 0 <= count <= len(self._tokens), "popping more tokens than were pushed"
        del self._tokens[len(self._tokens) - count :]

    def accepts(self, token: int) -> bool:
        """Whether the text with one more token passes; a character that is not whole yet is left out of it."""
        text = self._tokenizer.decode([*self._tokens, token]).rstrip(_REPLACEMENT)
        try:
            return bool(self._verdict(text, token in self._stop_ids))
        except Exception as error:
            message = f"The checker failed on a text of {len(text)} characters: {type(error).__name__}: {error}"
            raise UsageError(message, "It is called with the text so far and whether that is all.") from error


def first_accepted(scores: NDArray[np.float64], accepts: Accepts) -> int:  # (S,)
    """The index of the largest score that is accepted."""
    for index in islice(_ranked(scores), _MOST_CHECKS):
        if accepts(index):
            return index
    message = f"The checker refuses each of the {min(len(scores), _MOST_CHECKS)} tokens that the reply may go on with."
    raise UsageError(message, "Let it pass every beginning of a text that may still become right.")


@dataclass(frozen=True)
class WeighedDraw:
    """A token, or None where none was accepted, and the estimate of how much probability the accepted ones have.

    Attributes:
        log_weight: logarithm of the estimate, whose mean over draws is that probability.
    """

    index: int | None
    log_weight: float


def weighed_draw(
    logprobs: NDArray[np.float64], scores: NDArray[np.float64], accepts: Accepts
) -> WeighedDraw:  # (S,), (S,)
    """Draws a token as `first_accepted` does, and estimates the probability that is accepted by one check more.

    The recursive estimator of Lipkin et al. (2025, arXiv 2504.05410): a rejected token of probability q among those
    that are left multiplies the estimate by 1 - q; of the accepted one the next token's verdict decides whether 1 or q.
    """
    order, left, log_weight, checks = _ranked(scores), 1.0, 0.0, 0
    following = next(order, None)
    while following is not None and checks < _MOST_CHECKS:
        index, following, checks = following, next(order, None), checks + 1
        probability = math.exp(logprobs[index])
        share = 1.0 if following is None or probability >= left else probability / left
        if accepts(index):
            if share == 1.0:
                return WeighedDraw(index, log_weight)
            assert following is not None, "it is not the last"
            tail = 0.0 if accepts(following) else math.log(share)
            return WeighedDraw(index, log_weight + tail)
        if share == 1.0:
            break
        log_weight += math.log1p(-share)
        left -= probability
    return WeighedDraw(None, -math.inf)


def _ranked(scores: NDArray[np.float64]) -> Iterator[int]:  # (S,)
    """Indices by their scores, the largest first; all are sorted only where more than a few are asked for."""
    few = min(_RANKED, len(scores))
    best = np.argpartition(-scores, few)[:few] if few < len(scores) else np.arange(few)
    yield from best[np.argsort(-scores[best], kind="stable")].tolist()
    if few < len(scores):
        yield from np.argsort(-scores, kind="stable")[few:].tolist()
