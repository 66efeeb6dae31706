"""RAPID (Chen et al. 2025, arXiv 2502.20330): drafts for a long text by a short one, retrieved from it.

The draft model reads the passages of the text that have most to do with its end, and the end, so that drafting stays
cheap however long the text is. The target verifies by the whole text, so that the reply is its own: the paper's setting
without a margin. Passages are found by BM25 (Robertson and Zaragoza 2009) over token ids, where the paper asks an
embedding model.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import DrafterMethod
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter

# Tokens of a passage, passages that are retrieved, and tokens of the end, which asks for them. The paper retrieves
# sixteen passages of 512 tokens from 128,000; these are for texts of some thousand.
_PASSAGE, _MOST, _END = 64, 8, 128
# The usual constants of BM25: how soon further occurrences of a term count for less, and how much length does.
_SATURATION, _LENGTH = 1.2, 0.75


def bm25(query: Sequence[int], passages: Sequence[Sequence[int]]) -> list[float]:
    """How much each passage has to do with a query, terms being token ids."""
    counts = [Counter(passage) for passage in passages]
    mean = sum(map(len, passages)) / len(passages)
    scores = [0.0] * len(passages)
    for term in set(query):
        holding = sum(term in count for count in counts)
        rarity = math.log(1 + (len(passages) - holding + 0.5) / (holding + 0.5))
        for index, count in enumerate(counts):
            length = 1 - _LENGTH + _LENGTH * len(passages[index]) / mean
            scores[index] += rarity * count[term] * (_SATURATION + 1) / (count[term] + _SATURATION * length)
    return scores


def _longest() -> int:
    """Tokens of a short text at most."""
    return (1 + _MOST) * _PASSAGE + _END


def retrieved(text: Sequence[int]) -> list[int]:
    """A text's first passage, the passages that have most to do with its end, in their order, and its end. A text that
    is no longer than that stays whole."""
    if len(text) <= _longest():
        return list(text)
    body, end = text[:-_END], text[-_END:]
    passages = [body[start : start + _PASSAGE] for start in range(0, len(body), _PASSAGE)]
    scores = bm25(end, passages)
    # The first one says what kind of text it is, and has the tokens that every text begins with.
    best = sorted(range(1, len(passages)), key=lambda index: -scores[index])[:_MOST]
    return [*(token for index in (0, *sorted(best)) for token in passages[index]), *end]


class RapidDrafter(ModelDrafter):
    """Guesses what the draft model says behind a short text that is retrieved once for each reply."""

    name = "rapid"

    _short: list[int] | None = None
    _seen = 0  # tokens of the text that the short one has, or was retrieved from

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._short = None

    def unread(self, context: DraftContext) -> int:
        """Before the first guess of a reply all of a short text, which is retrieved only then."""
        if self._short is not None:
            return super().unread(self._shortened(context))
        # A text that stays whole has a beginning that the model may have read.
        return super().unread(context) if len(context.tokens) <= _longest() else _longest() - 1

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        return super()._logits(self._shortened(context), drafted)

    def _shortened(self, context: DraftContext) -> DraftContext:
        """Give a context with the short text, retrieved if there is none yet."""
        if self._short is None:
            self._short = retrieved(context.tokens)
        else:
            self._short += context.tokens[self._seen :]
        self._seen = len(context.tokens)
        return dataclasses.replace(context, tokens=self._short)


METHOD = DrafterMethod(
    name="rapid",
    help="the draft model behind a short text retrieved from a long one (RAPID)",
    make=lambda parts: RapidDrafter(*parts.require_model(), parts.chunk, parts.target.geometry.vocab_size),
    in_auto=lambda parts: False,
    runs="model",
)
