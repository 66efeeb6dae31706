"""Replies of one model, started one at a time or made side by side in passes that they share."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Generic, TypeVar, cast

import numpy as np

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Result
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelLifecycle, ModelParts
from edgeinfer.reply_decoding import GenerationRequest, require_shareable
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.decoding.scheduler import shares_passes
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Sequence
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from edgeinfer.runtime.system.memory import allocating
from edgeinfer.turns import Turns

T = TypeVar("T")
StreamT = TypeVar("StreamT", bound=TokenStream)

# Tokens of a prompt that are worth waiting for while another reply evaluates them.
_WORTH_WAITING = 64


def can_share(parts: ModelParts) -> bool:
    """Whether replies of the model can share passes."""
    return parts.sequence.context_shift is None and parts.remote is None and shares_passes(parts.backend)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    place: int  # index of the reply
    made: T | None = None  # its result
    error: Exception | None = None  # the error that ended it; None where there is a result

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.made)


# Makes a reply, or several one after the other: yields each stream that it starts, and goes on when that is over.
Making = Generator[TokenStream, None, T]


class _Place:
    """A sequence, and what is made in it."""

    def __init__(
        self,
        main: ModelParts,
        sequence: Sequence,
        replies: Callable[[], int],
        join: Callable[[_Place, abc.Sequence[int]], Passes[None]],
    ) -> None:
        self.parts = main.for_sequence(sequence, replies, lambda prompt: join(self, prompt))
        self.work: Generator[TokenStream, None, None] | None = None
        self.stream: TokenStream | None = None
        self.prompt: Ints | None = None  # of the reply, once it evaluates it. (n,)


class ReplyBatch:
    """Makes replies of one model side by side. All methods but `interrupt` are for the thread that made it.

    Args:
        model: yields the parts of the model, which are reserved until the batch is closed.
        replies: that the model starts.
        parallel: replies side by side at most.
        inter_token_latency: as `PromptShare` takes it.

    Raises:
        CapabilityError: replies of this model cannot share passes.
        UsageError: another thread runs a reply, or works with the model.
    """

    def __init__(
        self,
        model: AbstractContextManager[ModelParts],
        replies: Replies,
        parallel: int,
        inter_token_latency: float | None,
    ) -> None:
        self._replies = replies
        self._open = ExitStack()
        self._main = parts = self._open.enter_context(model)
        if not can_share(parts):
            self._open.close()
            message = f"Replies of {parts.info.name} cannot share passes here."
            hint = "That takes a bundle with a paged cache, the native kernel, no context shift and no remote server."
            raise CapabilityError(message, hint)
        self._parallel = parallel
        self.scheduler = parts.scheduler
        self.scheduler.share(
            inter_token_latency,
            make_room=self._make_room,
            pass_ms=lambda: parts.speculator.pass_ms,
            draft_rows=parts.speculator.most or VERIFIED_ROWS,
            on_pass_ms=parts.speculator.observe_pass,
        )
        self._free: list[_Place] = []  # least recently used first
        self._busy: list[_Place] = []

    def check(self, prompt: abc.Sequence[int]) -> None:
        """Refuse a prompt that cannot be continued."""
        self._main.sequence.check(prompt)

    @property
    def running(self) -> int:
        """How many replies are not finished."""
        return len(self._busy)

    @property
    def has_room(self) -> bool:
        """Whether another reply can start."""
        return len(self._busy) < self._parallel

    def add(self, work: Generator[TokenStream, None, None]) -> None:
        """Add work that makes replies: it yields each stream that it starts with the model, and goes on when that is
        over. It must not raise."""
        assert self.has_room, "the caller checks has_room"
        place = self._free.pop(0) if self._free else self._new_place()
        place.work = work
        self._busy.append(place)
        self._go_on(place)

    def join(self, stream: TokenStream) -> TokenStream:
        """Have a reply that was paused go on in the sequence of the work that calls this."""
        assert self._replies.seated is not None, "only work that was added has one"
        stream.move(self._replies.seated)
        return stream

    def run(self, makers: Iterable[Callable[[], TokenStream]]) -> list[Result]:
        """Make replies as there is room, and return their results in the same order. The first error that one raises
        ends the others, and is raised."""

        def making(make: Callable[[], TokenStream]) -> Making[Result]:
            stream = make()
            yield stream
            return stream.complete()

        made = {outcome.place: outcome.result() for outcome in self.as_completed(map(making, makers))}
        return [made[place] for place in range(len(made))]

    def as_completed(self, works: Iterable[Making[T]]) -> Iterator[Outcome[T]]:
        """Make replies as there is room, taking works one by one, and yield what each returns when it is finished."""
        over: list[Outcome[T]] = []

        def noted(place: int, work: Making[T]) -> Generator[TokenStream, None, None]:
            try:
                over.append(Outcome(place, (yield from work)))
            except Exception as error:  # raised by who reads the outcome
                over.append(Outcome(place, error=error))

        waiting = enumerate(works)
        left = True
        while left:
            while self.has_room and (entry := next(waiting, None)) is not None:
                self.add(noted(*entry))
            left = self.running > 0
            if left:
                self.step()
            while over:
                yield over.pop(0)

    def step(self) -> bool:
        """Run the replies until all wait for a pass, and run that; return whether replies are left."""
        self.scheduler.step()
        for place in tuple(self._busy):
            if place.stream is not None and place.stream.over:
                self._go_on(place)
        return bool(self._busy)

    def interrupt(self) -> None:
        """Make `step` return before another pass. Safe from any thread."""
        self.scheduler.interrupt()

    def close(self) -> None:
        try:
            self.scheduler.close()
            for place in tuple(self._busy):
                self._end(place)
            for place in self._free:
                place.parts.sequence.restart()
        finally:
            self._free.clear()
            self._busy.clear()
            self.scheduler.unshare()
            self._open.close()

    def _go_on(self, place: _Place) -> None:
        """Let work start its next reply."""
        assert place.work is not None, "the place is busy"
        place.stream = place.prompt = None
        before, self._replies.seated = self._replies.seated, place.parts
        try:
            place.stream = next(place.work, None)
        finally:
            self._replies.seated = before
            if place.stream is None:
                self._free_place(place)
        if place.stream is not None:
            place.stream.schedule()

    def _end(self, place: _Place) -> None:
        """Let work know that its reply is over, as all are."""
        assert place.work is not None, "the place is busy"
        if place.stream is not None and place.stream.over:
            self._go_on(place)
        if place in self._busy:
            place.work.close()
            if place.stream is not None:
                place.stream.close()
            self._free_place(place)

    def _free_place(self, place: _Place) -> None:
        """Its sequence keeps its rows until the pages are needed."""
        place.work = place.prompt = None
        self._busy.remove(place)
        self._free.append(place)

    def _new_place(self) -> _Place:
        main = self._main.sequence
        cache = self._main.backend.new_sequence(main.cache.capacity)
        sequence = Sequence(self._main.backend, cache, main.chunk, prefixes=main.prefixes)
        return _Place(self._main, sequence, lambda: self.running, self._join)

    def _join(self, place: _Place, prompt: abc.Sequence[int]) -> Passes[None]:
        """Take over the rows of a prompt that other sequences hold, and wait for those that they are about to
        evaluate."""
        wanted, sequence = np.array(prompt), place.parts.sequence
        others = [other for other in (*self._free, *self._busy) if other is not place]
        others = [other for other in others if other.parts.sequence.adapter == sequence.adapter]
        least = _WORTH_WAITING
        while any(_coming(other, wanted) >= least for other in others):
            yield Evaluate(sequence.backend, ())
            least = 1  # once it waits, all common tokens are evaluated only once
        place.prompt = wanted
        sequences = (self._main.sequence, *(other.parts.sequence for other in others))
        sequence.borrow(max(sequences, key=lambda each: each.shared(prompt)), prompt)

    def _make_room(self, pages: int) -> None:
        """Drop rows of finished replies, least recently used first, until so many pages are free."""
        backend, main = self._main.backend, self._main.sequence
        for sequence in (main, *(place.parts.sequence for place in self._free)):
            if backend.free_pages < pages and sequence.cache.length:
                sequence.restart()
        while backend.free_pages < pages and main.prefix_bytes:
            main.evict_prefixes(main.prefix_bytes - 1)


def _coming(other: _Place, wanted: Ints) -> int:  # (n,)
    """Count the leading tokens of a prompt that another reply is about to evaluate too."""
    if other.prompt is None:
        return 0
    common = min(shared_length(other.prompt, wanted), len(other.prompt) - 1)
    return common - other.parts.sequence.cache.length


class Replies:
    """Starts the replies of a model, one at a time or in a batch.

    Attributes:
        seated: the parts that the next reply is made with, where that is one of several sequences; only the thread of a
            batch sets and reads it.
    """

    def __init__(self, lifecycle: ModelLifecycle, inter_token_latency: float | None) -> None:
        self._lifecycle, self._latency = lifecycle, inter_token_latency
        self.turns = Turns()
        self.seated: ModelParts | None = None

    @contextmanager
    def idle(self) -> Iterator[ModelParts]:
        """The model's parts, reserved and kept in memory inside the block; no reply runs."""
        with self.turns.work(), self._lifecycle.acquire() as parts:
            yield parts

    @contextmanager
    def working(self) -> Iterator[ModelParts]:
        """The parts that the next reply is made with, while no reply uses them."""
        if self.seated is not None:
            yield self.seated
            return
        with self.idle() as parts:
            yield parts

    def start(self, request: GenerationRequest) -> TokenStream:
        return self.start_as(TokenStream, request)

    @allocating("The reply")
    def start_as(
        self, make: Callable[[ModelParts, GenerationRequest, Turns | None], StreamT], request: GenerationRequest
    ) -> StreamT:
        """Start a reply of a kind."""
        self.turns.require_idle()
        seated = self.seated  # another thread than the batch's was refused

        def finished(result: Result) -> None:
            self._lifecycle.leave()
            if request.on_finish is not None:
                request.on_finish(result)

        parts = self._lifecycle.take()
        try:
            parts.sequence.check([*request.prompt, *request.reply], request.draft)
            if seated is not None:
                require_shareable(request.config)
                seated.sequence.use_adapter(request.config.adapter)
            turns = self.turns if seated is None else None
            return make(seated or parts, replace(request, on_finish=finished), turns)
        except BaseException:
            self._lifecycle.leave()
            raise

    def batch(self, parallel: int, streamed: bool) -> ReplyBatch:
        """A batch, whose prompts take precedence over the time between tokens where those are not `streamed`."""
        latency = self._latency if streamed or self._latency is not None else math.inf
        return ReplyBatch(self.idle(), self, parallel, latency)

    def all(self, prompts: abc.Sequence[list[int]], config: ReplyOptions, parallel: int) -> list[Result]:
        """The replies to several prompts, made side by side."""
        require_shareable(config)
        if parallel < 1:
            raise UsageError(f"parallel={parallel} is out of range.", "Give 1 or more.")
        with closing(self.batch(parallel, streamed=False)) as batch:
            for prompt in prompts:
                batch.check(prompt)

            def reply(place: int) -> Callable[[], TokenStream]:
                return lambda: self.start(GenerationRequest(prompt=prompts[place], config=config))

            # Prompts with a common start come one after the other.
            order = sorted(range(len(prompts)), key=lambda place: prompts[place])
            results = dict(zip(order, batch.run(reply(place) for place in order), strict=True))
        return [results[place] for place in range(len(prompts))]
