"""Whose turn it is to be made, of the replies of one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from edgeinfer.core.errors import UsageError
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
