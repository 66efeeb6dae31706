"""Replies of one model: one after another by turns, or side by side in passes that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, Protocol, TypeVar, cast

import numpy as np

from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.lifecycle import ModelParts
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.scheduler import Scheduler, sharing_backend
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS
from edgeinfer.runtime.kv_cache.prefix_cache import shared_length
from edgeinfer.runtime.system.forks import renewed_in_children


class Turn(Protocol):
    """A reply that runs, or waits for its turn."""

    @property
    def abandoned(self) -> bool:
        """Whether only the calling thread can still be reading it."""

    def close(self) -> None:
        """Finishes it now; it leaves the list by that."""

    def disown(self) -> None:
        """Leaves it to the process that this one is a fork of."""


class Turns:
    """Keeps the unfinished replies of a model, of which one runs at a time. Any thread may ask."""

    def __init__(self) -> None:
        self._running: Turn | None = None
        self._paused: list[Turn] = []
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Has no replies: they are its parent's, in the child of a fork."""
        for turn in (self._running, *self._paused):
            if turn is not None:
                turn.disown()
        self._lock = threading.RLock()  # a signal's handler may ask while its thread is in here
        self._running, self._paused = None, []
        self._worker: int | None = None  # the thread that has the model to itself, and how often
        self._works = 0

    @property
    def paused(self) -> bool:
        """Whether a reply waits to go on."""
        return bool(self._paused)

    def claim(self, turn: Turn) -> None:
        """Gives the turn to this reply."""
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
        """Pauses the reply whose turn it is, so that others can run."""
        with self._lock:
            if self._running is turn:
                self._running = None
                self._paused.append(turn)

    def leave(self, turn: Turn) -> None:
        """Takes a finished reply off the list."""
        with self._lock:
            if self._running is turn:
                self._running = None
            elif turn in self._paused:
                self._paused.remove(turn)

    def if_running(self, turn: Turn, act: Callable[[], None]) -> None:
        """Acts if it is this reply's turn, which lasts at least until that is done."""
        with self._lock:
            if self._running is turn:
                act()

    def require_idle(self) -> None:
        """Ends a running reply that was left unfinished; one that another thread may be reading is not touched."""
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
        """Reserves the model for work that is no user's reply: other threads start nothing before the block ends."""
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
        """Finishes all replies."""
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
    """What evaluates replies of a model in passes that they share; None where they cannot share any."""
    if parts.engine.context_shift is not None or parts.remote is not None:
        return None
    return sharing_backend(parts.engine.backend)


class Slot:
    """One sequence of a model, for one reply at a time beside others.

    Args:
        batch: that it belongs to.
        parts: of the model, with the sequence's own engine.

    Attributes:
        parts: as given.
        turns: of its replies.
        prompt: that its reply evaluates, or has evaluated; None where none has begun. (n,)
    """

    def __init__(self, batch: ReplyBatch, parts: ModelParts) -> None:
        self.parts = parts
        self.turns = Turns()
        self.prompt: Ints | None = None
        self._batch = batch

    def begin(self, prompt: Sequence[int], adapter: str | None = None) -> None:
        """Prepares for a reply: takes over what others hold of its prompt, and waits for what they will soon hold.

        Args:
            adapter: that it is made with.

        Raises:
            UsageError: the model was loaded without such an adapter.
        """
        wanted = np.array(prompt)
        self.parts.engine.use_adapter(adapter)
        others = [slot for slot in self._batch.others(self) if slot.parts.engine.adapter == adapter]
        least = _WORTH_WAITING
        while any(_coming(slot, wanted) >= least for slot in others):
            self._batch.scheduler.give_way()
            least = 1  # who waits has all of it evaluated once
        self.prompt = wanted
        engines = (self._batch.main_engine, *(slot.parts.engine for slot in others))
        self.parts.engine.borrow(max(engines, key=lambda engine: engine.shared(prompt)), prompt)

    def end(self) -> None:
        """The reply is over: its sequence keeps what it holds until the pages are needed."""
        self.prompt = None
        self.turns.close()


def _coming(other: Slot, wanted: Ints) -> int:  # (n,)
    """Counts the tokens of a prompt that another reply, whose prompt begins alike, is about to evaluate."""
    if other.prompt is None:
        return 0
    common = min(shared_length(other.prompt, wanted), len(other.prompt) - 1)
    return common - other.parts.engine.backend.cache.length


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How one of several replies ended.

    Attributes:
        place: of the reply, from 0.
        made: what it gave.
        error: that ended it; None where it gave something.
    """

    place: int
    made: T | None = None
    error: Exception | None = None

    def result(self) -> T:
        """What the reply gave."""
        if self.error is not None:
            raise self.error
        return cast(T, self.made)


class SlotThreads(threading.local):
    """Which slot the replies of a thread are made in.

    Attributes:
        slot: that of the calling thread; None where replies have the model to themselves.
    """

    slot: Slot | None = None

    @contextmanager
    def idle(self, model: Callable[[], AbstractContextManager[ModelParts]]) -> Iterator[ModelParts]:
        """The parts with which this thread works while none of its replies runs: its slot's, or those of the model."""
        if self.slot is None:
            with model() as parts:
                yield parts
        else:
            self.slot.turns.require_idle()
            yield self.slot.parts


class ReplyBatch:
    """Makes replies of one model side by side. All methods but `interrupt` are for the thread that made it.

    Args:
        model: gives the parts of the model, which no one else uses until the batch is closed.
        threads: by which the model knows the slot of a reply.
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
        self._free: list[Slot] = []  # the one that was left longest ago first
        self._busy: list[Slot] = []

    @property
    def main_engine(self) -> Engine:
        """That of the model itself, which rests meanwhile."""
        return self._main.engine

    @property
    def running(self) -> int:
        """Replies that are not over."""
        return self.scheduler.running

    @property
    def has_room(self) -> bool:
        """Whether another reply can begin."""
        return self.scheduler.running < self._parallel

    def others(self, slot: Slot) -> list[Slot]:
        """The other slots: of replies that are over first, then of those that are not, the oldest first."""
        return [other for other in (*self._free, *self._busy) if other is not slot]

    def add(self, work: Callable[[Slot], None]) -> None:
        """Adds work that makes one reply with the model, as if alone; it must not raise."""
        assert self.has_room, "who adds has looked"
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
        """Makes one reply after the other as there is room, and gives what they gave, in the same order.

        Raises:
            Exception: the first that a reply raised; the others are ended.
        """
        made = {outcome.place: outcome.result() for outcome in self.as_completed(makers)}
        return [made[place] for place in range(len(made))]

    def as_completed(self, makers: Iterable[Callable[[], T]]) -> Iterator[Outcome[T]]:
        """Makes one reply after the other as there is room, and gives each when it is over.

        Args:
            makers: each is asked for when there is room for its reply.
        """
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
        """Goes on until the replies wait for a pass, and runs it; returns whether replies are left."""
        return self.scheduler.step()

    def interrupt(self) -> None:
        """Has `step` return before another pass. Safe from any thread."""
        self.scheduler.interrupt()

    def close(self) -> None:
        """Ends all replies and lets others have the model."""
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
        return Slot(self, self._main.beside(engine, lambda: self.running))

    def _make_room(self, pages: int) -> None:
        """Lets go of rows of replies that are over, those used longest ago first, until so many pages are free."""
        for engine in (self._main.engine, *(slot.parts.engine for slot in self._free)):
            if self.scheduler.free_pages < pages and engine.backend.cache.length:
                engine.restart()
        while self.scheduler.free_pages < pages and self._main.engine.prefix_bytes:
            self._main.engine.evict_prefixes(self._main.engine.prefix_bytes - 1)
