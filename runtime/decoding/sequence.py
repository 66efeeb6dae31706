"""One text in a cache, and the strategies that add to it: generators that yield the passes they need."""

from __future__ import annotations

import threading
import time
from collections import abc
from collections.abc import Generator, Iterable
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from edgeinfer.core.errors import BudgetError, CapabilityError, ContextLengthError, PromptError, Setting
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse, RemoteUse, SearchUse, SpeculationUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import (
    Backend,
    KVCache,
    Pass,
    PassCancelledError,
    PassResult,
    check_adapter,
)
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy, Lost
from edgeinfer.runtime.kv_cache.contexts import JoinedContexts
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache, shared_length
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.system.memory import keeping_freed

T = TypeVar("T")


class Evaluate(NamedTuple):
    """What a generator yields: passes over sequences of one backend, whose results it is sent; arrays in these are
    views until it yields again. Without passes, others go first. A draft with `gains` may be cut, then there are fewer
    rows of logits."""

    backend: Backend
    passes: abc.Sequence[tuple[KVCache, Pass]]


# A computation that needs passes: `value = yield from computation`.
Passes: TypeAlias = Generator[Evaluate, "list[PassResult]", T]


def run_alone(work: Passes[T]) -> T:
    """Runs a computation to its end outside of a scheduler, each pass at once."""
    try:
        wanted = next(work)
        while True:
            try:
                results = wanted.backend.forward(wanted.passes) if wanted.passes else []
            except BaseException as error:
                wanted = work.throw(error)
            else:
                wanted = work.send(results)
    except StopIteration as done:
        value: T = done.value
        return value


class Strategy:
    """Decodes one reply: `first` follows the prompt, then `next` until the reply ends; this one is plain decoding.

    The rows of the sequence's cache must be those that the whole model gives to the text's tokens. A strategy that
    leaves some out, or feeds them later, cuts the cache to those that are by the time its generation ends.

    Attributes:
        searches: the cache holds more than the reply while it is decoded, so that the reply cannot be paused.
        pass_ns: of the latest step, nanoseconds of its pass where it was plain; 0 where it was another.
        speculation, compute, search, remote: what the strategy counts, as results have it; complete after `finish`.
    """

    searches = False
    speculation: SpeculationUse | None = None
    compute: ComputeUse | None = None
    search: SearchUse | None = None
    remote: RemoteUse | None = None

    def __init__(self, sequence: Sequence, sampler: Sampler) -> None:
        self._sequence, self._sampler = sequence, sampler
        self._backend, self._cache = sequence.backend, sequence.cache
        self.pass_ns = 0
        self._root = 0  # the reply's last token, which the cache does not hold yet
        self._plain_hidden: Floats | None = None  # of the last plain step; a view until the next pass
        self._tokens_fed, self._position = np.zeros(1, np.int64), np.zeros(1, np.int64)
        step = Pass(self._tokens_fed, self._position, _ONE_ROW)
        self._plain_pass = Evaluate(self._backend, ((self._cache, step),))

    def read(self, batch: Pass) -> Passes[PassResult]:
        """Evaluates a chunk of the prompt by the whole model."""
        (result,) = yield Evaluate(self._backend, ((self._cache, batch),))
        return result

    def first(self, prompt: abc.Sequence[int], logits: Floats, room: int) -> Passes[abc.Sequence[int]]:  # (V,)
        """Start after a prompt that was fed: make 1 to `room` tokens. Called again when a paused reply goes on."""
        yield from ()
        return self._first(prompt, logits)

    def next(self, room: int, lost: int) -> Passes[abc.Sequence[int]]:
        """Make 1 to `room` further tokens, accepted by the sampler; at least the last is not fed yet. The sequence has
        all tokens made before in `tokens`."""
        return self._plain_step(lost)

    def leave(self) -> None:
        """Drops what was fed for the generation alone, which pauses or ends."""

    def finish(self) -> None:
        """Ends the reply: statistics are complete afterwards, and nothing of the request is referred to."""

    def _first(self, prompt: abc.Sequence[int], logits: Floats) -> tuple[int]:  # (V,)
        self.pass_ns = 0
        return self._accept(self._sampler.sample(logits, len(prompt)), logits)

    def _plain_step(self, lost: int = 0) -> Passes[tuple[int]]:
        """Make one token by plain decoding: forward one row, sample, accept."""
        started = time.perf_counter_ns()
        self._tokens_fed[0], self._position[0] = self._root, self._cache.length
        (result,) = yield self._plain_pass
        self.pass_ns = time.perf_counter_ns() - started
        self._plain_hidden, logits = result.hidden, result.logits[0]
        return self._accept(self._sampler.sample(logits, self._cache.length + lost), logits)

    def _accept(self, token: int, logits: Floats) -> tuple[int]:  # (V,)
        self._sampler.accept(token, logits)
        self._root = token
        return (token,)


def until_stop(tokens: abc.Sequence[int], stop_ids: frozenset[int]) -> abc.Sequence[int]:
    """Cuts tokens behind the first stop id."""
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens


# Tokens that are sooner evaluated again than kept: a reply's last ones, which a template writes in another way.
_FEW = 16
_NO_ROWS, _ONE_ROW = np.zeros(0, np.int64), np.zeros(1, np.int64)


@dataclass(frozen=True)
class Prefill:
    """How a prompt was evaluated: tokens reused from the cache, tokens evaluated, milliseconds."""

    cached: int
    evaluated: int
    ms: float


@dataclass(frozen=True)
class Step:
    """One token that `Sequence.generate` made, and the milliseconds since the one before; of one pass's tokens the
    first has them all."""

    token: int
    ms: float


class Sequence:
    """Keeps one conversation in a cache, which belongs to it alone, and makes its replies. Without a `context_shift` a
    text ends where it outgrows the cache. `prefixes` keep other conversations, to go back to them cheaply; sequences of
    one model may share them.

    Attributes:
        tokens: the whole text; another text gets another list, so that whoever holds this one keeps it.
        stopped: of the reply that is being made; set, it ends before its next pass.
        lost: what a context shift has taken from the text.
    """

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        chunk: int,
        context_shift: ContextShiftPolicy | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.prefixes = prefixes or PrefixCache(0)
        if self.prefixes.cap and not cache.copyable:
            message = f"Other conversations cannot be kept: the {backend.name} backend cannot copy this model's cache."
            raise CapabilityError(message, "Load it without a prefix cache.")
        self.backend, self.cache = backend, cache
        self.context_shift = context_shift
        self._border = backend.rotation_border if context_shift is None else None
        self.prefill = Prefill(0, 0, 0.0)
        self.lost = Lost()
        self.chunk = chunk
        self.adapter: str | None = None
        self.contexts: JoinedContexts | None = None
        self.tokens: list[int] = []
        self.stopped = threading.Event()
        self._strategy: Strategy | None = None  # while a reply is made

    @property
    def cancelled(self) -> bool:
        return self.stopped.is_set()

    @property
    def fed(self) -> int:
        """How many tokens of the text were evaluated."""
        return self.cache.length + self.lost.tokens

    def use_adapter(self, name: str | None, contexts: JoinedContexts | None = None) -> None:
        """Evaluate texts with an adapter or none, and behind these contexts, from now on; rows of others are kept
        apart."""
        if name != self.adapter or contexts is not self.contexts:
            check_adapter(self.backend, name)
            self._keep(0, ())
            self.forget()
            self.cache.adapter = name
            self.adapter, self.contexts = name, contexts

    def start(
        self, prompt: abc.Sequence[int], room: int, stop_ids: frozenset[int], strategy: Strategy
    ) -> Passes[abc.Sequence[int]]:
        """Evaluate a checked prompt and make the first of up to `room` tokens behind it; none where it is cancelled.
        `proceed` makes further ones until `leave`."""
        self._strategy, self._stop_ids = strategy, stop_ids
        # Branches of a search do not stop at the border between short and long texts.
        self.begin(len(prompt) + (room if strategy.searches else 0))
        try:
            (logits,) = yield from self._evaluate(prompt, len(prompt), len(prompt), strategy)
            self.cache.mark()
            # Drafters evaluate the prompt too, which belongs to the first token's time.
            return self._add((yield from strategy.first(self.tokens, logits, room)))
        except BaseException as error:
            if self._cancelled_by(error):
                return ()
            raise

    def proceed(self, room: int) -> Passes[abc.Sequence[int]]:
        """Make 1 to `room` further tokens up to a stop id; none where the reply is cancelled."""
        strategy = self._strategy
        assert strategy is not None, "the reply was started"
        try:
            if self.context_shift is not None:
                self._make_room()
            if self._border is not None:
                room = min(room, (yield from self._until_border(self._border)))
            return self._add((yield from strategy.next(room, self.lost.tokens)))
        except BaseException as error:
            if self._cancelled_by(error):
                return ()
            raise

    def _add(self, tokens: abc.Sequence[int]) -> abc.Sequence[int]:
        tokens = until_stop(tokens, self._stop_ids)
        self.tokens += tokens
        return tokens

    def _cancelled_by(self, error: BaseException) -> bool:
        """End the reply by an error; return whether that is a cancellation."""
        if isinstance(error, BudgetError | MemoryError):
            # What did not fit would stand in the way of what does.
            self.evict_prefixes()
            self.forget()
            self.cache.clear()
        self.leave()
        return isinstance(error, PassCancelledError)

    def leave(self) -> None:
        """End the generation: the reply is over or paused."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            try:
                strategy.leave()
            finally:
                # A stop id inside a round, or a reader who left: rows of tokens that were never given.
                self.truncate(min(self.fed, len(self.tokens)))

    def generate(
        self,
        prompt: abc.Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        strategy: Strategy | None = None,
    ) -> Generator[Step]:
        """Yield tokens until `max_tokens`, a stop id (which is yielded), a full context or a cancellation, outside of a
        scheduler. Where a context shift makes room, no context is ever full; a reply without `max_tokens` then ends
        after as many tokens as the context holds. `strategy` decodes by the same sampler; None is plain decoding."""
        self.check(prompt)
        # Here, not when iteration begins: a cancellation in between counts.
        self.stopped = threading.Event()
        left = self.allowance(len(prompt), max_tokens)
        return self._generated(prompt, left, stop_ids, strategy or Strategy(self, sampler))

    def _generated(
        self, prompt: abc.Sequence[int], left: int, stop_ids: frozenset[int], strategy: Strategy
    ) -> Generator[Step]:
        now = time.perf_counter()
        try:
            tokens = run_alone(self.start(prompt, left, stop_ids, strategy))
            while tokens:
                started, now = now, time.perf_counter()
                for place, token in enumerate(tokens):
                    if place and self.cancelled:
                        return
                    yield Step(token, 0.0 if place else (now - started) * 1e3)
                left -= len(tokens)
                if left == 0 or tokens[-1] in stop_ids or self.cancelled:
                    return
                tokens = run_alone(self.proceed(left))
        finally:
            self.leave()

    def allowance(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens that the reply to a prompt may have."""
        room = self.cache.capacity - prompt + 1 if self.context_shift is None else self.cache.capacity
        return room if max_tokens is None else max_tokens if self.context_shift is not None else min(max_tokens, room)

    def prepare(self, prompt: abc.Sequence[int], most: int) -> Passes[bool]:
        """Evaluate up to `most` tokens of a checked prompt; return whether only its last one is left."""
        try:
            self.begin(len(prompt))
            # Fewer are not kept when another text comes in between, and would be evaluated again and again.
            yield from self._evaluate(prompt, len(prompt) - 1, max(most, _FEW + 1))
        except PassCancelledError:
            return False
        return self.fed == len(prompt) - 1

    def begin(self, length: int) -> None:
        """Prepare for a text of this many tokens: drop rows that LongRoPE rotates otherwise for it, and kept prefixes
        too."""
        if self._border is None or self.backend.rotates_long == (length > self._border):
            return
        self.evict_prefixes()
        self.forget()
        self.backend.rotate_long(length > self._border)

    def _until_border(self, border: int) -> Passes[int]:
        """Tokens that the next passes may feed before the text is rotated otherwise, at least one. A text that has
        reached the border is evaluated again, as in transformers (models/phi3/modeling_phi3.py)."""
        if self.backend.rotates_long:
            return self.cache.capacity
        if (left := border - self.cache.length) > 0:
            return left
        tokens, fed = self.tokens, self.fed
        self.begin(fed + 1)
        self.tokens = tokens
        for start in range(0, fed, self.chunk):
            if self.cancelled:
                raise PassCancelledError("Cancelled between two chunks of the text.")
            yield from self._forward(self._pass(tokens[start : min(start + self.chunk, fed)], _NO_ROWS))
        return self.cache.capacity

    def forget(self) -> None:
        self.tokens = []
        self.lost = Lost()
        if self.context_shift is not None:
            self.context_shift.forget()
        self.cache.trim(0)

    def check(self, prompt: abc.Sequence[int], draft: abc.Sequence[int] = ()) -> None:
        """Refuse a prompt, or a draft behind it, that cannot be continued."""
        capacity, vocabulary = self.cache.capacity, self.backend.geometry.vocab_size
        if not prompt:
            raise PromptError("The prompt is empty.", "Write at least one token of text.")
        if len(prompt) > capacity and self.context_shift is None:
            message = f"The prompt has {len(prompt)} tokens, but the context holds {capacity}."
            hint = "Shorten it, load the model with a larger " + Setting("context") + ", or let it forget with "
            sizes = (len(prompt), capacity)
            raise ContextLengthError(message, hint + Setting("overflow", "window") + ".", sizes=sizes)
        ids = [*prompt, *draft]
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            message = f"The prompt contains a token id outside the model's vocabulary of {vocabulary}."
            raise PromptError(message, f"Ids range from 0 to {vocabulary - 1}.")

    def _evaluate(
        self, prompt: abc.Sequence[int], stop: int, most: int, strategy: Strategy | None = None
    ) -> Passes[Floats]:
        """Evaluate up to `most` tokens that the cache lacks of the first `stop` of a prompt; logits of the last (1, V),
        or (0, V) before the end."""
        started = time.perf_counter()
        self.cache.hold(None)
        done = cached = self._reuse(prompt)
        self.tokens = [*prompt]
        stop = min(stop, cached + most)
        logits: Floats = np.zeros((0, self.backend.geometry.vocab_size), np.float32)
        with keeping_freed():
            try:
                while done < stop:
                    if self.cancelled:
                        raise PassCancelledError("Cancelled between two chunks of the prompt.")
                    chunk = prompt[done : done + min(self.chunk, stop - done, self.room())]
                    done += len(chunk)
                    batch = self._pass(chunk, np.array([len(chunk) - 1] if done == len(prompt) else [], np.int64))
                    read = self._forward(batch) if strategy is None else strategy.read(batch)
                    logits = (yield from read).logits
            finally:
                self.prefill = Prefill(cached, self.fed - cached, (time.perf_counter() - started) * 1e3)
        return logits

    def room(self) -> int:
        """Tokens that can be fed before the context is full; a context shift makes room first."""
        self._make_room()
        return self.cache.capacity - self.cache.length

    def feed(self, tokens: abc.Sequence[int], rows: Ints, gains: tuple[float, ...] | None = None) -> Passes[PassResult]:
        """Add tokens to what was fed, and evaluate them; the logits are those of `rows` (R,). With `gains`, as `Pass`
        takes them, the last tokens need not be fed, and as many rows come."""
        self.tokens = self.tokens[: self.fed]
        result = yield from self._forward(self._pass(tokens, rows, gains))
        self.tokens += tokens if gains is None else tokens[: len(result.logits)]
        return result

    def _pass(self, tokens: abc.Sequence[int], rows: Ints, gains: tuple[float, ...] | None = None) -> Pass:
        """The pass over tokens behind those that the cache has."""
        start = self.cache.length
        return Pass(np.array(tokens, np.int64), np.arange(start, start + len(tokens)), rows, gains=gains)

    def _forward(self, batch: Pass) -> Passes[PassResult]:
        (result,) = yield Evaluate(self.backend, ((self.cache, batch),))
        return result

    def _make_room(self) -> None:
        """Shorten a full cache by the context shift."""
        if self.context_shift is None or self.cache.length < self.cache.capacity:
            return
        fed = self.fed
        try:
            removed = self.context_shift.make_room(self.tokens[:fed])
        except PassCancelledError:
            raise
        except BaseException:
            # Some layers may be shortened and others not.
            self.forget()
            raise
        self.lost = self.lost.after(removed, fed)

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens whose rows the cache holds one for one; none after a context shift or where such a text is rotated
        otherwise."""
        odd = self._border is not None and self.backend.rotates_long != (self.fed > self._border)
        return () if self.lost.tokens or odd or self.contexts is not None else tuple(self.tokens[: self.fed])

    def adopt(self, tokens: abc.Sequence[int], pieces: Iterable[CacheSnapshot]) -> None:
        """Replace the cached rows by rows kept elsewhere; the cached ones are kept as a prefix."""
        self._keep(0, tokens)
        self.forget()
        self.begin(len(tokens))
        try:
            self.append(tokens, pieces)
        except BaseException:
            self.forget()
            raise

    def borrow(self, other: Sequence, tokens: abc.Sequence[int]) -> None:
        """Copy the rows that another sequence of the model has of these tokens, if they are more."""
        if other.adapter != self.adapter or self.contexts is not None:
            return
        shared = min(other.shared(tokens), len(other.cached_tokens), len(tokens) - 1)
        if shared > max(self.shared(tokens), self.prefixes.match(tokens, self.adapter)):
            self.adopt(tokens[:shared], [other.cache.snapshot(0, shared)])

    def restart(self) -> None:
        """Empty the cache; its rows are kept as a prefix if there is room."""
        self._keep(0, ())
        self.forget()
        self.cache.clear()

    def give_way(self) -> Passes[None]:
        """Empty the cache for older sequences that need its pages, and let them have a pass first."""
        self.restart()
        yield Evaluate(self.backend, ())

    @property
    def prefix_bytes(self) -> int:
        return self.prefixes.nbytes

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated now, by term: the backend's, and those of kept prefixes, which may lie in its cache."""
        terms = dict(self.backend.nbytes())
        if kept := self.prefixes.nbytes:
            terms["kv"] -= self.prefixes.bytes_in_place
            terms["prefix_cache"] = kept
        return terms

    def evict_prefixes(self, keep_bytes: int = 0) -> None:
        """Drop kept prefixes, the least recently used first, down to this many bytes."""
        self.prefixes.evict(keep_bytes)

    def _reuse(self, prompt: abc.Sequence[int]) -> int:
        """Cut the cache to the rows shared with the prompt, or restore more from kept prefixes; return their number."""
        most = min(len(prompt) - 1, self.cache.capacity)
        cached = self._resumable(min(self.shared(prompt), len(prompt) - 1))
        if cached < self.lost.since:
            cached = 0
        if self.contexts is not None:
            self._enter_contexts(self.contexts, cached)
            return self.fed
        self._keep(cached, prompt)
        kept = self.prefixes.match(prompt[:most], self.adapter)
        if cached == 0:
            self.forget()
        self.truncate(cached)
        if kept > cached and not self.lost.tokens:
            self.append(prompt, self.prefixes.take(prompt, cached, kept, self.adapter))
        return self.fed

    def _enter_contexts(self, contexts: JoinedContexts, cached: int) -> None:
        """Cut the cache to `cached` tokens, or replace all rows by the contexts."""
        if cached >= len(contexts.tokens):
            self.truncate(cached)
            return
        self.forget()
        assert isinstance(self.cache, PagedCache), "who made them has looked"
        contexts.enter(self.cache)

    def _keep(self, cached: int, prompt: abc.Sequence[int]) -> None:
        """Keep the cached rows as a prefix if more than a few are about to be cut off."""
        cached_tokens, cache = self.cached_tokens, self.cache
        if len(cached_tokens) - cached > _FEW and cache.copyable:
            for end in (cache.marked, len(cached_tokens)) if cache.marked else (len(cached_tokens),):
                self.prefixes.offer(cached_tokens[:end], cache.snapshot, prompt, self.adapter)

    def append(self, tokens: abc.Sequence[int], pieces: Iterable[CacheSnapshot], of: int = 0) -> None:
        """Append rows of the tokens that follow the cached ones."""
        for piece in pieces:
            start = self.fed
            self.cache.append(piece)
            self.tokens = [*self.tokens[:start], *tokens[start + of : start + of + piece.length]]

    def shared(self, tokens: abc.Sequence[int]) -> int:
        """Count the leading tokens that were fed already."""
        return shared_length(np.array(self.tokens[: self.fed]), np.array(tokens))

    def _resumable(self, length: int) -> int:
        """The largest length, up to this one, that the cache can be cut to."""
        return self.cache.rewindable_to(length - self.lost.tokens) + self.lost.tokens

    def truncate(self, length: int) -> None:
        """Cut the cache to the text's first tokens, or to fewer if it can only resume there."""
        self.cache.trim(self._resumable(length) - self.lost.tokens)
