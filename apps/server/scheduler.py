"""Which of several replies runs next: equal shares for everybody who asked; knows no models, threads or text."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["Scheduler"]

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Replies in the order of their turns.

    Owners take turns, and of each owner its replies, so that one who asks for eight replies gets no more than one who
    asks for one. At most `parallel` replies have begun; of those that wait, the next to begin is of whoever has the
    fewest, and of these the one that came first.

    Args:
        parallel: replies that take turns.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._begun: OrderedDict[str, deque[T]] = OrderedDict()
        self._waiting: list[tuple[str, T]] = []

    @property
    def running(self) -> int:
        """Replies that have begun."""
        return sum(map(len, self._begun.values()))

    @property
    def waiting(self) -> int:
        """Replies that have not."""
        return len(self._waiting)

    def add(self, owner: str, reply: T) -> None:
        """A reply that was asked for."""
        self._waiting.append((owner, reply))
        self._fill()

    def next(self) -> T | None:
        """The reply whose turn it is; the turn after that is somebody else's."""
        if not self._begun:
            return None
        owner, replies = next(iter(self._begun.items()))
        self._begun.move_to_end(owner)
        replies.rotate(-1)
        return replies[-1]

    def remove(self, reply: T) -> None:
        """A reply is over; one that waits may begin."""
        self._waiting = [(owner, other) for owner, other in self._waiting if other != reply]
        for owner, replies in self._begun.items():
            if reply in replies:
                replies.remove(reply)
                if not replies:
                    del self._begun[owner]
                break
        self._fill()

    def withdraw(self, reply: T) -> bool:
        """Takes away a reply that waits; whether it did."""
        left = [(owner, other) for owner, other in self._waiting if other != reply]
        waited = len(left) < len(self._waiting)
        self._waiting = left
        return waited

    def clear(self) -> list[T]:
        """Takes all away."""
        every = [reply for replies in self._begun.values() for reply in replies]
        every += [reply for _, reply in self._waiting]
        self._begun.clear()
        self._waiting.clear()
        return every

    def _fill(self) -> None:
        while self._waiting and self.running < self._parallel:
            place = min(range(len(self._waiting)), key=lambda at: len(self._begun.get(self._waiting[at][0], ())))
            owner, reply = self._waiting.pop(place)
            self._begun.setdefault(owner, deque()).append(reply)
