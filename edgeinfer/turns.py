"""Whose turn it is among the replies of one model, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from edgeinfer.errors import UsageError
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
