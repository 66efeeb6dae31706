"""The replies that a server has been asked for: which of them have started, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ReplyQueue(Generic[T]):
    """Replies in the order of their turns.

    Owners take turns, and of each owner its replies, so that one who asks for eight replies gets no more than one who
    asks for one. At most `parallel` replies have started; of those that wait, the next to start belongs to the
    owner with the fewest, and of these the one that came first.

    Args:
        parallel: replies that have started, at most.
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

    @property
    def started(self) -> list[T]:
        """Replies that have started, in the order of their turns."""
        return [reply for replies in self._started.values() for reply in replies]

    def limit(self, parallel: int) -> None:
        """Lets so many replies start from now on."""
        self._parallel = parallel
        self._fill()

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
