"""The decoding loop: a prompt and a decoding strategy become tokens; what the cache already holds is reused."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Sequence

import numpy as np

from edgeinfer.core.errors import BudgetError, CapabilityError, ContextLengthError, PromptError, Setting
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import (
    Backend,
    Pass,
    PassCancelledError,
    RotatingBackend,
    choose_adapter,
)
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, Prefill, Run, Step, until_stop
from edgeinfer.runtime.kv_cache.context_shift.policy import ContextShiftPolicy, Lost
from edgeinfer.runtime.kv_cache.contexts import JoinedContexts
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache, shared_length
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.system.memory import keeping_freed

# Tokens that are sooner evaluated again than kept: a reply's last ones, which a template writes in another way.
_FEW = 16


class Engine:
    """Keeps one conversation in a backend's cache, which belongs to it alone, and makes its replies. Without a
    `context_shift` a text ends where it outgrows the cache. `prefixes` keep other conversations, to go back to them
    cheaply; engines of one model may share them."""

    def __init__(
        self,
        backend: Backend,
        chunk: int,
        context_shift: ContextShiftPolicy | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.prefixes = prefixes or PrefixCache(0)
        if self.prefixes.cap and not backend.cache.copyable:
            message = f"Other conversations cannot be kept: the {backend.name} backend cannot copy this model's cache."
            raise CapabilityError(message, "Load it without a prefix cache.")
        self.backend = backend
        self.context_shift = context_shift
        border = backend.rotation_border if isinstance(backend, RotatingBackend) and context_shift is None else None
        self._rotating = backend if isinstance(backend, RotatingBackend) and border is not None else None
        self._border = border or 0
        self.prefill = Prefill(0, 0, 0.0)
        self.lost = Lost()
        self.chunk = chunk
        self.adapter: str | None = None
        self.contexts: JoinedContexts | None = None
        self._tokens: list[int] = []
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stops the running generation within the current pass. Safe from any thread."""
        self._cancelled.set()
        self.backend.cancel()

    def use_adapter(self, name: str | None, contexts: JoinedContexts | None = None) -> None:
        """Evaluate texts with an adapter or none, and behind these contexts, from now on; rows of others are kept
        apart."""
        if name != self.adapter or contexts is not self.contexts:
            choose_adapter(self.backend, name)
            self._keep(0, ())
            self.forget()
            self.adapter, self.contexts = name, contexts

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        strategy: DecodingStrategy | None = None,
    ) -> Generator[Step]:
        """Yield tokens until `max_tokens`, a stop id (which is yielded), a full context or `cancel`. Where a context
        shift makes room, no context is ever full; a reply without `max_tokens` then ends after as many tokens as the
        context holds. `strategy` decodes by the same sampler; None is plain decoding."""
        self.check(prompt)
        # Here, not when iteration begins: a `cancel` in between counts.
        self._cancelled.clear()
        self.prefill = Prefill(0, 0, 0.0)
        left = self.allowance(len(prompt), max_tokens)
        strategy = strategy or DecodingStrategy(self.backend, sampler)
        # Branches of a search do not stop at the border between short and long texts.
        self.begin(len(prompt) + (left if strategy.searches else 0))
        return self._steps(prompt, left, stop_ids, strategy)

    def allowance(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens that the reply to a prompt may have."""
        room = self.backend.cache.capacity - prompt + 1 if self.context_shift is None else self.backend.cache.capacity
        return room if max_tokens is None else max_tokens if self.context_shift is not None else min(max_tokens, room)

    def prepare(self, prompt: Sequence[int], most: int) -> bool:
        """Evaluate up to `most` tokens of a checked prompt; return whether only its last one is left."""
        self._cancelled.clear()
        try:
            self.begin(len(prompt))
            # Fewer are not kept when another text comes in between, and would be evaluated again and again.
            self._evaluate(prompt, len(prompt) - 1, max(most, _FEW + 1))
        except PassCancelledError:
            return False
        return len(self._tokens) == len(prompt) - 1

    def _steps(
        self, prompt: Sequence[int], left: int, stop_ids: frozenset[int], strategy: DecodingStrategy
    ) -> Generator[Step]:
        now = time.perf_counter()
        try:
            logits = self._evaluate(prompt, len(prompt), len(prompt), strategy.reading(prompt))[0]
            self.backend.cache.mark()
            # Drafters evaluate the prompt too, which belongs to the first token's time.
            tokens = until_stop(strategy.first(prompt, logits, left), stop_ids)
            with keeping_freed():
                ahead = list(tokens)  # of what the cache holds
                while True:
                    started, now = now, time.perf_counter()
                    for place, token in enumerate(tokens):
                        if place and self._cancelled.is_set():
                            return
                        ms, last = 0.0 if place else (now - started) * 1e3, place == len(tokens) - 1
                        yield Step(token, ms, last, strategy.pass_ns / 1e6)
                    left -= len(tokens)
                    if left == 0 or tokens[-1] in stop_ids or self._cancelled.is_set():
                        return
                    self._make_room()
                    tokens = until_stop(strategy.next(min(left, self._until_border()), self.lost.tokens), stop_ids)
                    ahead += tokens
                    fed = max(0, self.backend.cache.length + self.lost.tokens - len(self._tokens))
                    self._tokens += ahead[:fed]
                    del ahead[:fed]
        except PassCancelledError:
            return
        except (BudgetError, MemoryError):
            # What did not fit would stand in the way of what does.
            self.evict_prefixes()
            self.forget()
            self.backend.cache.clear()
            raise
        finally:
            strategy.leave()
            # A stop id inside a round, or a reader who left: rows of tokens that were never yielded.
            self.truncate(min(self.backend.cache.length + self.lost.tokens, len(self._tokens)))

    def begin(self, length: int) -> None:
        """Prepare for a text of this many tokens: drop rows that LongRoPE rotates otherwise for it, and kept prefixes
        too."""
        if self._rotating is None or self._rotating.rotates_long == (length > self._border):
            return
        self.evict_prefixes()
        self.forget()
        self._rotating.rotate_long(length > self._border)

    def _until_border(self) -> int:
        """Tokens that the next passes may feed before the text is rotated otherwise, at least one. A text that has
        reached the border is evaluated again, as in transformers (models/phi3/modeling_phi3.py)."""
        if self._rotating is None or self._rotating.rotates_long:
            return self.backend.cache.capacity
        if (left := self._border - self.backend.cache.length) > 0:
            return left
        tokens = self._tokens.copy()
        self.begin(len(tokens) + 1)
        for start in range(0, len(tokens), self.chunk):
            if self._cancelled.is_set():
                raise PassCancelledError("Cancelled between two chunks of the text.")
            self.feed(tokens[start : start + self.chunk], np.zeros(0, np.int64))
        return self.backend.cache.capacity

    def forget(self) -> None:
        self._tokens.clear()
        self.lost = Lost()
        if self.context_shift is not None:
            self.context_shift.forget()
        self.backend.cache.trim(0)

    def check(self, prompt: Sequence[int], draft: Sequence[int] = ()) -> None:
        """Refuse a prompt, or a draft behind it, that cannot be continued."""
        capacity, vocabulary = self.backend.cache.capacity, self.backend.geometry.vocab_size
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

    @keeping_freed()
    def _evaluate(self, prompt: Sequence[int], stop: int, most: int, run: Run | None = None) -> Floats:
        """Evaluate up to `most` uncached tokens of the first `stop` of a prompt; logits of the last (1, V), or (0, V)
        before the end."""
        started = time.perf_counter()
        self.backend.cache.hold(None)
        done = cached = self._reuse(prompt)
        stop = min(stop, cached + most)
        logits: Floats = np.zeros((0, self.backend.geometry.vocab_size), np.float32)
        try:
            while done < stop:
                if self._cancelled.is_set():
                    raise PassCancelledError("Cancelled between two chunks of the prompt.")
                chunk = prompt[done : done + min(self.chunk, stop - done, self.room())]
                done += len(chunk)
                rows = np.array([len(chunk) - 1] if done == len(prompt) else [], np.int64)
                logits = self.feed(chunk, rows, run=run)
        finally:
            self.prefill = Prefill(cached, len(self._tokens) - cached, (time.perf_counter() - started) * 1e3)
        return logits

    def room(self) -> int:
        """Tokens that can be fed before the context is full; a context shift makes room first."""
        self._make_room()
        return self.backend.cache.capacity - self.backend.cache.length

    def feed(
        self, tokens: Sequence[int], rows: Ints, gains: tuple[float, ...] | None = None, run: Run | None = None
    ) -> Floats:  # (R, V)
        """Feed the next tokens of a text and return the logits of `rows` (R,), as a view that the next pass overwrites.
        With `gains`, as `Pass` takes them, the last tokens need not be fed, and as many rows come. `run` runs
        the pass."""
        start = self.backend.cache.length
        places = np.arange(start, start + len(tokens))
        batch = Pass(np.array(tokens, np.int64), places, rows, gains=gains)
        logits = (run or self.backend.forward)(batch).logits
        self._tokens.extend(tokens if gains is None else tokens[: len(logits)])
        return logits

    def _make_room(self) -> None:
        """Shorten a full cache by the context shift."""
        if self.context_shift is None or self.backend.cache.length < self.backend.cache.capacity:
            return
        try:
            removed = self.context_shift.make_room(self._tokens)
        except PassCancelledError:
            del self._tokens[self.backend.cache.length + self.lost.tokens :]
            raise
        except BaseException:
            # Some layers may be shortened and others not.
            self.forget()
            raise
        self.lost = self.lost.after(removed, len(self._tokens))

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens whose rows the cache holds one for one; none after a context shift or where such a text is rotated
        otherwise."""
        odd = self._rotating is not None and self._rotating.rotates_long != (len(self._tokens) > self._border)
        return () if self.lost.tokens or odd or self.contexts is not None else tuple(self._tokens)

    def adopt(self, tokens: Sequence[int], pieces: Iterable[CacheSnapshot]) -> None:
        """Replace the cached rows by rows kept elsewhere; the cached ones are kept as a prefix."""
        self._keep(0, tokens)
        self.forget()
        self.begin(len(tokens))
        try:
            self.append(tokens, pieces)
        except BaseException:
            self.forget()
            raise

    def borrow(self, other: Engine, tokens: Sequence[int]) -> None:
        """Copy the rows that another engine of the model has of these tokens, if they are more."""
        if other.adapter != self.adapter or self.contexts is not None:
            return
        shared = min(other.shared(tokens), len(other.cached_tokens), len(tokens) - 1)
        if shared > max(self.shared(tokens), self.prefixes.match(tokens, self.adapter)):
            self.adopt(tokens[:shared], [other.backend.cache.snapshot(0, shared)])

    def restart(self) -> None:
        """Empty the cache; its rows are kept as a prefix if there is room."""
        self._keep(0, ())
        self.forget()
        self.backend.cache.clear()

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

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Cut the cache to the rows shared with the prompt, or restore more from kept prefixes; return their number."""
        most = min(len(prompt) - 1, self.backend.cache.capacity)
        cached = self._resumable(min(self.shared(prompt), len(prompt) - 1))
        if cached < self.lost.since:
            cached = 0
        if self.contexts is not None:
            self._enter_contexts(self.contexts, cached)
            return len(self._tokens)
        self._keep(cached, prompt)
        kept = self.prefixes.match(prompt[:most], self.adapter)
        if cached == 0:
            self.forget()
        self.truncate(cached)
        if kept > cached and not self.lost.tokens:
            self.append(prompt, self.prefixes.take(prompt, cached, kept, self.adapter))
        return len(self._tokens)

    def _enter_contexts(self, contexts: JoinedContexts, cached: int) -> None:
        """Cut the cache to `cached` tokens, or replace all rows by the contexts."""
        if cached >= len(contexts.tokens):
            self.truncate(cached)
            return
        self.forget()
        assert isinstance(self.backend.cache, PagedCache), "who made them has looked"
        contexts.enter(self.backend.cache)
        self._tokens += contexts.tokens

    def _keep(self, cached: int, prompt: Sequence[int]) -> None:
        """Keep the cached rows as a prefix if more than a few are about to be cut off."""
        cached_tokens, cache = self.cached_tokens, self.backend.cache
        if len(cached_tokens) - cached > _FEW and cache.copyable:
            for end in (cache.marked, len(cached_tokens)) if cache.marked else (len(cached_tokens),):
                self.prefixes.offer(cached_tokens[:end], cache.snapshot, prompt, self.adapter)

    def append(self, tokens: Sequence[int], pieces: Iterable[CacheSnapshot], of: int = 0) -> None:
        """Append rows of the tokens that follow the cached ones."""
        for piece in pieces:
            self.backend.cache.append(piece)
            start = len(self._tokens) + of
            self._tokens += tokens[start : start + piece.length]

    def shared(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that were fed already."""
        return shared_length(np.array(self._tokens), np.array(tokens))

    def _resumable(self, length: int) -> int:
        """The largest length, up to this one, that the cache can be cut to."""
        return self.backend.cache.resumable(length - self.lost.tokens) + self.lost.tokens

    def truncate(self, length: int) -> None:
        """Cut text and cache to the first tokens, or to fewer if the cache can only resume there."""
        length = self._resumable(length)
        del self._tokens[length:]
        self.backend.cache.trim(length - self.lost.tokens)
