"""One reply as it is made: tokens become streamed text and, at the end, a Result with its figures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Chunk, FinishReason, MemoryUse, Result, Timings, TokenLogprob, Usage
from edgeinfer.lifecycle import ModelParts
from edgeinfer.reply_decoding import (
    GenerationRequest,
    is_shareable,
    make_constraint,
    make_sampler,
    make_strategy,
    make_thoughts,
    steered,
)
from edgeinfer.runtime.backends.contract import PassResult, PreemptedError
from edgeinfer.runtime.decoding.scheduler import SequenceTask
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Prefill, Strategy
from edgeinfer.runtime.kv_cache.context_shift.policy import context_shift_summary
from edgeinfer.runtime.planning import ledger as ledgers
from edgeinfer.runtime.sampling.distributions import TokenLogprobs
from edgeinfer.runtime.sampling.thinking import ThoughtConstraint
from edgeinfer.runtime.system.forks import keep_for_good
from edgeinfer.runtime.system.memory import allocating, name_refusal, process_memory, proportional_bytes
from edgeinfer.runtime.text.contract import TokenizerLike, bytes_of
from edgeinfer.runtime.text.streaming import ReplyText
from edgeinfer.turns import Turns

if TYPE_CHECKING:
    from edgeinfer.runtime.sampling.grammar import GrammarCosts


class ShownLogprobs:
    """Matches log-probabilities with text, which may appear later than its tokens, or never, like a stop string."""

    def __init__(self, tokenizer: TokenizerLike, found: Sequence[TokenLogprobs]) -> None:
        self._tokenizer = tokenizer
        self._found = found  # grows with the reply's tokens
        self.given: list[TokenLogprob] = []  # those of all text that was shown
        self._tokens = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._decoded = 0  # characters of the tokens so far
        self._shown = 0  # of those, that were shown

    def push(self, token: int, decoded: str, *, of_text: bool = True) -> None:
        """Add the reply's next token, and the text that became certain with it; one of a thought is left out."""
        if not self._found:
            return
        found = self._found[self._tokens]
        self._tokens += 1
        if not of_text:
            return
        alternatives = tuple(self._of(id_, logprob) for id_, logprob in found.top)
        entry = TokenLogprob(token, bytes_of(self._tokenizer, token), found.logprob, alternatives)
        self._waiting.append((self._decoded, entry))
        self._decoded += len(decoded)

    def show(self, text: str, *, rest: bool = False) -> tuple[TokenLogprob, ...]:
        """Return those of the tokens whose text starts in this piece, the next to be shown; with `rest` all."""
        self._shown += len(text)
        shown = []
        while self._waiting and (rest or self._waiting[0][0] < self._shown):
            shown.append(self._waiting.popleft()[1])
        self.given += shown
        return tuple(shown)

    def _of(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, bytes_of(self._tokenizer, token), logprob)


def timings_of(step_ms: Sequence[float], load_ms: float, prompt_ms: float, cached: int) -> Timings:
    """The timings of a reply; `cached` tokens of its prompt were not evaluated again."""
    later = np.array(step_ms[1:])
    mean = float(later.mean()) if len(later) else 0.0
    p50, p95 = (float(p) for p in np.percentile(later, (50, 95))) if len(later) else (0.0, 0.0)
    return Timings(
        load_ms=load_ms,
        prompt_ms=prompt_ms,
        ttft_ms=step_ms[0] if step_ms else 0.0,
        per_token_ms=mean,
        per_token_p50_ms=p50,
        per_token_p95_ms=p95,
        tokens_per_second=1e3 / mean if mean else 0.0,
        cached_prompt_tokens=cached,
    )


class TokenStream:
    """Iterates over the chunks of one reply; afterwards `result` has the whole.

    `cancel`, `close`, the end of a `with` block, and the next request of the same thread finish it as "cancelled",
    unless it is paused. Timings cover its own work: only the time to the first token includes work that others did
    while it was paused.
    """

    def __init__(self, parts: ModelParts, request: GenerationRequest, turns: Turns | None) -> None:
        self._parts = parts
        self._request = request = steered(parts, request)
        self._prompt, self._config, self._contexts = request.prompt, request.config, request.contexts
        self._turns = turns  # None where the reply has a sequence of its own
        self._step_ms: list[float] = []
        self._overhead_ms: list[float] = []  # of tokens between two plain steps, besides the pass and their reader
        self._result: Result | None = None
        self._thread = threading.current_thread()
        self._stopped = threading.Event()
        self._over = self._advancing = self._forked = False
        self._lock = threading.RLock()  # one thread at a time makes the reply, or ends it
        with self._lock:
            self._claim()
            try:
                self._prepare()
            except BaseException:
                self._leave_turn()
                raise

    def _prepare(self) -> None:
        parts, prompt, config = self._parts, self._prompt, self._config
        parts.sequence.use_adapter(config.adapter, self._contexts)
        self._counts = None if parts.watched is None else parts.watched.counts
        self._stop_ids = frozenset(config.stop_token_ids) | (frozenset() if config.ignore_eos else parts.eos_ids)
        before = prompt if self._request.continues else ()
        self._left = parts.sequence.allowance(len(prompt), config.max_tokens)
        self._thoughts = make_thoughts(parts, self._request)
        self._text = ReplyText(
            parts.tokenizer, config.stop, self._stop_ids, before, self._request.calls, self._thoughts
        )
        limits = make_constraint(parts, self._request, self._stop_ids, self._thoughts, self._left)
        self._constraint, self._grammar_costs = limits
        self._sampler = make_sampler(parts, prompt, config, self._constraint, self._stop_ids)
        asked = config.logprobs is not None
        self._logprobs = ShownLogprobs(parts.tokenizer, self._sampler.logprobs) if asked else None
        parts.ledger.begin_turn()
        self._strategy = self._new_strategy(parts)
        self._first_strategy: Strategy | None = None  # where the reply has moved since
        # The sequence's list, which stays when another text takes the sequence.
        self._tokens: list[int] = [*prompt, *self._request.reply]
        self._ahead: deque[int] = deque()  # tokens of the latest pass that were not given yet
        self._entered = self._joined = False
        self._since = self._look = 0.0  # times of the latest pass's tokens, and of the next look at the budget
        self._prefill: Prefill | None = None
        self._items: deque[Chunk] = deque()  # that were made and not read yet
        self._error: Exception | None = None
        self._scheduled = False
        self._task = SequenceTask(self._run(), self._items.append, self._ended)

    def _new_strategy(self, parts: ModelParts) -> Strategy:
        return make_strategy(parts, self._sampler, self._request, self._stop_ids)

    @property
    def result(self) -> Result:
        """The finished reply; UsageError before it is."""
        if self._result is None:
            raise UsageError("The reply is not finished.", "Iterate to the end, or close the stream first.")
        return self._result

    @property
    def grammar_costs(self) -> GrammarCosts | None:
        """The cost so far of following a schema, an expression or a grammar; None where the reply follows none."""
        return self._grammar_costs

    def complete(self) -> Result:
        """Iterate to the end and return the whole reply."""
        for _ in self:
            pass
        return self.result

    @property
    def abandoned(self) -> bool:
        """Whether no other thread can still be iterating: the calling thread started it, or its thread has ended."""
        left = self._thread is threading.current_thread() or not self._thread.is_alive()
        if left and self._lock.acquire(blocking=False):
            self._lock.release()
            return True
        return False

    def cancel(self) -> None:
        """Stop within the current pass; the next chunk is the last. Safe from any thread."""
        self._stopped.set()
        self._parts.scheduler.cancel(self._task)

    def answer_now(self) -> bool:
        """End the thought with the next token, so that the answer begins; return whether the reply is inside a thought
        that can be ended. Safe from any thread."""
        limit = self._constraint
        if self._thoughts is None or not self._thoughts.inside or not isinstance(limit, ThoughtConstraint):
            return False
        limit.end_thought()
        return True

    @property
    def _cancelled(self) -> bool:
        return self._stopped.is_set()

    def pause(self) -> bool:
        """Let other replies of the model run; return whether that was possible. The next chunk continues the same text.

        A reply cannot pause where a context shift may drop parts of its text, nor between the passes of one chunk. Its
        rows stay where others leave room, else in a prefix cache (LoadOptions.prefix_cache) as far as that has room;
        the rest is evaluated again.
        """
        # The branches of a search are in the cache with the reply.
        if self._parts.sequence.context_shift is not None or (self._strategy.searches and self._made):
            return False
        with self._lock:
            if self._task.requests or self._turns is None:
                return False
            self._leave_sequence()
            self._turns.pause(self)
        return True

    def move(self, parts: ModelParts) -> None:
        """Continue in another sequence of the model, side by side with others; only if `shareable`."""
        assert parts.drafting is not None, "the sequence shares passes"
        with self._lock:
            if self._result is not None:
                return
            self._leave_sequence()
            before = self._strategy
            if before.searches:
                self._strategy = self._new_strategy(parts)
            else:
                given = (parts.sequence, self._sampler, self._config, parts.drafting)
                self._strategy = parts.speculator.strategy(*given, before)
                # Its statistics are reported where the rest is decoded plainly.
                self._first_strategy = self._first_strategy or before
            parts.sequence.use_adapter(self._config.adapter)
            parts.sequence.borrow(self._parts.sequence, self._tokens)
            self._leave_turn()
            self._parts, self._turns = parts, None

    @property
    def shareable(self) -> bool:
        """Whether the reply needs no resources that only one reply at a time can have."""
        return is_shareable(self._config) and self._contexts is None and not (self.searches and self._made)

    @property
    def searches(self) -> bool:
        """Whether the reply is a search, which cannot be paused once it has started."""
        return self._strategy.searches

    @property
    def over(self) -> bool:
        """Whether no further chunk will be made."""
        return self._over

    @property
    def _made(self) -> int:
        """How many tokens of the reply were made."""
        return len(self._tokens) - len(self._prompt)

    def prepare(self, tokens: int) -> bool:
        """Evaluate up to so many tokens of the prompt before the first chunk is requested, so that the reply can be
        paused in between; return whether the prompt is complete. UsageError while another reply runs."""
        with self._lock:
            if self._made or self._cancelled or self._over:
                return True
            self._enter()
            with allocating("The reply"):
                ready = self._parts.scheduler.run(self._parts.sequence.prepare(self._prompt, tokens), self._task)
            self._add_prefill()
            return ready or self._cancelled

    def schedule(self) -> None:
        """Have the steps of the model's scheduler make the reply; iteration does so by itself."""
        if not self._scheduled and not self._over:
            self._scheduled = True
            self._parts.scheduler.add(self._task)

    def take(self) -> list[Chunk]:
        """The chunks that were made and not read yet; raises the error that ended the reply behind them."""
        taken = [*self._items]
        self._items.clear()
        if not taken:
            self._raise_error()
        return taken

    def _raise_error(self) -> None:
        """Raise the error that ended the reply, once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                name_refusal("The reply", error)
                raise error
            finally:
                del error  # the frames of its traceback hold pages, and would wait for the collection of a circle

    def close(self) -> None:
        """Finish now; an unfinished reply counts as cancelled. A chunk that another thread is making is the last."""
        if not self._lock.acquire(blocking=False):
            self.cancel()
            self._lock.acquire()
        try:
            if self._advancing:  # called from within the reply itself
                self.cancel()
            elif not self._over and not self._forked:
                self._parts.scheduler.remove(self._task)
                self._task.close()
                self._items.clear()
        finally:
            self._lock.release()

    def disown(self) -> None:
        """Leave the reply to the parent of this forked process, where it continues."""
        keep_for_good(self._task)  # ending it would change what is the parent's
        self._lock, self._advancing, self._forked = threading.RLock(), False, True
        self._stopped.set()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._lock:
            if self._forked:
                raise UsageError("The reply started before this process was forked.", "Ask for it again here.")
            if self._advancing:
                raise UsageError("The reply is being made.", "Wait for its next chunk.")
            if not self._items and not self._over:
                self._advance()
            if self._items:
                return self._items.popleft()
            self._raise_error()
        raise StopIteration

    def _advance(self) -> None:
        """Step the model until the next chunk is there."""
        self._advancing = True
        try:
            self.schedule()
            step, items = self._parts.scheduler.step, self._items
            while not items and not self._over:
                step()
        finally:
            self._advancing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> Generator[Evaluate | Chunk, list[PassResult], None]:
        """The reply's task: passes and chunks."""
        reason: FinishReason = "length"
        plain, read_ms = False, 0.0
        try:
            while True:
                self._round_ms = 0.0  # of one pass's tokens the first has them all
                if self._cancelled if self._ahead else not (yield from self._next_tokens()):
                    reason = self._reason_at_limit()
                    break
                token, pass_ms = self._ahead.popleft(), self._strategy.pass_ns / 1e6
                self._step_ms.append(self._round_ms)
                # After a step of several tokens there is more to do than one token's share.
                if plain and pass_ms:
                    self._overhead_ms.append(self._round_ms - pass_ms - read_ms)
                plain = pass_ms > 0
                text = self._text.push(token)
                if self._text.ended:
                    reason = "stop"
                if token in self._stop_ids:
                    break
                logprobs: tuple[TokenLogprob, ...] = ()
                thoughts, reasoning, thinking = self._thoughts, "", False
                if thoughts is not None:
                    reasoning, thinking = thoughts.reasoning, thoughts.in_thought
                if self._logprobs is not None:
                    self._logprobs.push(token, self._text.decoded, of_text=not thinking or bool(text))
                    logprobs = self._logprobs.show(text)
                chunk, given = Chunk(text, (token,), None, logprobs, reasoning, thinking), time.perf_counter()
                yield chunk
                read_ms = (time.perf_counter() - given) * 1e3
                if self._text.ended:
                    break
            yield self._last_chunk(reason)
        finally:
            # Closed early, or an error on its way to the caller: the model must be free again in either case.
            if self._result is None:
                self._finish("cancelled")

    def _reason_at_limit(self) -> FinishReason:
        """Why a reply without tokens left ended: it is whole where its form allows nothing more, else cut off."""
        if self._cancelled:
            return "cancelled"
        # A search follows other texts than the one its reply became.
        whole = self._made and not self._strategy.searches and self._sampler.only_ends(self._stop_ids)
        return "stop" if whole else "length"

    def _next_tokens(self) -> Passes[bool]:
        """Make the tokens of another pass, in a sequence that a paused reply enters again; return whether there
        are any."""
        first, sequence = not self._made, self._parts.sequence
        tokens: Sequence[int] = ()
        if self._left == 0 or self._cancelled or not (first or self._tokens[-1] not in self._stop_ids):
            return False
        while not tokens:
            try:
                if self._entered:
                    tokens = yield from sequence.proceed(self._left)
                else:
                    yield from self._join()
                    self._enter()
                    if self._cancelled:
                        return False
                    self._entered = True
                    tokens = yield from sequence.start(self._tokens, self._left, self._stop_ids, self._strategy)
                    self._tokens = sequence.tokens
                break
            except PreemptedError:
                # Its pages were given to others; the text is evaluated again as soon as pages are free.
                self._entered = False
                yield from sequence.give_way()
        if first:
            self._add_prefill()
            if self._parts.verification.await_verdict(lambda: self._cancelled) is None:
                return False
        now = time.perf_counter()
        self._since, self._round_ms = now, (now - (self._request.started if first else self._since)) * 1e3
        if now >= self._look:
            self._look = now + ledgers.LOOK_S
            self._parts.ledger.check()
        self._left -= len(tokens)
        self._ahead.extend(tokens)
        return bool(tokens)

    def _join(self) -> Passes[None]:
        """Wait for rows of the prompt that others are about to evaluate."""
        join, self._joined = None if self._joined else self._parts.join, True
        if join is not None:
            yield from join(self._tokens)

    def _enter(self) -> None:
        """Take the turn, and the sequence."""
        self._claim()
        self._parts.sequence.use_adapter(self._config.adapter, self._contexts)
        self._parts.sequence.stopped = self._stopped
        self._since = time.perf_counter()

    def _claim(self) -> None:
        if self._turns is not None:
            self._turns.claim(self)

    def _leave_turn(self) -> None:
        if self._turns is not None:
            self._turns.leave(self)

    def _leave_sequence(self) -> None:
        """Leave the sequence to others, until the next chunk is wanted."""
        if self._entered:
            self._parts.sequence.leave()
        if self._scheduled:
            self._parts.scheduler.remove(self._task)
        self._entered = self._scheduled = False

    def _add_prefill(self) -> None:
        """Add how the sequence evaluated the latest part of the prompt."""
        latest, before = self._parts.sequence.prefill, self._prefill
        if before is None:
            self._prefill = latest
        else:
            self._prefill = Prefill(before.cached, before.evaluated + latest.evaluated, before.ms + latest.ms)

    def _ended(self, error: Exception | None) -> None:
        """The task is over."""
        self._over, self._scheduled, self._error = True, False, error
        if self._result is None:  # it never began
            self._finish("cancelled")

    def _last_chunk(self, reason: FinishReason) -> Chunk:
        text = self._text.finish()
        stopped = self._text.stop_string is not None
        logprobs = () if self._logprobs is None else self._logprobs.show(text, rest=not stopped)
        reason = "stop" if stopped else reason
        # A model that is closed meanwhile is freed in here.
        self._finish(reason)
        return Chunk(text, (), reason, logprobs, "" if self._thoughts is None else self._thoughts.reasoning)

    def _finish(self, reason: FinishReason) -> None:
        if self._entered:
            self._entered = False
            self._parts.sequence.leave()
        self._strategy.finish()
        strategy, parts, thoughts = self._strategy, self._parts, self._thoughts
        if self._first_strategy is not None:
            strategy = self._first_strategy
            strategy.finish()
        prefill = self._prefill or Prefill(0, 0, 0.0)
        timings = timings_of(self._step_ms, parts.load.total_ms, prefill.ms, prefill.cached)
        memory = process_memory()
        self._result = Result(
            text=self._text.text,
            token_ids=tuple(self._text.tokens),
            finish_reason=reason,
            usage=Usage(len(self._prompt), len(self._text.tokens), 0 if thoughts is None else thoughts.tokens),
            timings=timings,
            memory=MemoryUse(
                budget_bytes=parts.plan.budget_bytes,
                planned_bytes=parts.plan.planned_bytes,
                peak_rss_bytes=memory.peak_rss,
                anonymous_bytes=memory.anonymous,
                file_bytes=memory.file,
                terms=dict(parts.plan.terms),
                used=parts.ledger.terms(memory),
                given_up=(*parts.plan.given_up, *parts.ledger.given_up),
                pss_bytes=proportional_bytes(),
            ),
            speculation=parts.speculator.summary(self._config, strategy, timings.per_token_ms),
            model=parts.info,
            overflow=context_shift_summary(parts.sequence.context_shift, parts.sequence.lost),
            experts=None if parts.watched is None else parts.watched.use(since=self._counts),
            compute=strategy.compute,
            search=strategy.search,
            remote=strategy.remote,
            stop_string=self._text.stop_string,
            contexts=None if self._contexts is None else self._contexts.use,
            logprobs=() if self._logprobs is None else tuple(self._logprobs.given),
            schema_class=getattr(self._config.json_schema, "schema_class", None),
            reasoning=self._text.reasoning,
            thought_end=self._constraint.end if isinstance(self._constraint, ThoughtConstraint) else None,
        )
        parts.speculator.finished(strategy, self._overhead_ms)
        self._leave_turn()
        if self._request.on_finish is not None:
            self._request.on_finish(self._result)
