"""Timers whose time is up when a test says so."""

from __future__ import annotations

from collections.abc import Callable


class MadeUpTimer:
    """As threading.Timer, but that only `elapse` makes it go off."""

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        self.interval, self.elapse = interval, function
        self.daemon = self.started = self.cancelled = False

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


class Timers(list[MadeUpTimer]):
    """All timers that were made."""

    def make(self, interval: float, function: Callable[[], object]) -> MadeUpTimer:
        self.append(MadeUpTimer(interval, function))
        return self[-1]

    @property
    def waiting(self) -> list[MadeUpTimer]:
        """Timers that would go off."""
        return [timer for timer in self if timer.started and not timer.cancelled]
