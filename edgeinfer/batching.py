"""Replies of one model: one after another by turns, or side by side in passes that they share."""

from __future__ import annotations

import threading
from collections import abc
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Result
from edgeinfer.lifecycle import ModelParts
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.decoding.scheduler import shares_passes
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS
from edgeinfer.runtime.decoding.strategy import Evaluate, Passes
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from edgeinfer.runtime.system.forks import renewed_in_children

if TYPE_CHECKING:
    from edgeinfer.generation import TokenStream


class Turn(Protocol):
    """A reply that runs or waits for its turn."""

    @property
    def abandoned(self) -> bool:
        """Whether only the calling thread can still be reading it."""

    def close(self) -> None:
        """Finish it now, which takes it off the list."""

    def disown(self) -> None:
        """Leave it to the parent of this forked process."""


class Turns:
    """The unfinished replies of a model, of which one runs at a time. Safe from any thread."""

    def __init__(self) -> None:
        self._running: Turn | None = None
        self._paused: list[Turn] = []
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Start without replies: in the child of a fork they belong to the parent."""
        for turn in (self._running, *self._paused):
            if turn is not None:
                turn.disown()
        self._lock = threading.RLock()  # a signal handler may call while its thread is in here
        self._running, self._paused = None, []
        self._worker: int | None = None  # the thread that has the model to itself, and how often
        self._works = 0

    @property
    def paused(self) -> bool:
        """Whether a reply waits to go on."""
        return bool(self._paused)

    def claim(self, turn: Turn) -> None:
        with self._lock:
            if self._running is turn:
                return
            self._require_own()
            if self._running is not None:
                raise UsageError("Another reply of this model is running.", "Pause, finish or close its stream first.")
            self._running = turn
            if turn in self._paused:
                self._paused.remove(turn)

    def pause(self, turn: Turn) -> None:
        """Pause the running reply, so that others can run."""
        with self._lock:
            if self._running is turn:
                self._running = None
                self._paused.append(turn)

    def leave(self, turn: Turn) -> None:
        with self._lock:
            if self._running is turn:
                self._running = None
            elif turn in self._paused:
                self._paused.remove(turn)

    def if_running(self, turn: Turn, act: Callable[[], None]) -> None:
        """Call `act` if it is this reply's turn; the turn lasts at least until then."""
        with self._lock:
            if self._running is turn:
                act()

    def require_idle(self) -> None:
        """End a running reply that was left unfinished; refuse where another thread may be reading it."""
        with self._lock:
            self._require_own()
            running = self._running
        if running is None:
            return
        if not running.abandoned:
            raise UsageError("Another thread is running a reply of this model.", "Finish or close its stream first.")
        running.close()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Reserve the model for work other than replies: other threads start nothing before the block ends."""
        self.require_idle()
        with self._lock:
            self._require_own()
            if self._running is not None and self._worker is None:
                raise UsageError("Another reply of this model is running.", "Pause, finish or close its stream first.")
            self._worker = threading.get_ident()
            self._works += 1
        try:
            yield
        finally:
            with self._lock:
                self._works -= 1
                if not self._works:
                    self._worker = None

    def close(self) -> None:
        with self._lock:
            turns = (self._running, *self._paused)
        for turn in turns:
            if turn is not None:
                turn.close()

    def _require_own(self) -> None:
        if self._worker not in (None, threading.get_ident()):
            raise UsageError("Another thread is working with this model.", "Wait for it, or load the model twice.")


T = TypeVar("T")

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


class Seat:
    """What replies that the thread of a batch starts are made with: the model's own sequence, or one of several."""

    parts: ModelParts | None = None

    @contextmanager
    def idle(self, model: Callable[[], AbstractContextManager[ModelParts]]) -> Iterator[ModelParts]:
        """The parts to work with while no reply uses them."""
        if self.parts is None:
            with model() as parts:
                yield parts
        else:
            yield self.parts


# Makes a reply, or several one after the other: yields each stream that it starts, and goes on when that is over.
Making = Generator["TokenStream", None, T]


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
        seat: tells the model which sequence replies are made in.
        parallel: replies side by side at most.
        inter_token_latency: as `PromptShare` takes it.

    Raises:
        CapabilityError: replies of this model cannot share passes.
        UsageError: another thread runs a reply, or works with the model.
    """

    def __init__(
        self, model: AbstractContextManager[ModelParts], seat: Seat, parallel: int, inter_token_latency: float | None
    ) -> None:
        self._seat = seat
        self._open = ExitStack()
        self._main = parts = self._open.enter_context(model)
        if not can_share(parts):
            self._open.close()
            message = f"Replies of {parts.info.name} cannot share passes here."
            hint = "That takes a bundle with a paged cache, the native kernel, no context shift and no remote server."
            raise CapabilityError(message, hint)
        self._parallel = parallel
        self._scheduler = parts.scheduler
        self._scheduler.share(
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
        assert self._seat.parts is not None, "only work that was added has one"
        stream.move(self._seat.parts)
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
        self._scheduler.step()
        for place in tuple(self._busy):
            if place.stream is not None and place.stream.over:
                self._go_on(place)
        return bool(self._busy)

    def interrupt(self) -> None:
        """Make `step` return before another pass. Safe from any thread."""
        self._scheduler.interrupt()

    def close(self) -> None:
        try:
            self._scheduler.close()
            for place in tuple(self._busy):
                self._end(place)
            for place in self._free:
                place.parts.sequence.restart()
        finally:
            self._free.clear()
            self._busy.clear()
            self._scheduler.unshare()
            self._open.close()

    def _go_on(self, place: _Place) -> None:
        """Let work start its next reply."""
        assert place.work is not None, "the place is busy"
        place.stream = place.prompt = None
        before, self._seat.parts = self._seat.parts, place.parts
        try:
            place.stream = next(place.work, None)
        finally:
            self._seat.parts = before
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
