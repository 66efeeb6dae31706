"""The base of searches: their build arguments, counted passes, and falling back to plain decoding. Between two of a
search's answers the rows of the cache are those of the reply alone, each computed in a pass of the reply's own text, so
that the next turn rests on the same bits as without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import CapabilityError, Setting, UsageError
from edgeinfer.core.methods import DeclaredMethod, find_method, product_methods
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import SearchedText, SearchUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Pass, PreemptedError
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Strategy
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.sampling.thinking import thought_limit
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of
from edgeinfer.runtime.text.streaming import ReplyText

# Rows of logits that a pass gives at most, as many as drafts of the usual length take.
MOST_ROWS = 16
_SEEDS = 2**64
_ONE_ROW, _NO_ROWS = np.zeros(1, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True)
class SearchParts:
    """Holds what a search is made of."""

    sequence: decoding.Sequence  # the reply's
    sampler: Sampler  # of its tokens
    config: ReplyOptions
    stop_ids: frozenset[int]  # that end the reply
    tokenizer: TokenizerLike
    continues: bool  # the reply goes on with the prompt's text, as `generation.TokenStream` has it
    spare_bytes: int | None = None  # that copies of rows may take; None is any

    def another_sampler(self, prompt: Sequence[int], index: int) -> Sampler:
        """Make the sampler of one of several replies, with the seed that follows the reply's own by its index."""
        vocabulary = self.sequence.backend.geometry.vocab_size
        seed, pieces = (self.sampler.seed + index) % _SEEDS, partial(bytes_of, self.tokenizer)
        processor = LogitsProcessor(self.config, vocabulary, seed, pieces)
        budget, tokenizer = self.config.thinking_budget, self.tokenizer
        return Sampler(processor, prompt, None if budget is None else thought_limit(tokenizer, budget, prompt))

    def room(self) -> tuple[int, str]:
        """Rows that texts side by side may take behind the reply's, and the option that bounds them."""
        cache = self.sequence.cache
        free, row = cache.capacity - cache.length, self.sequence.backend.fork_bytes(cache, 1)
        if self.spare_bytes is None or row == 0:
            return free, "context"
        spare = self.spare_bytes // row
        return (free, "context") if free <= spare else (spare, "memory")

    def reply_text(self, prompt: Sequence[int]) -> ReplyText:
        """The text of one of several replies."""
        context_ids = prompt if self.continues else ()
        return ReplyText(self.tokenizer, self.config.stop, self.stop_ids, context_ids)


class Feeder:
    """Runs passes over the reply's text, and counts them."""

    def __init__(self, parts: SearchParts, use: SearchUse) -> None:
        self.parts, self.use = parts, use
        self._backend, self._cache = parts.sequence.backend, parts.sequence.cache
        self._fed: list[int] = []

    def feed(self, token: int) -> Passes[Floats]:  # (V,)
        """The logits behind one more token; a view that the next pass overwrites."""
        logits: Floats = (yield from self._feed([token], _ONE_ROW))[0]
        return logits

    def chain(self, tokens: Sequence[int], see: Callable[[int, Floats], object]) -> Passes[None]:
        """Feed tokens a few at a time, and show `see` each one's index and the logits (V,) behind it, a view."""
        for begin in range(0, len(tokens), MOST_ROWS):
            part = tokens[begin : begin + MOST_ROWS]
            for index, row in enumerate((yield from self._feed(part, np.arange(len(part)))), begin):
                see(index, row)

    def feed_again(self, text: Sequence[int]) -> Passes[None]:
        """Evaluate a text again in an empty cache, whose pages older replies needed, as soon as there are some."""
        while self._cache.length < len(text):
            try:
                start = self._cache.length
                yield from self._forward(text[start : start + self.parts.sequence.chunk], _NO_ROWS)
            except PreemptedError:
                self._cache.clear()

    def text(self) -> list[int]:
        """The tokens that the cache holds rows of."""
        known = self.parts.sequence.tokens
        since = self._cache.length - len(known)
        return [*known, *self._fed[len(self._fed) - since :]] if since > 0 else known[: self._cache.length]

    def _feed(self, part: Sequence[int], rows: Ints) -> Passes[Floats]:  # (R,) -> (R, V)
        while True:
            try:
                logits = yield from self._forward(part, rows)
                self._fed += part
                return logits
            except PreemptedError:
                text = self.text()
                self._cache.clear()
                yield from self.feed_again(text)

    def _forward(self, tokens: Sequence[int], rows: Ints) -> Passes[Floats]:  # (R,) -> (R, V)
        places = np.arange(len(tokens)) + self._cache.length
        batch = Pass(np.array(tokens, np.int64), places, rows)
        (result,) = yield Evaluate(self._backend, ((self._cache, batch),))
        self.use.passes += 1
        self.use.rows += len(tokens)
        return result.logits


class SearchStrategy(Strategy):
    """Does what all searches share; where the context has no room for several texts, they go on plainly."""

    lossless: ClassVar[bool] = False  # as `SearchUse` has it
    searches = True

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts.sequence, parts.sampler)
        self._parts, self._config = parts, parts.config
        self.search: SearchUse = SearchUse(parts.config.search, self.lossless)
        self._feeder = Feeder(parts, self.search)

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """The next token by plain decoding: of most searches, where the context had no room for as much of all texts,
        so that the reply goes on alone."""
        logits = yield from self._feeder.feed(self._root)
        return self._accept(self._sampler.sample(logits, self._cache.length + lost), logits)

    def _take(self, tokens: Sequence[int], logits: Floats) -> Passes[Sequence[int]]:  # (V,)
        """The tokens join the reply, and all but the last the cache, by passes of the reply's own text."""
        for token in tokens[:1]:
            self._accept(token, logits)
        yield from self._feeder.chain(tokens[:-1], lambda index, row: self._accept(tokens[index + 1], row))
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
        self.search.texts = tuple(self._searched_text(self._text_of(prompt, tokens), score) for tokens, score in ranked)

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
    constrained: bool = False  # whether it follows a grammar or a list of choices
    thinks: bool = False  # whether a limit on thoughts holds in all that it looks at


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
    if parts.sampler.checked:
        raise UsageError(f"search={name!r} cannot follow a checker.", "Leave one of them out.")
    if kind.branches and forgets:
        message = f"search={name!r} needs a context that forgets nothing."
        raise UsageError(message, "Load the model with " + Setting("overflow", "stop") + ".")
    if kind.branches and not parts.sequence.backend.can_fork(parts.sequence.cache):
        message = (
            f"The {parts.sequence.backend.name} backend cannot copy what search={name!r} goes on from in several ways."
        )
        others = " or ".join(other.name for other in _product() if not other.branches)
        raise CapabilityError(message, f"Export the checkpoint to ONNX, or search by {others}.")
    return kind.make(parts)


def _check_sampling(kind: SearchMethod, config: ReplyOptions) -> None:
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
    plain = ReplyOptions()
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


def likeliest(row: NDArray[np.floating], count: int) -> Ints:  # (V,) -> (count,)
    """The tokens of the largest values, best first, lower ids first on ties."""
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    order: Ints = ids[np.argsort(-row[ids], kind="stable")][:count]
    return order
