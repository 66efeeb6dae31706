"""An engine that is driven pass by pass: how its passes, steps, prompts and replies are timed; knows no engine."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["SteppedEngine"]


class SteppedEngine:
    """Times what its subclass does: `take`, `choices` and `truncate`.

    Nothing but the standard library may be imported here: it runs under interpreters that have neither edgeinfer nor
    numpy.
    """

    version = ""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def take(self, tokens: list[int], rows: int) -> None:
        """Takes in tokens behind those in the cache and waits for the logits of so many of the last of them."""
        raise NotImplementedError

    def choices(self, rows: int) -> list[int]:
        """The likeliest token after each of the rows that the last pass computed logits of."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Forgets all but so many tokens of the cache."""
        raise NotImplementedError

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        times = []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._take(tokens, len(tokens))
            times.append((time.perf_counter() - started) * 1e3)
            self._truncate(len(past))
        return times[1:]

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        token, times = past[0], []
        for _ in range(tokens + 1):
            started = time.perf_counter()
            token = self._step(token)
            times.append((time.perf_counter() - started) * 1e3)
        self._truncate(len(past))
        return times[1:]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        self._truncate(0)
        started = time.perf_counter()
        self._take(prompt, 1)
        return [(time.perf_counter() - started) * 1e3]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        self._truncate(0)
        started = time.perf_counter()
        self._take(prompt, 1)
        reply = self.choices(1)
        first = time.perf_counter()
        while len(reply) < tokens:
            reply.append(self._step(reply[-1]))
        ended = time.perf_counter()
        return {"token_ids": reply, "first_ms": (first - started) * 1e3, "later_ms": (ended - first) * 1e3}

    def _step(self, token: int) -> int:
        self._take([token], 1)
        return self.choices(1)[0]

    def _prefill(self, past: list[int]) -> None:
        if self._taken != past:
            self._truncate(0)
            self._take(past, 0)

    def _take(self, tokens: list[int], rows: int) -> None:
        self.take(tokens, rows)
        self._taken += tokens

    def _truncate(self, length: int) -> None:
        self.truncate(length)
        del self._taken[length:]
