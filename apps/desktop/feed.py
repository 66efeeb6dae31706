"""News for the windows that are open: each gets the latest of every subject; knows nothing of what they are about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Feed", "News"]


@dataclass(frozen=True)
class News:
    """An event of a kind with its data."""

    kind: str
    data: Mapping[str, Any]


class Feed:
    """Passes news on. Who is slow gets the latest of each subject, and none that it replaced."""

    def __init__(self) -> None:
        self._latest: dict[str, News] = {}
        self._readers: list[_Reader] = []
        self._closed = False

    def publish(self, kind: str, data: Mapping[str, Any], subject: str = "") -> None:
        """Tells all readers.

        Args:
            subject: what it is about, within its kind; it replaces what was last told of that.
        """
        news = News(kind, data)
        self._latest[f"{kind} {subject}"] = news
        for reader in self._readers:
            reader.tell(f"{kind} {subject}", news)

    def close(self) -> None:
        """Ends all readers."""
        self._closed = True
        for reader in self._readers:
            reader.ready.set()

    async def read(self) -> AsyncIterator[News]:
        """The latest of every subject, and then what comes."""
        reader = _Reader(dict(self._latest))
        self._readers.append(reader)
        try:
            while not self._closed:
                await reader.ready.wait()
                for news in reader.take():
                    yield news
        finally:
            self._readers.remove(reader)


class _Reader:
    def __init__(self, waiting: dict[str, News]) -> None:
        self._waiting = waiting
        self.ready = asyncio.Event()
        self.ready.set()

    def tell(self, key: str, news: News) -> None:
        self._waiting[key] = news
        self.ready.set()

    def take(self) -> list[News]:
        taken = list(self._waiting.values())
        self._waiting.clear()
        self.ready.clear()
        return taken
