"""Exact extraction: the verbatim span of a passage that the model finds likeliest, found without scoring all of them.

A span's score is the log-probability of its tokens and of an end behind them (exact-extract, arXiv 2108.05857). Every
further token lowers it, so the score of a beginning bounds those of all spans that go on from there: the best
beginnings are fed first, and those that are worse than a whole span need no pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import MOST_ROWS, SearchMethod, SearchParts, SearchStrategy
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

# Spans that a result tells of.
_MOST_LISTED = 8
# Tokens of a span at most.
_LONGEST = 128
# Tokens of a beginning that are fed at once. What comes next in the passage is known, so they cost no pass each.
_STRIDE = 4
_TOGETHER = MOST_ROWS // _STRIDE


def beginnings(passage: str, tokenizer: TokenizerLike, encoder: LiteralEncoder, longest: int) -> list[tuple[int, ...]]:
    """The next so many tokens of a passage from each place on, in order and each text once. A reply that begins with a
    word of the middle may do so without the blank before it, so that is a beginning too."""
    tokens, found = encoder.literal(passage), dict[tuple[int, ...], None]()
    for start, token in enumerate(tokens):
        rest = tokens[start + 1 : start + longest]
        found[token, *rest] = None
        text = bytes_of(tokenizer, token).decode("utf-8", "ignore")
        if text.strip() and text != text.lstrip():
            found[(*encoder.literal(text.lstrip()), *rest)[:longest]] = None
    return list(found)


@dataclass(frozen=True)
class _Span:
    """A span and the end behind it, and their log-probability."""

    tokens: tuple[int, ...]
    score: float


@dataclass(eq=False)
class _Beginning:
    """The spans that begin at one place."""

    tokens: tuple[int, ...]  # of the longest
    bound: float  # log-probability of those that were fed and of the next; no span that ends further on has more
    fed: int = 0  # tokens that have been fed into its branch
    branch: Branch | None = None

    @property
    def over(self) -> bool:
        """Whether none ends further on."""
        return self.fed == len(self.tokens)


class Extract(SearchStrategy):
    """The likeliest span of the passage, of at most 128 tokens or those that the reply may have, and a stop token."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._vocabulary = parts.sequence.backend.geometry.vocab_size
        self._ends: Ints = np.array([token for token in parts.stop_ids if 0 <= token < self._vocabulary], np.int64)
        self._encoder = LiteralEncoder(parts.tokenizer, parts.stop_ids)
        self._found: list[_Span] = []
        self._best = -math.inf  # of their scores

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        longest = min(self._share(1, room) - 1, _LONGEST)
        texts = beginnings(self._config.passage or "", self._parts.tokenizer, self._encoder, longest)
        texts = [tokens for tokens in texts if max(tokens) < self._vocabulary]
        if longest < 1 or not len(self._ends) or not texts:
            message = "A span of " + Setting("passage") + " has no room for a token and an end."
            raise UsageError(message, "Allow more tokens, and give a passage with words.")
        first_logits = logits.copy()
        one = _log_sum(first_logits, None)
        started = [_Beginning(tokens, float(first_logits[tokens[0]]) - one) for tokens in texts]
        self.search.trials = len(started)
        branches = Branches(self._feeder)
        yield from self._search(started, branches)
        branches.end()
        ranked = sorted(self._found, key=lambda span: span.score, reverse=True)[:_MOST_LISTED]
        self._tell(prompt, [(span.tokens, span.score) for span in ranked])
        return (yield from self._take(ranked[0].tokens, first_logits))

    def _search(self, started: Sequence[_Beginning], branches: Branches) -> Passes[None]:
        """Feed beginnings until none can lead to a better span than the best that was found."""
        alone = False
        while open_ := [each for each in started if not each.over and each.bound > self._best]:
            # Where there is no room for several, one is followed to its end before the next begins.
            open_.sort(key=lambda each: (alone and each.branch is not None, each.bound), reverse=True)
            chosen = open_[: 1 if alone else _TOGETHER]
            if branches.room < _STRIDE * len(chosen):
                alone, chosen = True, chosen[:1]
                self._drop([each for each in started if each is not chosen[0]], branches, again=True)
            yield from self._feed(chosen, branches)
            self._drop([each for each in chosen if each.over or each.bound <= self._best], branches)

    def _drop(self, some: Sequence[_Beginning], branches: Branches, *, again: bool = False) -> None:
        """Give the rows of some beginnings back; `again`, what is fed of them later begins at their start."""
        for each in some:
            if each.branch is not None:
                branches.drop(each.branch)
                each.branch, each.fed = None, 0 if again else each.fed

    def _feed(self, chosen: Sequence[_Beginning], branches: Branches) -> Passes[None]:
        """Feed the next tokens of each, and score the spans that end behind them."""
        fed = []
        for each in chosen:
            each.branch = each.branch or branches.begin()
            part = each.tokens[each.fed : each.fed + _STRIDE]
            fed.append((each.branch, part, len(part)))
        for each, rows in zip(chosen, (yield from branches.feed_chains(fed)), strict=True):
            for row in rows:
                each.fed += 1
                self._score(each, row)

    def _score(self, beginning: _Beginning, row: Floats) -> None:  # (V,)
        """Score the span that ends here, and bound those that go on."""
        one = _log_sum(row, None)
        end = int(self._ends[row[self._ends].argmax()])
        score = beginning.bound + _log_sum(row, self._ends) - one
        self._found.append(_Span((*beginning.tokens[: beginning.fed], end), score))
        self._best = max(self._best, score)
        if not beginning.over:
            beginning.bound += float(row[beginning.tokens[beginning.fed]]) - one


def _log_sum(row: Floats, ids: Ints | None) -> float:  # (V,), (A,)
    """Logarithm of the sum of the exponentials, of all or some."""
    some = row if ids is None else row[ids]
    best = float(some.max())
    return best + math.log(float(np.exp(some - np.float32(best)).sum(dtype=np.float64)))


METHODS = (
    SearchMethod(name="extract", help="the likeliest span of --passage, word for word", make=Extract, draws="never"),
)
