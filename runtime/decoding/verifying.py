"""One round for a drafter elsewhere: a pass over its draft, and the tokens that plain decoding makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.backends.contract import PassCancelledError, RotatingBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.sampling import Sampler

__all__ = ["verify"]


def verify(
    engine: Engine, text: Sequence[int], draft: Sequence[int], sampler: Sampler, stop_ids: frozenset[int]
) -> list[int]:
    """Evaluates a draft behind a text in one pass, and gives the tokens that plain decoding makes there: those of the
    draft that agree, and one further, which is the first that does not or comes behind the last; the sampler accepts
    them.

    Where a pass of several rows rounds otherwise than passes of one row, and where the draft could reach the border
    behind which a text is rotated otherwise, the draft is not looked at.

    Args:
        engine: whose cache keeps what is sure of the text afterwards, and which has checked both.
        draft: token ids, possibly none, for which the context has room.
        stop_ids: behind the first of these nothing follows.

    Returns:
        One to `1 + len(draft)` tokens; none where the round was cancelled.
    """
    rotates = isinstance(engine.backend, RotatingBackend) and engine.backend.rotation_border is not None
    if rotates or not engine.backend.capabilities.paged:
        draft = ()
    if not engine.prepare(text, len(text)):
        return []
    cache = engine.backend.cache
    cache.hold(cache.length)
    try:
        logits = engine.feed([text[-1], *draft], np.arange(1 + len(draft)))  # (1 + D, V)
    except PassCancelledError:
        return []
    tokens: list[int] = []
    for row, expected in zip(logits, (*draft, None), strict=True):
        token = sampler.sample(row, len(text) + len(tokens))
        sampler.accept(token, row)
        tokens.append(token)
        if token != expected or token in stop_ids:
            break
    engine.truncate(len(text) + len(tokens) - 1)
    return tokens
