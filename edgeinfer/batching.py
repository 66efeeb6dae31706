"""Replies of one model: one after another by turns, or side by side in passes that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, Protocol, TypeVar, cast

import numpy as np

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.lifecycle import ModelParts
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.scheduler import Scheduler, sharing_backend
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from edgeinfer.runtime.system.forks import renewed_in_children


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


def batch_backend(parts: ModelParts) -> Backend | None:
    """The backend that evaluates several replies per pass; None where replies cannot share passes."""
    if parts.engine.context_shift is not None or parts.remote is not None:
        return None
    return sharing_backend(parts.engine.backend)


class Slot:
    """One sequence of a model, for one reply at a time while other slots make theirs.

    Attributes:
        parts: the model's, with the sequence's own engine.
        turns: turns of its replies.
        prompt: the prompt of its reply; None where no reply has started. (n,)
    """

    def __init__(self, batch: ReplyBatch, parts: ModelParts) -> None:
        self.parts = parts
        self.turns = Turns()
        self.prompt: Ints | None = None
        self._batch = batch

    def begin(self, prompt: Sequence[int], adapter: str | None = None) -> None:
        """Prepare for a reply: take over the rows of its prompt that other slots hold, and wait for those that they are
        about to evaluate. UsageError where the model has no such adapter."""
        wanted = np.array(prompt)
        self.parts.engine.use_adapter(adapter)
        others = [slot for slot in self._batch.others(self) if slot.parts.engine.adapter == adapter]
        least = _WORTH_WAITING
        while any(_coming(slot, wanted) >= least for slot in others):
            self._batch.scheduler.give_way()
            least = 1  # once it waits, all common tokens are evaluated only once
        self.prompt = wanted
        engines = (self._batch.main_engine, *(slot.parts.engine for slot in others))
        self.parts.engine.borrow(max(engines, key=lambda engine: engine.shared(prompt)), prompt)

    def end(self) -> None:
        """End the reply; its sequence keeps its rows until the pages are needed."""
        self.prompt = None
        self.turns.close()


def _coming(other: Slot, wanted: Ints) -> int:  # (n,)
    """Count the leading tokens of a prompt that another reply is about to evaluate too."""
    if other.prompt is None:
        return 0
    common = min(shared_length(other.prompt, wanted), len(other.prompt) - 1)
    return common - other.parts.engine.backend.cache.length


@dataclass(frozen=True)
class Outcome(Generic[T]):
    place: int  # index of the reply
    made: T | None = None  # its result
    error: Exception | None = None  # the error that ended it; None where there is a result

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.made)


class SlotThreads(threading.local):
    """The slot of the calling thread; None where its replies have the model to themselves."""

    slot: Slot | None = None

    @contextmanager
    def idle(self, model: Callable[[], AbstractContextManager[ModelParts]]) -> Iterator[ModelParts]:
        """The parts to work with while no reply of this thread runs: its slot's, or the model's."""
        if self.slot is None:
            with model() as parts:
                yield parts
        else:
            self.slot.turns.require_idle()
            yield self.slot.parts


class ReplyBatch:
    """Makes replies of one model side by side. All methods but `interrupt` are for the thread that made it.

    Args:
        model: yields the parts of the model, which are reserved until the batch is closed.
        threads: tells the model which slot a thread's replies are made in.
        parallel: replies side by side at most.
        inter_token_latency: as `PromptShare` takes it.

    Raises:
        CapabilityError: replies of this model cannot share passes.
        UsageError: another thread runs a reply, or works with the model.
    """

    def __init__(
        self,
        model: AbstractContextManager[ModelParts],
        threads: SlotThreads,
        parallel: int,
        inter_token_latency: float | None,
    ) -> None:
        self._threads = threads
        self._open = ExitStack()
        parts = self._open.enter_context(model)
        backend = batch_backend(parts)
        if backend is None:
            self._open.close()
            message = f"Replies of {parts.info.name} cannot share passes here."
            hint = "That takes a bundle with a paged cache, the native kernel, no context shift and no remote server."
            raise CapabilityError(message, hint)
        self._main = parts
        self._parallel = parallel
        self.scheduler = Scheduler(
            backend,
            parts.engine.chunk,
            inter_token_latency=inter_token_latency,
            make_room=self._make_room,
            pass_ms=lambda: parts.speculator.pass_ms,
            draft_rows=parts.speculator.most or VERIFIED_ROWS,
            on_pass_ms=parts.speculator.observe_pass,
        )
        self._free: list[Slot] = []  # least recently used first
        self._busy: list[Slot] = []

    @property
    def main_engine(self) -> Engine:
        """The engine of the model itself, which rests meanwhile."""
        return self._main.engine

    @property
    def running(self) -> int:
        """How many replies are not finished."""
        return self.scheduler.running

    @property
    def has_room(self) -> bool:
        """Whether another reply can start."""
        return self.scheduler.running < self._parallel

    def others(self, slot: Slot) -> list[Slot]:
        """The other slots: free ones first, then busy ones, oldest first."""
        return [other for other in (*self._free, *self._busy) if other is not slot]

    def add(self, work: Callable[[Slot], None]) -> None:
        """Add work that makes one reply with the model as if alone; it must not raise."""
        assert self.has_room, "the caller checks has_room"
        slot = self._free.pop(0) if self._free else self._new_slot()
        self._busy.append(slot)

        def run() -> None:
            self._threads.slot = slot
            try:
                work(slot)
            finally:
                self._busy.remove(slot)
                slot.end()
                self._free.append(slot)

        self.scheduler.start(run)

    def run(self, makers: Iterable[Callable[[], T]]) -> list[T]:
        """Make replies as there is room, and return their results in the same order. The first error that one raises
        ends the others, and is raised."""
        made = {outcome.place: outcome.result() for outcome in self.as_completed(makers)}
        return [made[place] for place in range(len(made))]

    def as_completed(self, makers: Iterable[Callable[[], T]]) -> Iterator[Outcome[T]]:
        """Make replies as there is room, taking makers one by one, and yield each when it is finished."""
        over: list[Outcome[T]] = []

        def work(place: int, make: Callable[[], T]) -> Callable[[Slot], None]:
            def run(slot: Slot) -> None:
                try:
                    over.append(Outcome(place, make()))
                except Exception as error:  # raised on the caller's thread
                    over.append(Outcome(place, error=error))

            return run

        waiting = enumerate(makers)
        left = True
        while left:
            while self.has_room and (entry := next(waiting, None)) is not None:
                self.add(work(*entry))
            left = self.running > 0
            if left:
                self.step()
            while over:
                yield over.pop(0)

    def step(self) -> bool:
        """Run the replies until all wait for a pass, and run that; return whether replies are left."""
        return self.scheduler.step()

    def interrupt(self) -> None:
        """Make `step` return before another pass. Safe from any thread."""
        self.scheduler.interrupt()

    def close(self) -> None:
        try:
            self.scheduler.close()
            for slot in self._free:
                slot.parts.engine.restart()
        finally:
            self._free.clear()
            self._open.close()

    def _new_slot(self) -> Slot:
        main = self._main.engine
        sequence = self.scheduler.new_sequence(main.backend.cache.capacity)
        engine = Engine(sequence, main.chunk, prefixes=main.prefixes)
        return Slot(self, self._main.for_sequence(engine, lambda: self.running))

    def _make_room(self, pages: int) -> None:
        """Drop rows of finished replies, least recently used first, until so many pages are free."""
        for engine in (self._main.engine, *(slot.parts.engine for slot in self._free)):
            if self.scheduler.free_pages < pages and engine.backend.cache.length:
                engine.restart()
        while self.scheduler.free_pages < pages and self._main.engine.prefix_bytes:
            self._main.engine.evict_prefixes(self._main.engine.prefix_bytes - 1)
