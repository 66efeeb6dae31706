"""Continuous batching: sequences that are decoded side by side, whose rows share the passes of one model.

Each sequence is decoded by a task: ordinary code, on a thread of its own, that asks `SequenceBackend.forward` for
passes. Tasks run one at a time, and only while the scheduler lets them, so what they share needs no locks. Once all of
them wait for rows, one pass evaluates the rows of all; a prompt's are cut to what the others can wait for, and the rest
follows in later passes (Sarathi-Serve, Agrawal et al. 2024). A row's bits depend on its own text alone, so every
sequence decodes what it would alone.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import (
    Backend,
    Pass,
    PassCancelledError,
    PassResult,
    PreemptedError,
    RotatingBackend,
    TogetherBackend,
    adapter_place,
    check_pass,
)
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.backends.wrapped import WrappedBackend, uncounted
from edgeinfer.runtime.decoding.shares import PromptShare, draft_rows


class RowRequest:
    """Rows of one sequence that a task waits for: its batch, rows evaluated so far, and the passes' outputs. The last
    output is a view until `keep`. A prompt's rows may be cut into several passes; drafts may be cut."""

    def __init__(self, cache: PagedCache, batch: Pass) -> None:
        self.cache, self.batch = cache, batch
        self.fed = 0
        self.parts: list[PassResult] = []
        self._kept = True  # nothing of them is a view
        self.error: BaseException | None = None
        self.can_wait = batch.is_chain and len(batch.rows) < len(batch.tokens)

    @property
    def left(self) -> int:
        return len(self.batch.tokens) - self.fed

    @property
    def over(self) -> bool:
        return self.error is not None or not self.left

    def cut(self, rows: int) -> None:
        """Drop a draft's rows beyond this number."""
        batch = self.batch
        if rows < len(batch.tokens):
            tree = None if batch.tree is None else batch.tree[:rows]
            gains = None if batch.gains is None else batch.gains[:rows]
            self.batch = dataclasses.replace(self.next_rows(rows), tree=tree, gains=gains)

    def next_rows(self, count: int) -> Pass:
        """The next rows, as a pass's input."""
        batch, start, stop = self.batch, self.fed, self.fed + count
        if count == len(batch.tokens):
            return batch
        wanted: Ints = batch.rows[(batch.rows >= start) & (batch.rows < stop)] - start
        return dataclasses.replace(
            batch,
            tokens=batch.tokens[start:stop],
            positions=batch.positions[start:stop],
            rows=wanted,
            hidden=None if batch.hidden is None else batch.hidden[start:stop],
            tapped=None if batch.tapped is None else batch.tapped[start:stop],
        )

    def take(self, output: PassResult, count: int) -> None:
        """Store a pass's output for the next rows."""
        self.fed += count
        self.parts.append(output)
        self._kept = False

    def keep(self) -> None:
        if not self._kept:
            self.parts[-1] = self.parts[-1].copy()
            self._kept = True

    def output(self) -> PassResult:
        """Join the output of all passes; of a single one a view that the next pass overwrites."""
        if len(self.parts) == 1:
            return self.parts[0]
        hidden = [part.hidden for part in self.parts if part.hidden is not None]
        experts = [part.experts for part in self.parts if part.experts is not None]
        tapped = [part.tapped for part in self.parts if part.tapped is not None]
        return PassResult(
            np.concatenate([part.logits for part in self.parts]),
            np.concatenate(hidden) if hidden else None,
            np.concatenate(experts, axis=1) if experts else None,
            np.concatenate(tapped) if tapped else None,
        )


class SequenceTask:
    """Work on a thread of its own that runs only while the scheduler lets it; `requests` are the rows it waits for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.over = False
        self.requests: tuple[RowRequest, ...] = ()
        self._work = work
        # Whose turn it is these tell, so that an interrupt between any two steps of the caller loses none. Locks only
        # wake who waits to look; they do without the queues of a semaphore, which is written in Python.
        self._turns_given = self._turns_over = 0
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="edgeinfer-sequence", daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        return not all(request.over for request in self.requests)

    def outputs(self) -> list[PassResult]:
        """Outputs of the rows that the task waited for."""
        requests, self.requests = self.requests, ()
        error = next((request.error for request in requests if request.error is not None), None)
        if error is None:
            return [request.output() for request in requests]
        del requests
        try:
            raise error
        finally:
            del error  # the frames of its traceback hold pages, and would wait for the collection of a circle

    def fail(self, error: BaseException) -> None:
        """End the wait for rows with an error."""
        for request in self.requests:
            request.error = error

    def resume(self) -> None:
        """Run the task until it waits for rows or ends; after an interrupt call `finish_turn`."""
        self._turns_given = self._turns_over + 1
        self.finish_turn()
        if self.over:
            self._thread.join()

    def finish_turn(self) -> None:
        """Wait until a resumed task waits for rows or ends."""
        while self._turns_over < self._turns_given:
            _wake(self._turn)
            self._back.acquire()

    def wait(self) -> None:
        """Wait for the next turn, on the task's own thread."""
        self._end_turn()
        self._await_turn()

    def _await_turn(self) -> None:
        while self._turns_over == self._turns_given:
            self._turn.acquire()

    def _end_turn(self) -> None:
        self._turns_over = self._turns_given
        _wake(self._back)

    def _run(self) -> None:
        self._await_turn()
        try:
            self._work()
        finally:
            self.over = True
            self._work = _nothing  # what it refers to need not wait for the thread's end
            self._end_turn()


def _wake(waiting: threading.Lock) -> None:
    """Wake the thread that waits for a lock; only one side ever does so."""
    if waiting.locked():
        waiting.release()


def _nothing() -> None:
    """What a task that is over does."""


class SequenceBackend(WrappedBackend[Backend]):
    """Implements `contract.Backend` for one sequence of several, whose passes the scheduler shares among them."""

    def __init__(self, scheduler: Scheduler, backend: Backend, cache: PagedCache) -> None:
        super().__init__(backend)
        self._scheduler = scheduler
        self._own = cache

    @property
    def cache(self) -> PagedCache:
        return self._own

    def use_adapter(self, name: str | None) -> None:
        self._own.adapter = adapter_place(self.adapters, name)

    @property
    def batch_size(self) -> int:
        return self._scheduler.batch_size

    @property
    def free_pages(self) -> int:
        return self._scheduler.free_pages

    def new_sequence(self, capacity: int) -> PagedCache:
        return self._scheduler.new_sequence(capacity).cache

    def forward(self, batch: Pass) -> PassResult:
        """Evaluate a pass together with rows of other sequences."""
        return self.forward_together([(self._own, batch)])[0]

    def forward_together(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        """Evaluate several sequences of one reply, together with those of others."""
        for cache, batch in sequences:
            check_pass(self._inner, batch, cache)
        return self.forward_checked(sequences)

    def forward_checked(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        return self._scheduler.evaluate(self, sequences)

    def cancel(self) -> None:
        """End the wait for rows; a shared pass runs to its end."""
        self._scheduler.cancel(self)

    def nbytes(self) -> dict[str, int]:
        """Return nothing: the pages are the pool's."""
        return {"kv": 0, "buffers": 0}

    def close(self) -> None:
        """Free the pages; the backend is shared."""
        self._own.trim(0)


class Scheduler:
    """Runs tasks side by side, and the passes that they wait for.

    Args:
        backend: that evaluates several sequences in one pass, and itself.
        prompt_rows: rows of prompts in a pass at most, besides rows of sequences that are being decoded.
        inter_token_latency: as `PromptShare` takes it.
        make_room: lets go of kept prefixes until so many pages are free, or none is left.
        pass_ms: gives the milliseconds of a pass by its rows, by which drafts are cut to what pays; or None where that
            is not known, which leaves them whole.
        draft_rows: rows of drafts in a pass that is shared at most.
        on_pass_ms: is called with the rows of a pass without prompts, and its milliseconds.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_rows: int,
        *,
        inter_token_latency: float | None,
        make_room: Callable[[int], None],
        pass_ms: Callable[[], Callable[[int], float] | None],
        draft_rows: int,
        on_pass_ms: Callable[[int, float], None],
    ) -> None:
        assert isinstance(backend, TogetherBackend), "sequences cannot share its passes"
        self._backend = backend
        self._together: TogetherBackend = backend
        self._prompt_rows = prompt_rows
        self._share = PromptShare(prompt_rows, inter_token_latency)
        self._make_room = make_room
        self._pass_ms, self._draft_rows, self._on_pass_ms = pass_ms, draft_rows, on_pass_ms
        self.batch_size = 0  # number of sequences in the last pass
        self._tasks: list[SequenceTask] = []  # the oldest first
        self._lock = threading.Lock()  # of what other threads look at
        self._current: SequenceTask | None = None  # that goes on now
        self._waiting: dict[SequenceBackend, SequenceTask] = {}  # for rows, and whose task that is
        self._alone: SequenceBackend | None = None  # whose pass runs by itself
        self._awaited = False  # somebody wants to have a word before the next pass
        self._closing = False

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def free_pages(self) -> int:
        return self._together.free_pages

    def new_sequence(self, capacity: int) -> SequenceBackend:
        """Make a backend for another sequence of at most this many tokens."""
        return SequenceBackend(self, self._backend, self._together.new_sequence(capacity))

    def start(self, work: Callable[[], None]) -> SequenceTask:
        """Add a task, which begins with the next step. Must not raise; call on the thread of `step`."""
        task = SequenceTask(work)
        self._tasks.append(task)
        return task

    def interrupt(self) -> None:
        """Make the running or next `step` return before another pass. Thread-safe."""
        self._awaited = True

    def step(self) -> bool:
        """Run tasks until each waits for rows, then run a pass; return whether tasks are left."""
        started = time.perf_counter()
        try:
            for task in tuple(self._tasks):
                self._resume(task)
            waiting = [request for task in self._tasks for request in task.requests if not request.over]
            if waiting and not self._awaited:
                for task in self._tasks:
                    for request in task.requests:
                        request.keep()
                self._pass(waiting, started)
        except BaseException:
            self.close()
            raise
        # Here and not above: who interrupts between two steps has been heard by none.
        self._awaited = False
        return bool(self._tasks)

    def close(self) -> None:
        """Cancel all tasks, on the thread of `step`."""
        self._closing = True
        for task in tuple(self._tasks):
            task.finish_turn()
            while not task.over:
                if task.waits:
                    task.fail(PassCancelledError("All sequences were ended."))
                self._go_on(task)
        self._tasks.clear()
        self._closing = False

    def give_way(self) -> None:
        """Yield a pass to others, on a task's thread."""
        if self._current is not None and not self._closing:
            self._current.wait()

    def evaluate(self, sequence: SequenceBackend, wanted: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        """Wait for rows that later passes evaluate; a lone task, or a caller that is none, runs them at once."""
        if self._closing:
            raise PassCancelledError("All sequences were ended.")
        task = self._current
        if task is None or (len(self._tasks) == 1 and not self._awaited):
            return self._evaluate_alone(sequence, wanted)
        task.requests = tuple(RowRequest(cache, batch) for cache, batch in wanted)
        with self._lock:
            self._waiting[sequence] = task
        task.wait()
        with self._lock:
            del self._waiting[sequence]
        return task.outputs()

    def cancel(self, sequence: SequenceBackend) -> None:
        """End a sequence's wait for rows, or its own pass. Thread-safe."""
        with self._lock:
            if self._alone is sequence:
                self._backend.cancel()
            task = self._waiting.get(sequence)
            if task is not None and task.waits:
                task.fail(PassCancelledError("The sequence was cancelled."))

    def _evaluate_alone(self, sequence: SequenceBackend, wanted: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        self._provide(sum(cache.pages_for(len(batch.tokens)) for cache, batch in wanted))
        self.batch_size = len(wanted)
        with self._lock:
            self._alone = sequence
        try:
            started = time.perf_counter()
            outputs = self._together.forward_checked(wanted)
            if all(len(batch.tokens) == 1 for _, batch in wanted):
                self._share.observe(len(wanted), 0, (time.perf_counter() - started) * 1e3)
        finally:
            with self._lock:
                self._alone = None
        return outputs

    def _resume(self, task: SequenceTask) -> None:
        if task.waits:
            return
        try:
            self._go_on(task)
        except BaseException:  # an interrupt: the task goes on meanwhile, and nothing else may before it waits
            self._closing = True
            self._backend.cancel()
            task.finish_turn()
            self._current = None
            raise
        if task.over:
            self._tasks.remove(task)

    def _go_on(self, task: SequenceTask) -> None:
        self._current = task
        task.resume()
        self._current = None

    def _pass(self, waiting: list[RowRequest], step_started: float) -> None:
        """Run one pass over waiting rows; the oldest sequence's are always among them."""
        first = waiting[0].batch
        alike = [request for request in waiting if request.batch.goes_with(first)]
        self._cut_drafts(alike)
        chosen = self._with_pages(self._chosen(alike), waiting)
        if not chosen:
            return
        self.batch_size = len(chosen)
        inputs = [(request.cache, request.next_rows(count)) for request, count in chosen]
        started = time.perf_counter()
        try:
            outputs = self._together.forward_checked(inputs)
        except Exception as error:
            # Each raises it on a thread of its own.
            for request, _ in chosen:
                request.error = copy.copy(error)
            return
        prompt_rows = sum(count for request, count in chosen if request.can_wait)
        if rows := sum(count for _, count in chosen) - prompt_rows:
            now = time.perf_counter()
            self._share.observe(rows, prompt_rows, (now - step_started) * 1e3)
            if not prompt_rows:
                self._on_pass_ms(rows, (now - started) * 1e3)
        for (request, count), output in zip(chosen, outputs, strict=True):
            request.take(output, count)

    def _chosen(self, alike: list[RowRequest]) -> list[tuple[RowRequest, int]]:
        """Choose the rows of the next pass: all that are being decoded, then prompts in order of arrival."""
        decoded = [request for request in alike if not request.can_wait]
        chosen = [(request, request.left) for request in decoded]
        rows = sum(request.left for request in decoded)
        room = min(self._share.prompt_rows(rows), self._prompt_rows - rows) if decoded else self._prompt_rows
        for request in alike:
            if request.can_wait and room > 0:
                count = min(request.left, room)
                chosen.append((request, count))
                room -= count
        return chosen

    def _cut_drafts(self, alike: list[RowRequest]) -> None:
        """Shorten drafts to the rows worth most in a pass with all others."""
        drafted = [request for request in alike if request.batch.gains is not None]
        if not drafted or (pass_ms := self._pass_ms()) is None:
            return
        # Rows that come in any case: those of prompts too, but what they are worth is not counted in tokens.
        others = sum(request.left for request in alike if request.batch.gains is None and not request.can_wait)
        gains = [*(request.batch.gains or () for request in drafted), *((1.0,),) * others]
        for request, rows in zip(drafted, draft_rows(gains, pass_ms, self._draft_rows), strict=False):
            request.cut(rows)

    def _with_pages(
        self, chosen: list[tuple[RowRequest, int]], waiting: Sequence[RowRequest]
    ) -> list[tuple[RowRequest, int]]:
        """Keep the requests that there are pages for; if the oldest has none, preempt the youngest."""
        free = self._together.free_pages
        # A row needs at most a page of its own, and a copy of the one that it goes on in.
        if sum(count + 1 for _, count in chosen) <= free:
            return chosen
        age = {id(request): place for place, request in enumerate(waiting)}
        kept: list[tuple[RowRequest, int]] = []
        for request, count in sorted(chosen, key=lambda each: age[id(each[0])]):
            wanted = request.cache.pages_for(count)
            if wanted > free and request.batch.gains is not None:
                # No draft takes what others hold.
                request.cut(1)
                count = 1
                wanted = request.cache.pages_for(count)
            if wanted > free:
                free += self._provide(wanted, reserved=self._together.free_pages - free)
            if wanted > free and not kept:
                # Where no text can give pages up, the pass itself fails.
                return [] if self._preempt(request) else [(request, count)]
            if wanted <= free:
                kept.append((request, count))
                free -= wanted
        return kept

    def _provide(self, pages: int, reserved: int = 0) -> int:
        """Evict kept prefixes until this many unreserved pages are free; return the number gained."""
        before = self._together.free_pages
        if before - reserved < pages:
            self._make_room(pages + reserved)
        return self._together.free_pages - before

    def _preempt(self, oldest: RowRequest) -> bool:
        """Preempt the youngest other task with rows; return whether there is one."""
        for task in reversed(self._tasks):
            if task.waits and oldest not in task.requests and any(each.cache.length for each in task.requests):
                task.fail(PreemptedError("The sequence gave its pages to older ones."))
                return True
        return False


def sharing_backend(backend: Backend) -> Backend | None:
    """The backend whose passes sequences can share, each as it would be alone; None if they cannot. Experts that passes
    use together are not counted. Where long texts are rotated otherwise, sequences differ."""
    backend = uncounted(backend)
    rotates = isinstance(backend, RotatingBackend) and backend.rotation_border is not None
    shares = isinstance(backend, TogetherBackend) and backend.capabilities.paged and not rotates
    return backend if shares else None
