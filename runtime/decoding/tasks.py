"""A task of the scheduler: work on a thread of its own that waits for rows of its sequence."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.cache import SharingCache
from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput


class RowRequest:
    """Rows of one sequence that a task waits for.

    Args:
        cache: of the sequence.
        batch: the rows.

    Attributes:
        cache, batch: as given; drafts may be cut.
        fed: rows that passes have evaluated.
        parts: what these passes gave; the last one's is a view until `keep`.
        error: that the task is to raise.
        can_wait: its rows may be cut into several passes: a prompt's, of which at most the last is continued.
    """

    def __init__(self, cache: SharingCache, batch: ForwardInput) -> None:
        self.cache, self.batch = cache, batch
        self.fed = 0
        self.parts: list[ForwardOutput] = []
        self._kept = True  # nothing of them is a view
        self.error: BaseException | None = None
        self.can_wait = batch.is_chain and len(batch.rows) < len(batch.tokens)

    @property
    def left(self) -> int:
        """Rows that were not evaluated yet."""
        return len(self.batch.tokens) - self.fed

    @property
    def over(self) -> bool:
        """Whether its task can go on."""
        return self.error is not None or not self.left

    def cut(self, rows: int) -> None:
        """Leaves out what a draft has behind so many rows."""
        batch = self.batch
        if rows < len(batch.tokens):
            tree = None if batch.tree is None else batch.tree[:rows]
            gains = None if batch.gains is None else batch.gains[:rows]
            self.batch = dataclasses.replace(self.next_rows(rows), tree=tree, gains=gains)

    def next_rows(self, count: int) -> ForwardInput:
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

    def take(self, output: ForwardOutput, count: int) -> None:
        """Takes what a pass gave for its next rows."""
        self.fed += count
        self.parts.append(output)
        self._kept = False

    def keep(self) -> None:
        """Copies what the next pass overwrites."""
        if not self._kept:
            self.parts[-1] = self.parts[-1].copy()
            self._kept = True

    def output(self) -> ForwardOutput:
        """What all passes gave together; of a single one a view that the next pass overwrites."""
        if len(self.parts) == 1:
            return self.parts[0]
        hidden = [part.hidden for part in self.parts if part.hidden is not None]
        experts = [part.experts for part in self.parts if part.experts is not None]
        tapped = [part.tapped for part in self.parts if part.tapped is not None]
        return ForwardOutput(
            np.concatenate([part.logits for part in self.parts]),
            np.concatenate(hidden) if hidden else None,
            np.concatenate(experts, axis=1) if experts else None,
            np.concatenate(tapped) if tapped else None,
        )


class SequenceTask:
    """Work on a thread of its own that runs only while the scheduler lets it; made by `Scheduler.start`.

    Attributes:
        over: whether the work has ended.
        requests: the rows it waits for, of a search those of several sequences; none where it can go on.
    """

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
        """Whether rows are to be evaluated before it can go on."""
        return not all(request.over for request in self.requests)

    def outputs(self) -> list[ForwardOutput]:
        """What the rows gave that it waited for."""
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
        """Ends the wait for rows: of several sequences for those of all."""
        for request in self.requests:
            request.error = error

    def resume(self) -> None:
        """Lets the work go on until it waits for rows, or ends; `finish_turn` where an interrupt came in between."""
        self._turns_given = self._turns_over + 1
        self.finish_turn()
        if self.over:
            self._thread.join()

    def finish_turn(self) -> None:
        """Waits until the work waits for rows, or ends, if it was let go on."""
        while self._turns_over < self._turns_given:
            _wake(self._turn)
            self._back.acquire()

    def wait(self) -> None:
        """Waits for the next turn; on the task's own thread."""
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
    """Lets who waits for a lock look again; only one side ever does so."""
    if waiting.locked():
        waiting.release()


def _nothing() -> None:
    """What a task that is over does."""
