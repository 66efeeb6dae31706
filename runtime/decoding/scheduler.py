"""Runs tasks, and the passes that they wait for: one task alone, or several whose rows share passes.

A task is a generator that yields `Evaluate`, whose results it is sent, or items for its reader. A lone task's passes
run at once. Once all of several tasks wait for rows, one pass evaluates the rows of all; a prompt's are cut to what the
others can wait for, and the rest follows in later passes (Sarathi-Serve, Agrawal et al. 2024). A row's bits depend on
its own text alone, so every sequence decodes what it would alone. There are no threads here: whoever wants an item
calls `step` until it is there, always from one thread at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import (
    Backend,
    KVCache,
    Pass,
    PassCancelledError,
    PassResult,
    PreemptedError,
    check_pass,
)
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, T
from edgeinfer.runtime.decoding.shares import PromptShare, draft_rows


class RowRequest:
    """Rows of one sequence that a task waits for: its batch, rows evaluated so far, and the passes' outputs. The last
    output is a view until `keep`. A prompt's rows may be cut into several passes; drafts may be cut."""

    def __init__(self, backend: Backend, cache: KVCache, batch: Pass) -> None:
        self.backend, self.cache, self.batch = backend, cache, batch
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
    """A generator that a scheduler runs; `requests` are the rows it waits for, `behind` is the older task that got its
    pages, and ends before this one goes on.

    Args:
        work: yields `Evaluate` or items.
        give: takes the items.
        ended: is called once at the end, with the error that the work raised, if any.
    """

    def __init__(
        self,
        work: Generator[Any, Any, object],
        give: Callable[[Any], object],
        ended: Callable[[Exception | None], object],
    ) -> None:
        self.work, self._give, self._ended = work, give, ended
        self.over = False
        self.requests: tuple[RowRequest, ...] = ()
        self.behind: SequenceTask | None = None
        self.helper: SequenceTask | None = None  # another, which is cancelled with this
        self.cancelled = False
        self._sent: list[PassResult] | None = None  # what it goes on with
        self._error: BaseException | None = None

    @property
    def waits(self) -> bool:
        return not all(request.over for request in self.requests)

    @property
    def paused(self) -> bool:
        """Whether it has given its pages up, and waits until an older task ends."""
        return self.behind is not None and not self.behind.over and not self.requests

    def fail(self, error: BaseException) -> None:
        """End the wait for rows with an error."""
        for request in self.requests:
            request.error = error

    def answer(self, results: list[PassResult] | None, error: BaseException | None = None) -> None:
        """Set what the task goes on with: the results of its passes, or an error."""
        self._sent, self._error = results, error

    def collect(self) -> None:
        """Go on with the outcome of the rows that it waited for."""
        requests, self.requests = self.requests, ()
        if requests:
            self._error = next((request.error for request in requests if request.error is not None), None)
            self._sent = None if self._error is not None else [request.output() for request in requests]

    def advance(self) -> Evaluate | None:
        """Go on up to the next passes, which are returned, or the next item, which is given, or the end."""
        sent, error, self._sent, self._error = self._sent, self._error, None, None
        try:
            found = self.work.send(sent) if error is None else self.work.throw(error)
        except StopIteration:
            self._end(None)
            return None
        except Exception as raised:
            self._end(raised)
            return None
        except BaseException:
            self._end(None)
            raise
        finally:
            del error  # the frames of its traceback hold pages, and would wait for the collection of a circle
        if type(found) is Evaluate:
            return found
        self._give(found)
        return None

    def close(self) -> None:
        """End the work: it learns that its passes were cancelled, or left where it waits for none."""
        if not self.requests:
            self.work.close()
            self._end(None)
            return
        self.requests, wanted = (), True
        while not self.over:
            self.answer(None, PassCancelledError("All sequences were ended.") if wanted else None)
            wanted = self.advance() is not None

    def _end(self, error: Exception | None) -> None:
        self.over = True
        ended, self._give, self._ended = self._ended, _nothing, _nothing
        ended(error)


def _nothing(_: object) -> None:
    """What a task that is over tells its reader."""


class Scheduler:
    """Runs tasks, and the passes that they wait for.

    Args:
        backend: whose passes sequences share.
        prompt_rows: rows of prompts in a pass at most, next to rows of sequences that are being decoded.

    Attributes:
        batch_size: number of sequences in the last pass.
    """

    def __init__(self, backend: Backend, prompt_rows: int) -> None:
        self._backend = backend
        self._prompt_rows = prompt_rows
        self._share, self._draft_rows = PromptShare(prompt_rows), 0
        self.unshare()
        self._tasks: list[SequenceTask] = []  # the oldest first
        self._alone: tuple[SequenceTask, Backend] | None = None  # whose pass runs by itself
        self._awaited = False  # `interrupt` was called: the next step returns before its pass

    def unshare(self) -> None:
        """One sequence has the backend to itself again."""
        self._shares, self.batch_size = False, 1  # whether sequences may share passes
        self._make_room: Callable[[int], None] = _nothing
        self._pass_ms: Callable[[], Callable[[int], float] | None] = _unknown
        self._on_pass_ms: Callable[[int, float], None] = _unheard

    def share(
        self,
        inter_token_latency: float | None,
        make_room: Callable[[int], None],
        pass_ms: Callable[[], Callable[[int], float] | None],
        draft_rows: int,
        on_pass_ms: Callable[[int, float], None],
    ) -> None:
        """Prepare for sequences that share passes.

        Args:
            inter_token_latency: as `PromptShare` takes it.
            make_room: lets go of kept prefixes until so many pages are free, or none is left.
            pass_ms: gives the milliseconds of a pass by its rows, by which drafts are cut to what pays; or None where
                that is not known, which leaves them whole.
            draft_rows: rows of drafts in a pass that is shared at most.
            on_pass_ms: is called with the rows of a pass without prompts, and its milliseconds.
        """
        self._share, self._shares = PromptShare(self._prompt_rows, inter_token_latency), True
        self._make_room, self._pass_ms = make_room, pass_ms
        self._draft_rows, self._on_pass_ms = draft_rows, on_pass_ms

    def add(self, task: SequenceTask) -> None:
        """Add a task, which goes on with the next step."""
        self._tasks.append(task)

    def run(self, work: Passes[T], of: SequenceTask | None = None) -> T:
        """Run a computation to its end among the tasks; it is cancelled with the task it is `of`."""
        made: list[T] = []
        errors: list[Exception | None] = []

        def keeping() -> Generator[Any, Any, None]:
            made.append((yield from work))

        task = SequenceTask(keeping(), made.append, errors.append)
        self.add(task)
        if of is not None:
            of.helper = task
        while not task.over:
            self.step()
        if error := errors.pop():
            raise error
        if not made:
            raise PassCancelledError("The computation was cancelled.")
        return made[0]

    def remove(self, task: SequenceTask) -> None:
        """Take a task off, which goes on nowhere else."""
        if task in self._tasks:
            self._tasks.remove(task)

    def interrupt(self) -> None:
        """Make the running or next `step` return before another pass. Thread-safe."""
        self._awaited = True

    def step(self) -> bool:
        """Run a lone task to its next item; run several until each waits for rows, then a pass. Return whether tasks
        are left."""
        tasks = self._tasks
        try:
            going = tasks if len(tasks) < 2 else [task for task in tasks if not task.paused]
            if len(going) == 1:
                self._run_alone(going[0])
            elif going:
                self._run_together()
        except BaseException:
            self.close()
            raise
        # Here and not above: who interrupts between two steps has been heard by none.
        self._awaited = False
        return bool(tasks)

    def close(self) -> None:
        """Cancel all tasks."""
        while self._tasks:
            task = self._tasks[-1]
            task.close()
            self.remove(task)

    def cancel(self, task: SequenceTask) -> None:
        """End a task's wait for rows, or its own pass. Thread-safe."""
        task.cancelled, task.behind = True, None
        if (alone := self._alone) is not None and alone[0] is task:
            alone[1].cancel()
        task.fail(PassCancelledError("The sequence was cancelled."))
        if task.helper is not None:
            self.cancel(task.helper)

    def _run_alone(self, task: SequenceTask) -> None:
        """Run the only task, and its passes at once, up to its next item."""
        if task.waits:  # others have ended meanwhile, or somebody has interrupted
            left = [request for request in task.requests if not request.over]
            if len(left) < len(task.requests) or any(request.fed for request in left):
                for request in task.requests:
                    request.keep()
                self._pass(left, time.perf_counter())
                return
            task.requests = ()
            wanted: Evaluate | None = Evaluate(left[0].backend, [(each.cache, each.batch) for each in left])
        else:
            task.collect()
            wanted = task.advance()
        while wanted is not None:
            if self._awaited:
                self._wait(task, wanted)
                return
            try:
                task.answer(self._evaluated(task, wanted))
            except Exception as error:
                task.answer(None, error)
            wanted = task.advance()
        if task.over:
            self.remove(task)

    def _evaluated(self, task: SequenceTask, wanted: Evaluate) -> list[PassResult]:
        backend, passes = wanted.backend, wanted.passes
        if not passes:
            return []
        self._alone = task, backend
        try:
            if task.cancelled:  # before `cancel` could see whose pass it is
                raise PassCancelledError("The sequence was cancelled.")
            if not self._shares or backend is not self._backend:
                return _forward(backend, passes, task)
            self.batch_size = len(passes)
            rows = sum(len(batch.tokens) for _, batch in passes)
            # A row needs at most a page of its own, and a copy of the one that it goes on in.
            if backend.free_pages < rows + len(passes):
                self._provide(sum(_pages_for(cache, len(batch.tokens)) for cache, batch in passes))
            started = time.perf_counter()
            results = _forward(backend, passes, task)
            if rows == len(passes):
                self._share.observe(rows, 0, (time.perf_counter() - started) * 1e3)
            return results
        finally:
            self._alone = None

    def _run_together(self) -> None:
        """Run tasks until each waits for rows of the model, then run a pass."""
        started = time.perf_counter()
        while True:
            for task in tuple(self._tasks):
                self._resume(task)
            waiting = [request for task in self._tasks for request in task.requests if not request.over]
            if not waiting or self._awaited:
                return
            for task in self._tasks:
                for request in task.requests:
                    request.keep()
            # Draft models first: what they draft has rows in the model's pass.
            other = next((request for request in waiting if request.backend is not self._backend), None)
            if other is None:
                break
            alike = [each for each in waiting if each.backend is other.backend and each.batch.goes_with(other.batch)]
            self._forward([(each, each.left) for each in alike[: other.backend.max_sequences]])
        self._pass(waiting, started)

    def _resume(self, task: SequenceTask) -> None:
        """Let a task go on until it waits for rows, gives way or ends."""
        if task.waits or task.paused:
            return
        task.collect()
        while not task.over:
            wanted = task.advance()
            if wanted is not None:
                self._wait(task, wanted)
                if not wanted.passes or task.waits:
                    return
                task.collect()
        self.remove(task)

    def _wait(self, task: SequenceTask, wanted: Evaluate) -> None:
        """Let a task wait for passes."""
        if not wanted.passes:
            task.answer([])
            return
        requests = tuple(RowRequest(wanted.backend, cache, batch) for cache, batch in wanted.passes)
        try:
            for request in requests:
                check_pass(wanted.backend, request.cache, request.batch)
        except Exception as error:
            for request in requests:
                request.error = error
        task.requests = requests
        if task.cancelled:
            task.fail(PassCancelledError("The sequence was cancelled."))

    def _pass(self, waiting: list[RowRequest], step_started: float) -> None:
        """Run one pass over waiting rows; the oldest sequence's are always among them."""
        first = waiting[0].batch
        alike = [request for request in waiting if request.batch.goes_with(first)]
        self._cut_drafts(alike)
        chosen = self._with_pages(self._chosen(alike)[: self._backend.max_sequences], waiting)
        if not chosen:
            return
        self.batch_size = len(chosen)
        started = time.perf_counter()
        if not self._forward(chosen):
            return
        prompt_rows = sum(count for request, count in chosen if request.can_wait)
        if rows := sum(count for _, count in chosen) - prompt_rows:
            now = time.perf_counter()
            self._share.observe(rows, prompt_rows, (now - step_started) * 1e3)
            if not prompt_rows:
                self._on_pass_ms(rows, (now - started) * 1e3)

    def _forward(self, chosen: list[tuple[RowRequest, int]]) -> bool:
        """Evaluate the next rows of requests to one backend; return whether that went well."""
        try:
            passes = [(request.cache, request.next_rows(count)) for request, count in chosen]
            outputs = _forward(chosen[0][0].backend, passes)
        except Exception as error:
            for request, _ in chosen:
                request.error = copy.copy(error)  # each raises it in a task of its own
            return False
        for (request, count), output in zip(chosen, outputs, strict=True):
            request.take(output, count)
        return True

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
        free = self._backend.free_pages
        # A row needs at most a page of its own, and a copy of the one that it goes on in.
        if sum(count + 1 for _, count in chosen) <= free:
            return chosen
        age = {id(request): place for place, request in enumerate(waiting)}
        kept: list[tuple[RowRequest, int]] = []
        for request, count in sorted(chosen, key=lambda each: age[id(each[0])]):
            wanted = _pages_for(request.cache, count)
            if wanted > free and request.batch.gains is not None:
                # No draft takes what others hold.
                request.cut(1)
                count = 1
                wanted = _pages_for(request.cache, count)
            if wanted > free:
                free += self._provide(wanted, reserved=self._backend.free_pages - free)
            if wanted > free and not kept:
                # Where no text can give pages up, the pass itself fails.
                return [] if self._preempt(request) else [(request, count)]
            if wanted <= free:
                kept.append((request, count))
                free -= wanted
        return kept

    def _provide(self, pages: int, reserved: int = 0) -> int:
        """Evict kept prefixes until this many unreserved pages are free; return the number gained."""
        before = self._backend.free_pages
        if before - reserved < pages:
            self._make_room(pages + reserved)
        return self._backend.free_pages - before

    def _preempt(self, oldest: RowRequest) -> bool:
        """Preempt the youngest other task with rows; return whether there is one."""
        older = next(task for task in self._tasks if oldest in task.requests)
        for task in reversed(self._tasks):
            if task.waits and task is not older and any(each.cache.length for each in task.requests):
                task.behind = older
                task.fail(PreemptedError("The sequence gave its pages to older ones."))
                return True
        return False


def _forward(
    backend: Backend, passes: Sequence[tuple[KVCache, Pass]], task: SequenceTask | None = None
) -> list[PassResult]:
    """Run a pass, once more where it was cancelled as the task of a pass before it was, which had ended by then."""
    try:
        return backend.forward(passes)
    except PassCancelledError:
        if task is not None and task.cancelled:
            raise
    return backend.forward(passes)


def _pages_for(cache: KVCache, rows: int) -> int:
    """Pages that so many further rows take."""
    return cache.pages_for(rows) if isinstance(cache, PagedCache) else 0


def _unknown() -> None:
    """Default of `pass_ms`: times of passes are not known."""


def _unheard(rows: int, ms: float) -> None:
    """Default of `on_pass_ms`: nothing learns from times of passes."""


def shares_passes(backend: Backend) -> bool:
    """Whether sequences can share passes, each as it would be alone. Where long texts are rotated otherwise, sequences
    differ."""
    return backend.max_sequences > 1 and backend.capabilities.paged and backend.rotation_border is None
