"""The base of searches: their build arguments, counted passes, and falling back to plain decoding.

Between two of a search's answers the rows of the cache are those of the reply alone, each computed in a pass of the
reply's own text, so that the next turn rests on the same bits as without.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import Setting, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, PassCancelledError, PreemptedError
from edgeinfer.runtime.backends.forks import copied_bytes
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, SearchStatistics
from edgeinfer.runtime.layer_skip.contract import SmallModel
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.sampling.thinking import ThinkingBudget
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.streaming import ReplyText
from edgeinfer.searching import SearchedText, SearchUse

# Rows of logits that a pass gives at most, as many as drafts of the usual length take.
MOST_ROWS = 16
_SEEDS = 2**64


@dataclass(frozen=True)
class SearchParts:
    """Holds what a search is made of.

    Attributes:
        sampler: of the reply's tokens.
        stop_ids: that end the reply.
        cancelled: whether the reply was cancelled.
        fed: tokens of the text that the cache held when the strategy was last asked for some.
        chunk: tokens of a pass at most where a text is evaluated again.
        continues: the reply goes on with the prompt's text, as `generation.TokenStream` has it.
        uncertainty: entropy in nats above which the next token is uncertain.
        spare_bytes: that copies of rows may take; None is any.
        lame: tokens of the worse prompt; empty where the option's text is it.
        anchor: gives the model that anchors the reply, or raises a UsageError where there is none.
    """

    backend: Backend
    sampler: Sampler
    config: GenerationConfig
    stop_ids: frozenset[int]
    tokenizer: TokenizerLike
    cancelled: Callable[[], bool]
    fed: Callable[[], Sequence[int]]
    chunk: int
    continues: bool
    uncertainty: float
    spare_bytes: int | None = None
    lame: tuple[int, ...] = ()
    anchor: Callable[[], SmallModel] | None = None

    def another_sampler(self, prompt: Sequence[int], index: int) -> Sampler:
        """Makes the sampler of one of several replies, with the seed that follows the reply's own by its index."""
        processor = LogitsProcessor(self.config, self.backend.geometry.vocab_size, (self.sampler.seed + index) % _SEEDS)
        budget = self.config.thinking_budget
        return Sampler(processor, prompt, None if budget is None else ThinkingBudget(self.tokenizer, budget, prompt))

    def room(self, copied: int = 0) -> tuple[int, str]:
        """Rows that texts side by side may take behind the reply's, and the option that bounds them."""
        free, row = self.backend.cache.capacity - self.backend.cache.length, copied_bytes(self.backend, 1)
        if self.spare_bytes is None or row == 0:
            return free, "context"
        spare = max(self.spare_bytes // row - copied, 0)
        return (free, "context") if free <= spare else (spare, "memory")

    def reply_text(self, prompt: Sequence[int]) -> ReplyText:
        """The text of one of several replies."""
        context_ids = prompt if self.continues else ()
        return ReplyText(self.tokenizer, self.config.stop, self.stop_ids, context_ids)


class Passes:
    """Runs passes over one text at a time, and counts them.

    Args:
        parts: of the search.
        statistics: counts passes, rows and branches.

    Attributes:
        parts, statistics: the same.
    """

    def __init__(self, parts: SearchParts, statistics: SearchStatistics) -> None:
        self.parts, self.statistics = parts, statistics
        self._backend = parts.backend
        self._fed: list[int] = []

    def feed(self, token: int) -> Floats:  # (V,)
        """The logits behind one more token; a view that the next pass overwrites."""
        return next(self.chain([token]))

    def chain(self, tokens: Sequence[int]) -> Iterator[Floats]:  # of (V,)
        """The logits behind each of these tokens; views that the next pass overwrites.

        They are fed a few at a time, as they are asked for.
        """
        for begin in range(0, len(tokens), MOST_ROWS):
            part = tokens[begin : begin + MOST_ROWS]
            yield from self._feed(part, np.arange(len(part)))

    def feed_again(self, text: Sequence[int]) -> None:
        """Evaluates a text again in an empty cache, whose pages older replies needed, as soon as there are some."""
        while self._backend.cache.length < len(text):
            try:
                start = self._backend.cache.length
                part = np.array(text[start : start + self.parts.chunk], np.int64)
                self._forward(part, np.zeros(0, np.int64))
            except PreemptedError:
                self._backend.cache.clear()

    def text(self) -> list[int]:
        """The tokens that the cache holds rows of."""
        known = self.parts.fed()
        since = self._backend.cache.length - len(known)
        return [*known, *self._fed[len(self._fed) - since :]]

    def _feed(self, part: Sequence[int], rows: Ints) -> Floats:  # (R,) -> (R, V)
        while True:
            try:
                logits = self._forward(np.array(part, np.int64), rows)
                self._fed += part
                return logits
            except PreemptedError:
                text = self.text()
                self._backend.cache.clear()
                self.feed_again(text)

    def _forward(self, tokens: Ints, rows: Ints) -> Floats:  # (S,), (R,) -> (R, V)
        self.check()
        places = np.arange(len(tokens)) + self._backend.cache.length
        output = self._backend.forward(ForwardInput(tokens, places, rows))
        self.statistics.passes += 1
        self.statistics.rows += len(tokens)
        return output.logits

    def check(self) -> None:
        """Ends the reply where it was cancelled between two passes."""
        if self.parts.cancelled():
            raise PassCancelledError("The reply was cancelled between two passes.")


class SearchStrategy(DecodingStrategy):
    """Does what all searches share; where the context has no room for several texts, they go on plainly.

    Attributes:
        lossless: as `SearchUse` has it.
    """

    lossless: ClassVar[bool] = False
    searches = True

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts.backend, parts.sampler)
        self._parts, self._config = parts, parts.config
        self._statistics = SearchStatistics()
        self._passes = Passes(parts, self._statistics)
        self._reply_rows: int | None = None  # rows of the cache that are the reply's, while others are behind them
        self._chosen = 0
        self._texts: tuple[SearchedText, ...] = ()

    @abstractmethod
    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """See `DecodingStrategy`."""

    def leave(self) -> None:
        """Drops the rows of what was looked at."""
        if self._reply_rows is not None:
            self._backend.cache.trim(min(self._reply_rows, self._backend.cache.length))
            self._reply_rows = None

    def search_use(self) -> SearchUse:
        """What was done so far."""
        statistics = self._statistics
        return SearchUse(
            search=self._config.search,
            lossless=self.lossless,
            passes=statistics.passes,
            rows=statistics.rows,
            branches=statistics.branches,
            trials=statistics.trials,
            chosen=self._chosen,
            texts=self._texts,
        )

    def _forward(self, token: int) -> Floats:  # (V,)
        return self._passes.feed(token)

    def _take(self, tokens: Sequence[int], logits: Floats) -> Sequence[int]:  # (V,)
        """The tokens join the reply, and all but the last the cache, by passes of the reply's own text."""
        for token in tokens[:1]:
            self._accept(token, logits)
        for token, row in zip(tokens[1:], self._passes.chain(tokens[:-1]), strict=True):
            self._accept(token, row)
        return tokens

    def _share(self, count: int, room: int) -> int:
        """Tokens that each of `count` replies side by side may have."""
        rows, limit = self._parts.room()
        free, larger = rows // count, "load the model with a larger " + Setting(limit) + "."
        if self._config.max_tokens is not None and free < room:
            message = (
                f"{count} replies of {room} tokens do not fit the {limit}, which has room for {free} tokens of each."
            )
            raise UsageError(message, f"Ask for fewer or shorter ones, or {larger}")
        if free == 0:
            message = f"The {limit} has no room for {count} replies side by side."
            raise UsageError(message, f"Shorten the prompt, or {larger}")
        return min(free, room)

    def _tell(self, prompt: Sequence[int], ranked: Iterable[tuple[Sequence[int], float]]) -> None:
        """Has the result tell of these replies: tokens and score of each, the best first."""
        self._texts = tuple(self._searched_text(self._text_of(prompt, tokens), score) for tokens, score in ranked)

    def _text_of(self, prompt: Sequence[int], tokens: Sequence[int]) -> ReplyText:
        """The text of a reply that has these tokens so far."""
        text = self._parts.reply_text(prompt)
        for token in tokens:
            text.push(token)
        return text

    @staticmethod
    def _searched_text(reply: ReplyText, score: float) -> SearchedText:
        """A reply that was looked at to the end."""
        reply.finish()
        reason = "stop" if reply.ended else "length"
        return SearchedText(reply.text, tuple(reply.tokens), score / len(reply.tokens), reason)


def asked_score(scorer: Callable[[str, bool], float], text: str, ended: bool) -> float:
    """What a caller's scorer says of a text."""
    try:
        score = float(scorer(text, ended))
    except Exception as error:
        message = f"The scorer failed on a text of {len(text)} characters: {type(error).__name__}: {error}"
        raise UsageError(message, "It is called with the text so far and whether that is all.") from error
    if math.isnan(score) or score == math.inf:
        raise UsageError(f"The scorer gave {score}.", "Return a number, or -inf for what is never to be chosen.")
    return score


def log_probabilities(logits: Floats) -> NDArray[np.float64]:  # (V,) -> (V,)
    """Natural log-probabilities of all tokens."""
    shifted = logits.astype(np.float64) - float(logits.max())
    normalised: NDArray[np.float64] = shifted - math.log(float(np.exp(shifted).sum()))
    return normalised


def logprob(logits: Floats, token: int) -> float:  # (V,)
    """Natural log-probability of one token."""
    best = logits.max()
    return float(logits[token] - best) - math.log(float(np.exp(logits - best).sum(dtype=np.float64)))


def entropy(probabilities: NDArray[np.float64]) -> float:  # (V,)
    """Entropy of a distribution, in nats."""
    likely = probabilities[probabilities > 0]
    return float(-(likely * np.log(likely)).sum())


def likeliest(row: NDArray[np.floating], count: int) -> Ints:  # (V,) -> (count,)
    """The tokens of the largest values, best first, lower ids first on ties."""
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    order: Ints = ids[np.argsort(-row[ids], kind="stable")][:count]
    return order
