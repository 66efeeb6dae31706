"""The thread that runs a model for event loops: replies share passes or take turns, with other work in between."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from edgeinfer.core.errors import EdgeInferError, UnshareableError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Chunk, Result
from edgeinfer.runtime.system.forks import renewed_in_children

if TYPE_CHECKING:
    from edgeinfer.batching import ReplyBatch
    from edgeinfer.generation import TokenStream
    from edgeinfer.runtime.planning.plan import MemoryPlan

T = TypeVar("T")


class ReplyQueue(Generic[T]):
    """Replies in the order of their turns, at most `parallel` of them running. Owners take turns, and so do the replies
    of each owner, so that asking for eight replies gives no advantage. The next reply to start is the oldest of the
    owner with the fewest running. Those of one conversation run one after the other."""

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._started: OrderedDict[str, deque[T]] = OrderedDict()
        self._waiting: list[tuple[str, T, object]] = []
        self._talks: list[tuple[T, object]] = []  # that run, with their conversations

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

    def add(self, owner: str, reply: T, conversation: object = None) -> None:
        self._waiting.append((owner, reply, conversation))
        self._fill()

    def next(self) -> T | None:
        """Return the reply whose turn it is and pass the turn on."""
        if not self._started:
            return None
        owner, replies = next(iter(self._started.items()))
        self._started.move_to_end(owner)
        replies.rotate(-1)
        return replies[-1]

    def remove(self, reply: T) -> bool:
        """Remove a reply; a waiting one may start in its place. Return whether it was waiting itself."""
        waited = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry[1] != reply]
        self._talks = [entry for entry in self._talks if entry[0] != reply]
        for owner, replies in self._started.items():
            if reply in replies:
                replies.remove(reply)
                if not replies:
                    del self._started[owner]
                break
        waited -= len(self._waiting)
        self._fill()
        return waited > 0

    def clear(self) -> list[T]:
        """Remove and return all replies."""
        every = [*self.started, *(entry[1] for entry in self._waiting)]
        self._started.clear()
        self._waiting.clear()
        self._talks.clear()
        return every

    def _fill(self) -> None:
        while self.running < self._parallel:
            talking = [conversation for _, conversation in self._talks]
            free = [entry for entry in self._waiting if not any(entry[2] is talk for talk in talking)]
            if not free:
                return
            entry = min(free, key=lambda each: len(self._started.get(each[0], ())))
            self._waiting.remove(entry)
            owner, reply, conversation = entry
            self._started.setdefault(owner, deque()).append(reply)
            if conversation is not None:
                self._talks.append((reply, conversation))


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


# What the reader of a reply gets: chunks, then the end or the error that ended it.
Item = Chunk | ReplyEnd | Exception


class SharedModel(Protocol):
    """The part of `edgeinfer.Model` that its thread uses."""

    @property
    def plan(self) -> MemoryPlan: ...

    @property
    def can_batch(self) -> bool: ...

    def reply_batch(self, parallel: int) -> ReplyBatch: ...


@dataclass(eq=False)
class Job:
    """A requested reply."""

    start: Callable[[Any], TokenStream]
    tell: Callable[[Item], object]  # returns False where it is read no more
    stream: TokenStream | None = None  # once it has started
    prepared: bool = False  # whether its prompt is evaluated
    cancelled: bool = False
    shares: bool = False  # whether it shares passes now
    alone: bool = False  # whether it needs the model for itself


class ModelThread:
    """Runs the replies of a model, at most `parallel` at once, on a thread that ends where nothing is left to do. A
    single reply has the model to itself, with drafts. Several share passes if the model can; so does a search, which
    cannot be paused. Replies that cannot share take turns before or after.

    Args:
        parallel: replies at once at most.
        model: gives the model; None where `take` does.
        daemon: as of `threading.Thread`; otherwise replies that cannot share are made whole, without turns.
    """

    def __init__(
        self, parallel: int, model: Callable[[], SharedModel | None] | None = None, *, daemon: bool = True
    ) -> None:
        self._most = self._parallel = parallel
        self._model = model or _no_model
        self._daemon = daemon
        self._switch_s = self._step_s = 0.0
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Start without a thread and without replies: in the child of a fork they belong to the parent."""
        self._lock = threading.RLock()  # a collector of garbage may cancel a reply while its thread is in here
        self.queue: ReplyQueue[Job] = ReplyQueue(self._parallel)
        self._thread: threading.Thread | None = None
        self._batch: ReplyBatch | None = None
        self._tasks: deque[Callable[[], None]] = deque()
        self._unpausable: Job | None = None  # cannot be paused: others run after it
        self._ends: list[tuple[Job, ReplyEnd | Exception]] = []  # of the latest turn

    @property
    def model(self) -> Any:
        return self._model()

    def take(self, model: SharedModel | None) -> None:
        """Run a model from now on, with as many replies at once as its plan allows, or none; on this thread only."""
        with self._lock:
            self._model = _no_model if model is None else lambda: model
            if model is not None:
                self._parallel = min(self._most, model.plan.parallel)
                self.queue.limit(self._parallel)

    def add(self, job: Job, owner: str = "", conversation: object = None) -> None:
        """Make a reply; those of one conversation are made one after the other, None is one of its own."""
        with self._lock:
            self.queue.add(owner, job, conversation)
            self._wake()

    def cancel(self, job: Job) -> None:
        """End a reply within its current pass, or before it begins. Safe from any thread."""
        with self._lock:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
            waited = job not in self.queue.started and self.queue.remove(job)
        if waited:
            job.tell(ReplyEnd(None))

    def do(self, task: Callable[[], None]) -> None:
        """Run a task between two turns."""
        with self._lock:
            self._tasks.append(task)
            self._wake()

    def cancel_shared(self) -> None:
        """Cancel the replies that share passes, as the model is closed."""
        with self._lock:
            for job in self.queue.started:
                if job.shares:
                    self.cancel(job)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; return whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _wake(self) -> None:
        if self._batch is not None:
            self._batch.interrupt()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edgeinfer-model", daemon=self._daemon)
            self._thread.start()

    def drop_replies(self) -> None:
        """End all replies; on this thread only."""
        with self._lock:
            jobs = self.queue.clear()
            self._unpausable = None
        for job in jobs:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
        self._close_batch()
        self._tell_ends()
        for job in jobs:
            if job.shares:  # it has ended and reported its end
                continue
            if job.stream is not None:
                job.stream.close()
            job.tell(ReplyEnd(None if job.stream is None else job.stream.result))

    def _run(self) -> None:
        while True:
            with self._lock:
                task = self._tasks.popleft() if self._tasks else None
                model = self._model() if task is None and self.queue.running else None
                if task is None and model is None:
                    self._thread = None
                    return
            try:
                if task is not None:
                    task()
                elif model is not None:
                    self._work_with(model)
                    self._tell_ends()
            except BaseException:
                with self._lock:
                    self._thread = None
                raise
            # Keep nothing alive while this thread works on.
            task = model = None

    def _work_with(self, model: SharedModel) -> None:
        """Run a shared pass, or the turn of one reply."""
        with self._lock:
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
                self._batch.add(self._shared_reply(job, model, self._batch))
        left = self._batch.step()
        for job in started:
            if job.shares and job.stream is not None and not job.stream.over:
                self._give(job, job.stream)
        if not left:
            self._close_batch()

    def _open_batch(self, model: SharedModel) -> ReplyBatch | None:
        """A batch for shared passes; None if the model cannot share or fails: each reply then reports why."""
        try:
            return model.reply_batch(self._parallel) if model.can_batch else None
        except EdgeInferError:
            return None

    def _close_batch(self) -> None:
        with self._lock:
            batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def _shared_reply(self, job: Job, model: SharedModel, batch: ReplyBatch) -> Generator[TokenStream, None, None]:
        """Run or continue a reply in a batch."""
        try:
            if job.stream is None:
                self._start(job, model)
            else:
                batch.join(job.stream)
            if job.stream is not None:
                yield job.stream
                self._give(job, job.stream)
            self._over(job)
        except UnshareableError:
            job.alone, job.shares = True, False
        except Exception as error:  # of any kind: it ends this reply only
            self._failed(job, error)

    def _start(self, job: Job, model: SharedModel) -> None:
        """Start the stream of a reply, unless it was cancelled."""
        if job.cancelled:
            return
        stream = job.start(model)
        with self._lock:
            job.stream = stream
            if job.cancelled:
                stream.cancel()

    def _give(self, job: Job, stream: TokenStream) -> None:
        """Hand on the chunks made so far; raises the error that ended the reply behind them."""
        while chunks := stream.take():
            for chunk in chunks:
                self._tell(job, chunk)

    def _tell(self, job: Job, chunk: Chunk) -> None:
        if job.tell(chunk) is False:
            self.cancel(job)

    def _turn(self, job: Job, model: SharedModel) -> None:
        """Run a reply until its turn or its text ends."""
        started = time.perf_counter()
        try:
            if job.stream is None:
                self._start(job, model)
                if job.stream is not None and job.stream.searches and job.stream.pause():
                    return  # more may arrive, so it shares passes from the beginning
            if job.stream is not None and self._work(job, job.stream, started):
                self._unpausable = None if job.stream.pause() else job
            else:
                self._over(job)
        except Exception as error:  # of any kind: it ends this reply only
            self._failed(job, error)

    def _work(self, job: Job, stream: TokenStream, started: float) -> bool:
        """Advance a reply; return whether more is to come."""
        while self._daemon and not job.prepared:
            job.prepared = stream.prepare(_PROMPT_TOKENS)
            if self._is_over(stream, started):
                return True
        step = time.perf_counter()
        first = True
        for chunk in stream:
            now = time.perf_counter()
            self._learn(now - step, first)
            step, first = now, False
            self._tell(job, chunk)
            if chunk.finish_reason is None and self._is_over(stream, started):
                return True
        return False

    def _learn(self, seconds: float, first: bool) -> None:
        """Learn the time of a step, and the extra time of the first step of a turn."""
        if first:
            self._switch_s += _WEIGHT * (max(0.0, seconds - self._step_s) - self._switch_s)
        elif seconds > _SAME_PASS * self._step_s:
            self._step_s += _WEIGHT * (seconds - self._step_s)

    def _is_over(self, stream: TokenStream, started: float) -> bool:
        """Whether a reply's turn is over."""
        if self._tasks:
            return True
        if self.queue.running < 2:
            return False
        if not self._daemon:
            return stream.shareable
        turn = max(_TURN_S, self._switch_s / _SWITCHING_SHARE)
        return time.perf_counter() - started >= turn

    def _failed(self, job: Job, error: Exception) -> None:
        if job.stream is not None:
            job.stream.close()
        # A reply that is cancelled before it starts, as while it reads contexts, has not failed.
        if job.stream is None and job.cancelled:
            self._over(job)
        else:
            self._over(job, error)

    def _over(self, job: Job, error: Exception | None = None) -> None:
        """Note that a reply is over; its reader hears of it after this turn, and may expect the model to be free."""
        end = ReplyEnd(None if job.stream is None else job.stream.result) if error is None else error
        with self._lock:
            self.queue.remove(job)
            if self._unpausable is job:
                self._unpausable = None
        self._ends.append((job, end))

    def _tell_ends(self) -> None:
        while self._ends:
            job, end = self._ends.pop(0)
            job.tell(end)


def _no_model() -> None:
    """What there is before one is loaded."""
