"""The base of searches: their build arguments, counted passes, and falling back to plain decoding. Between two of a
search's answers the rows of the cache are those of the reply alone, each computed in a pass of the reply's own text, so
that the next turn rests on the same bits as without."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import CapabilityError, Setting, UsageError
from edgeinfer.core.methods import DeclaredMethod, find_method, product_methods
from edgeinfer.core.options.reply import GenerationConfig
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import SearchedText, SearchUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, Pass, PassCancelledError, PreemptedError
from edgeinfer.runtime.backends.forks import can_fork, copied_bytes
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, SearchStatistics
from edgeinfer.runtime.layer_skip.strategy import SmallModel
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.sampling.thinking import ThinkingBudget
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.streaming import ReplyText

# Rows of logits that a pass gives at most, as many as drafts of the usual length take.
MOST_ROWS = 16
_SEEDS = 2**64


@dataclass(frozen=True)
class SearchParts:
    """Holds what a search is made of."""

    backend: Backend
    sampler: Sampler  # of the reply's tokens
    config: GenerationConfig
    stop_ids: frozenset[int]  # that end the reply
    tokenizer: TokenizerLike
    cancelled: Callable[[], bool]  # whether the reply was cancelled
    fed: Callable[[], Sequence[int]]  # tokens of the text that the cache held when the strategy was last asked for some
    chunk: int  # tokens of a pass at most where a text is evaluated again
    continues: bool  # the reply goes on with the prompt's text, as `generation.TokenStream` has it
    spare_bytes: int | None = None  # that copies of rows may take; None is any
    # Gives the tokens of the same chat with another last message of the user; None where there is no chat.
    rephrased: Callable[[str], list[int]] | None = None
    small: Callable[[], SmallModel] | None = None  # gives the draft model, or raises a UsageError where there is none

    def another_sampler(self, prompt: Sequence[int], index: int) -> Sampler:
        """Make the sampler of one of several replies, with the seed that follows the reply's own by its index."""
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
    """Runs passes over one text at a time, and counts them."""

    def __init__(self, parts: SearchParts, statistics: SearchStatistics) -> None:
        self.parts, self.statistics = parts, statistics
        self._backend = parts.backend
        self._fed: list[int] = []

    def feed(self, token: int) -> Floats:  # (V,)
        """The logits behind one more token; a view that the next pass overwrites."""
        return next(self.chain([token]))

    def chain(self, tokens: Sequence[int]) -> Iterator[Floats]:  # of (V,)
        """The logits behind each of these tokens; views that the next pass overwrites. They are fed a few at a time, as
        they are asked for."""
        for begin in range(0, len(tokens), MOST_ROWS):
            part = tokens[begin : begin + MOST_ROWS]
            yield from self._feed(part, np.arange(len(part)))

    def feed_again(self, text: Sequence[int]) -> None:
        """Evaluate a text again in an empty cache, whose pages older replies needed, as soon as there are some."""
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
        output = self._backend.forward(Pass(tokens, places, rows))
        self.statistics.passes += 1
        self.statistics.rows += len(tokens)
        return output.logits

    def check(self) -> None:
        """Ends the reply where it was cancelled between two passes."""
        if self.parts.cancelled():
            raise PassCancelledError("The reply was cancelled between two passes.")


class SearchStrategy(DecodingStrategy):
    """Does what all searches share; where the context has no room for several texts, they go on plainly."""

    lossless: ClassVar[bool] = False  # as `SearchUse` has it
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
        """Drop the rows of what was looked at."""
        if self._reply_rows is not None:
            self._backend.cache.trim(min(self._reply_rows, self._backend.cache.length))
            self._reply_rows = None

    def search_use(self) -> SearchUse:
        counts = dataclasses.asdict(self._statistics)
        return SearchUse(self._config.search, self.lossless, **counts, chosen=self._chosen, texts=self._texts)

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


@dataclass(frozen=True, kw_only=True)
class SearchMethod(DeclaredMethod):
    """A search as its file declares it, and what it goes together with."""

    make: Callable[[SearchParts], SearchStrategy]
    # "always" where it is of no use without sampling, "never" where it chooses by rules of its own, which leave no
    # place for the options of sampling, else "either".
    draws: Literal["always", "never", "either"]
    branches: bool = True  # whether it looks at several continuations
    rereads: bool = False  # whether it reads the text again, of which the cache then has to hold every row
    constrained: bool = False  # whether it follows a grammar or a list of choices
    checked: bool = False  # whether it follows a checker
    thinks: bool = False  # whether a limit on thoughts holds in all that it looks at
    shares: bool = True  # whether its passes can be shared with other replies


def search_method(name: str) -> SearchMethod:
    """The declaration of a search; UsageError where there is none."""
    return cast(SearchMethod, find_method("searches", name))


def _product() -> Iterable[SearchMethod]:
    return cast("Iterable[SearchMethod]", product_methods("searches").values())


def make_search(parts: SearchParts, *, forgets: bool) -> SearchStrategy:
    """Make the search that the options ask for."""
    name = parts.config.search
    kind = search_method(name)
    _check_sampling(kind, parts.config)
    if parts.config.thinking_budget is not None:
        if not kind.thinks:
            message = f"search={name!r} cannot limit thoughts."
            raise UsageError(message, "Leave out " + Setting("thinking_budget") + ", or search in another way.")
    elif parts.sampler.constrained and not kind.constrained:
        others = ", ".join(other.name for other in _product() if other.constrained)
        message = f"search={name!r} cannot follow a grammar, schema or list of choices."
        raise UsageError(message, f"Leave that out, or search by one of {others}.")
    if parts.sampler.checked and not kind.checked:
        raise UsageError(f"search={name!r} cannot follow a checker.", "Leave one of them out.")
    if (kind.branches or kind.rereads) and forgets:
        message = f"search={name!r} needs a context that forgets nothing."
        raise UsageError(message, "Load the model with " + Setting("overflow", "stop") + ".")
    if kind.branches and not can_fork(parts.backend):
        message = f"The {parts.backend.name} backend cannot copy what search={name!r} goes on from in several ways."
        others = " or ".join(other.name for other in _product() if not other.branches)
        raise CapabilityError(message, f"Export the checkpoint to ONNX, or search by {others}.")
    return kind.make(parts)


def _check_sampling(kind: SearchMethod, config: GenerationConfig) -> None:
    name = kind.name
    if kind.draws == "always" and config.greedy:
        message = f"search={name!r} draws tokens at random, which needs sampling."
        raise UsageError(
            message,
            "Set "
            + Setting("temperature", 0.7)
            + " or another value above 0, and leave out "
            + Setting("top_k", 1)
            + ".",
        )
    plain = GenerationConfig()
    options = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
    asked = [option for option in options if getattr(config, option) != getattr(plain, option)]
    asked = ["logit_bias (or steering)" if option == "logit_bias" else option for option in asked]
    if kind.draws == "never" and asked:
        message = f"search={name!r} chooses tokens by a rule of its own, without {' and '.join(asked)}."
        raise UsageError(message, "Leave that out.")


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
