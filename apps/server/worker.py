"""The thread that runs a model: replies in slices by their turns, and whatever else is asked of it in between."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from edgeinfer import Chunk, Model, Result, TokenStream

__all__ = ["Job", "ModelThread", "ReplyEnd", "Scheduler"]

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Replies in the order of their turns.

    Owners take turns, and of each owner its replies, so that one who asks for eight replies gets no more than one who
    asks for one. At most `parallel` replies have started; of those that wait, the next to start belongs to the
    owner with the fewest, and of these the one that came first.

    Args:
        parallel: replies that take turns.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._started: OrderedDict[str, deque[T]] = OrderedDict()
        self._waiting: list[tuple[str, T]] = []

    @property
    def running(self) -> int:
        """Replies that have started."""
        return sum(map(len, self._started.values()))

    @property
    def waiting(self) -> int:
        """Replies that have not."""
        return len(self._waiting)

    def add(self, owner: str, reply: T) -> None:
        """Adds a reply that was asked for."""
        self._waiting.append((owner, reply))
        self._fill()

    def next(self) -> T | None:
        """Returns the reply whose turn it is and passes the turn on."""
        if not self._started:
            return None
        owner, replies = next(iter(self._started.items()))
        self._started.move_to_end(owner)
        replies.rotate(-1)
        return replies[-1]

    def remove(self, reply: T) -> None:
        """Removes a reply that is over; one that waits may start."""
        self._waiting = [(owner, other) for owner, other in self._waiting if other != reply]
        for owner, replies in self._started.items():
            if reply in replies:
                replies.remove(reply)
                if not replies:
                    del self._started[owner]
                break
        self._fill()

    def withdraw(self, reply: T) -> bool:
        """Removes a reply that waits; returns whether it did wait."""
        left = [(owner, other) for owner, other in self._waiting if other != reply]
        waited = len(left) < len(self._waiting)
        self._waiting = left
        return waited

    def clear(self) -> list[T]:
        """Removes and returns all replies."""
        every = [reply for replies in self._started.values() for reply in replies]
        every += [reply for _, reply in self._waiting]
        self._started.clear()
        self._waiting.clear()
        return every

    def _fill(self) -> None:
        while self._waiting and self.running < self._parallel:
            place = min(range(len(self._waiting)), key=lambda at: len(self._started.get(self._waiting[at][0], ())))
            owner, reply = self._waiting.pop(place)
            self._started.setdefault(owner, deque()).append(reply)


# Seconds of a turn. It lasts longer where taking turns would cost more than this share of it.
_TURN_S = 0.02
_SWITCHING_SHARE = 0.2
# Tokens of a prompt between two looks at the clock.
_PROMPT_TOKENS = 64
# Of a step's time: tokens that come sooner after another are of the same pass.
_SAME_PASS = 0.1
# By how much a new figure counts in a running mean.
_WEIGHT = 0.1


@dataclass(frozen=True)
class ReplyEnd:
    """A reply is over; without a result where it never began."""

    result: Result | None


@dataclass(eq=False)
class Job:
    """A reply that was asked for.

    Attributes:
        start: makes its stream.
        tell: takes its chunks, then ReplyEnd or the error that ended it.
        stream: once it has started.
        prepared: whether its prompt is evaluated.
        cancelled: whether it is to end.
    """

    start: Callable[[Model], TokenStream]
    tell: Callable[[Chunk | ReplyEnd | Exception], None]
    stream: TokenStream | None = None
    prepared: bool = False
    cancelled: bool = False


class ModelThread(threading.Thread):
    """Runs the replies of the model it is given.

    Args:
        parallel: replies that take turns; others wait.
    """

    def __init__(self, parallel: int) -> None:
        super().__init__(name="edgeinfer-model", daemon=True)
        self._scheduler: Scheduler[Job] = Scheduler(parallel)
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._unpausable: Job | None = None  # cannot be paused: no other runs before it is over
        self._switch_s = 0.0
        self._step_s = 0.0
        self.model: Model | None = None

    @property
    def running(self) -> int:
        """Replies that have started."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Replies that wait for others to end."""
        return self._scheduler.waiting

    def add(self, job: Job, owner: str) -> None:
        """Adds a reply to run."""
        with self._changed:
            self._scheduler.add(owner, job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a reply within its current pass, or before it begins. Safe from any thread."""
        with self._changed:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
            waited = self._scheduler.withdraw(job)
            self._changed.notify()
        if waited:
            job.tell(ReplyEnd(None))

    def do(self, task: Callable[[], None]) -> None:
        """Runs a task between two turns."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def end(self) -> None:
        """Ends the thread after the tasks that were added before."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def drop_replies(self) -> None:
        """Ends all replies; on this thread only."""
        with self._changed:
            jobs: Sequence[Job] = self._scheduler.clear()
            self._unpausable = None
        for job in jobs:
            if job.stream is not None:
                job.stream.close()
            job.tell(ReplyEnd(None if job.stream is None else job.stream.result))

    def run(self) -> None:
        """Works until `end`."""
        while True:
            with self._changed:
                while not (self._tasks or self._ending or self._runnable()):
                    self._changed.wait()
                task = self._tasks.popleft() if self._tasks else None
                if task is None and self._ending:
                    return
                job = None if task is not None else self._unpausable or self._scheduler.next()
            if task is not None:
                task()
            elif job is not None and self.model is not None:
                self._turn(job, self.model)
            # Nothing of a reply that is over is kept while this thread waits.
            task = job = None

    def _runnable(self) -> bool:
        return self.model is not None and self._scheduler.running > 0

    def _turn(self, job: Job, model: Model) -> None:
        """Runs a reply until its turn or its text is over."""
        started = time.perf_counter()
        try:
            if job.stream is None:
                if job.cancelled:
                    self._over(job, ReplyEnd(None))
                    return
                stream = job.start(model)
                with self._changed:
                    job.stream = stream
                    if job.cancelled:
                        stream.cancel()
            if self._work(job, job.stream, started):
                self._unpausable = None if job.stream.pause() else job
            else:
                self._over(job, ReplyEnd(job.stream.result))
        except Exception as error:  # whatever it is, it is this reply's, and the others go on
            if job.stream is not None:
                job.stream.close()
            self._over(job, error)

    def _work(self, job: Job, stream: TokenStream, started: float) -> bool:
        """Lets a reply run; returns whether there is more of it."""
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
        """Learns what a step takes, and what taking turns adds to the first step of a turn."""
        if first:
            self._switch_s += _WEIGHT * (max(0.0, seconds - self._step_s) - self._switch_s)
        elif seconds > _SAME_PASS * self._step_s:
            self._step_s += _WEIGHT * (seconds - self._step_s)

    def _is_over(self, started: float) -> bool:
        if self._tasks or self._ending:
            return True
        turn = max(_TURN_S, self._switch_s / _SWITCHING_SHARE)
        return self._scheduler.running > 1 and time.perf_counter() - started >= turn

    def _over(self, job: Job, end: ReplyEnd | Exception) -> None:
        with self._changed:
            self._scheduler.remove(job)
            if self._unpausable is job:
                self._unpausable = None
        job.tell(end)
