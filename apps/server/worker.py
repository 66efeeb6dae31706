"""The thread that runs a model: replies share passes or take turns, with other work in between."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from edgeinfer.core.errors import EdgeInferError, UnshareableError

if TYPE_CHECKING:
    from edgeinfer import Chunk, Model, ReplyBatch, Result, Slot, TokenStream


T = TypeVar("T")


class ReplyQueue(Generic[T]):
    """Replies in the order of their turns, at most `parallel` of them running. Owners take turns, and so do the replies
    of each owner, so that asking for eight replies gives no advantage. The next reply to start is the oldest of the
    owner with the fewest running."""

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._started: OrderedDict[str, deque[T]] = OrderedDict()
        self._waiting: list[tuple[str, T]] = []

    @property
    def running(self) -> int:
        return sum(map(len, self._started.values()))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def started(self) -> list[T]:
        """Running replies in the order of their turns."""
        return [reply for replies in self._started.values() for reply in replies]

    def limit(self, parallel: int) -> None:
        """Change how many replies may run."""
        self._parallel = parallel
        self._fill()

    def add(self, owner: str, reply: T) -> None:
        self._waiting.append((owner, reply))
        self._fill()

    def next(self) -> T | None:
        """Return the reply whose turn it is and pass the turn on."""
        if not self._started:
            return None
        owner, replies = next(iter(self._started.items()))
        self._started.move_to_end(owner)
        replies.rotate(-1)
        return replies[-1]

    def remove(self, reply: T) -> None:
        """Remove a finished reply; a waiting one may start."""
        self._waiting = [(owner, other) for owner, other in self._waiting if other != reply]
        for owner, replies in self._started.items():
            if reply in replies:
                replies.remove(reply)
                if not replies:
                    del self._started[owner]
                break
        self._fill()

    def withdraw(self, reply: T) -> bool:
        """Remove a waiting reply; return whether it was waiting."""
        left = [(owner, other) for owner, other in self._waiting if other != reply]
        waited = len(left) < len(self._waiting)
        self._waiting = left
        return waited

    def clear(self) -> list[T]:
        """Remove and return all replies."""
        every = self.started
        every += [reply for _, reply in self._waiting]
        self._started.clear()
        self._waiting.clear()
        return every

    def _fill(self) -> None:
        while self._waiting and self.running < self._parallel:
            place = min(range(len(self._waiting)), key=lambda at: len(self._started.get(self._waiting[at][0], ())))
            owner, reply = self._waiting.pop(place)
            self._started.setdefault(owner, deque()).append(reply)


# Seconds of a turn; longer if switching would cost more than this share of it.
_TURN_S = 0.02
_SWITCHING_SHARE = 0.2
# Prompt tokens evaluated between two checks of the clock.
_PROMPT_TOKENS = 64
# Share of a step's time: tokens that follow each other faster are of the same pass.
_SAME_PASS = 0.1
# Weight of a new value in a running mean.
_WEIGHT = 0.1


@dataclass(frozen=True)
class ReplyEnd:
    """The end of a reply; without a result if it never began."""

    result: Result | None


@dataclass(eq=False)
class Job:
    """A requested reply."""

    start: Callable[[Model], TokenStream]
    tell: Callable[[Chunk | ReplyEnd | Exception], None]  # takes chunks, then ReplyEnd or the error that ended it
    stream: TokenStream | None = None  # once it has started
    prepared: bool = False  # whether its prompt is evaluated
    cancelled: bool = False
    shares: bool = False  # whether it shares passes now
    alone: bool = False  # whether it needs the model for itself


class ModelThread(threading.Thread):
    """Runs the replies of a model, at most `parallel` at once. A single reply has the model to itself, with drafts.
    Several share passes if the model can; so does a search, which cannot be paused. Replies that cannot share take
    turns before or after."""

    def __init__(self, parallel: int) -> None:
        super().__init__(name="edgeinfer-model", daemon=True)
        self.queue: ReplyQueue[Job] = ReplyQueue(parallel)
        self._most = self._parallel = parallel
        self._batch: ReplyBatch | None = None
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._unpausable: Job | None = None  # cannot be paused: others run after it
        self._switch_s = 0.0
        self._step_s = 0.0
        self.model: Model | None = None

    def take(self, model: Model) -> None:
        """Run a model from now on, with as many replies at once as its plan allows; on this thread only."""
        with self._changed:
            self._parallel = min(self._most, model.plan.parallel)
            self.queue.limit(self._parallel)
            self.model = model

    def add(self, job: Job, owner: str) -> None:
        with self._changed:
            self.queue.add(owner, job)
            self._wake()

    def cancel(self, job: Job) -> None:
        """End a reply within its current pass, or before it begins. Safe from any thread."""
        with self._changed:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
            waited = self.queue.withdraw(job)
            self._changed.notify()
        if waited:
            job.tell(ReplyEnd(None))

    def do(self, task: Callable[[], None]) -> None:
        """Run a task between two turns."""
        with self._changed:
            self._tasks.append(task)
            self._wake()

    def end(self) -> None:
        """End the thread after the tasks added before."""
        with self._changed:
            self._ending = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify()
        if self._batch is not None:
            self._batch.interrupt()

    def drop_replies(self) -> None:
        """End all replies; on this thread only."""
        with self._changed:
            jobs: Sequence[Job] = self.queue.clear()
            self._unpausable = None
        for job in jobs:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
        self._close_batch()
        for job in jobs:
            if job.shares:  # it has ended and reported its end
                continue
            if job.stream is not None:
                job.stream.close()
            job.tell(ReplyEnd(None if job.stream is None else job.stream.result))

    def run(self) -> None:
        """Work until `end`."""
        while True:
            with self._changed:
                while not (self._tasks or self._ending or (self.model is not None and self.queue.running)):
                    self._changed.wait()
                task = self._tasks.popleft() if self._tasks else None
                if task is None and self._ending:
                    return
            if task is not None:
                task()
            elif self.model is not None:
                self._work_with(self.model)
            # Keep nothing alive while this thread waits.
            task = None

    def _work_with(self, model: Model) -> None:
        """Run a shared pass, or the turn of one reply."""
        with self._changed:
            started = self.queue.started
        for job in started:
            # A reply that began in a batch stays in it, even with contexts, which keep others from joining.
            job.alone = job.alone or not (job.shares or job.stream is None or job.stream.shareable)
        waiting = any(job.alone for job in started)
        if self._batch is None and self._unpausable is None:
            searches = any(job.stream is not None and job.stream.searches for job in started)
            # While a reply waits for the model, none joins a batch, which would otherwise never end.
            if (len(started) > 1 or searches) and not waiting:
                self._batch = self._open_batch(model)
        if self._batch is None:
            if (turn := self._unpausable or self.queue.next()) is not None:
                self._turn(turn, model)
            return
        for job in started:
            if not (job.shares or waiting) and self._batch.has_room:
                job.shares = True
                self._batch.add(self._shared_reply(job, model))
        if not self._batch.step():
            self._close_batch()

    def _open_batch(self, model: Model) -> ReplyBatch | None:
        """A batch for shared passes; None if the model cannot share or fails: each reply then reports why."""
        try:
            return model.reply_batch(self._parallel) if model.can_batch else None
        except EdgeInferError:
            return None

    def _close_batch(self) -> None:
        with self._changed:
            batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def _shared_reply(self, job: Job, model: Model) -> Callable[[Slot], None]:
        """Make the function that runs or continues a reply in a batch."""

        def make(slot: Slot) -> None:
            try:
                if job.stream is None:
                    self._start(job, model)
                else:
                    job.stream.move(slot.parts, slot.turns)
                if job.stream is None:
                    self._over(job, ReplyEnd(None))
                    return
                for chunk in job.stream:
                    job.tell(chunk)
                self._over(job, ReplyEnd(job.stream.result))
            except UnshareableError:
                job.alone, job.shares = True, False
            except Exception as error:  # of any kind: it ends this reply only
                self._failed(job, error)

        return make

    def _start(self, job: Job, model: Model) -> None:
        """Start the stream of a reply, unless it was cancelled."""
        if job.cancelled:
            return
        stream = job.start(model)
        with self._changed:
            job.stream = stream
            if job.cancelled:
                stream.cancel()

    def _turn(self, job: Job, model: Model) -> None:
        """Run a reply until its turn or its text ends."""
        started = time.perf_counter()
        try:
            if job.stream is None:
                self._start(job, model)
                if job.stream is not None and job.stream.searches and job.stream.pause():
                    return  # more may arrive, so it shares passes from the beginning
            if job.stream is None:
                self._over(job, ReplyEnd(None))
            elif self._work(job, job.stream, started):
                self._unpausable = None if job.stream.pause() else job
            else:
                self._over(job, ReplyEnd(job.stream.result))
        except Exception as error:  # of any kind: it ends this reply only
            self._failed(job, error)

    def _work(self, job: Job, stream: TokenStream, started: float) -> bool:
        """Advance a reply; return whether more is to come."""
        while not job.prepared:
            job.prepared = stream.prepare(_PROMPT_TOKENS)
            if self._is_over(started):
                return True
        step = time.perf_counter()
        first = True
        for chunk in stream:
            now = time.perf_counter()
            self._learn(now - step, first)
            step, first = now, False
            job.tell(chunk)
            if chunk.finish_reason is None and self._is_over(started):
                return True
        return False

    def _learn(self, seconds: float, first: bool) -> None:
        """Learn the time of a step, and the extra time of the first step of a turn."""
        if first:
            self._switch_s += _WEIGHT * (max(0.0, seconds - self._step_s) - self._switch_s)
        elif seconds > _SAME_PASS * self._step_s:
            self._step_s += _WEIGHT * (seconds - self._step_s)

    def _is_over(self, started: float) -> bool:
        if self._tasks or self._ending:
            return True
        turn = max(_TURN_S, self._switch_s / _SWITCHING_SHARE)
        return self.queue.running > 1 and time.perf_counter() - started >= turn

    def _failed(self, job: Job, error: Exception) -> None:
        if job.stream is not None:
            job.stream.close()
        # A reply that is cancelled before it starts, as while it reads contexts, has not failed.
        self._over(job, ReplyEnd(None) if job.stream is None and job.cancelled else error)

    def _over(self, job: Job, end: ReplyEnd | Exception) -> None:
        with self._changed:
            self.queue.remove(job)
            if self._unpausable is job:
                self._unpausable = None
        job.tell(end)
