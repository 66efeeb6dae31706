"""The decoding loop: a prompt and a way to choose tokens become tokens, with what the cache already holds reused.

Knows backends through their contract only; knows nothing of text, templates or files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgeinfer.errors import ContextLengthError, PromptError
from edgeinfer.runtime.contracts import Backend, Floats, PassCancelledError

__all__ = ["Chooser", "Engine", "Prefill", "Step"]


class Chooser(Protocol):
    """Chooses the token of an absolute position from its logits."""

    def choose(self, logits: Floats, position: int) -> int:  # (V,)
        """The token at `position`."""


@dataclass(frozen=True)
class Prefill:
    """How a prompt was taken in: tokens reused from the cache, tokens evaluated, milliseconds."""

    cached: int
    evaluated: int
    ms: float


@dataclass(frozen=True)
class Step:
    """One decoded token and the milliseconds since the one before it."""

    token: int
    ms: float


class Engine:
    """One conversation's worth of state over a backend.

    Args:
        backend: evaluates passes; its cache belongs to this engine alone.
        chunk: prompt tokens per pass.
    """

    def __init__(self, backend: Backend, chunk: int) -> None:
        self.backend = backend
        self.prefill = Prefill(0, 0, 0.0)
        self._chunk = chunk
        self._tokens: list[int] = []
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether the last generation was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stops the running generation within the current pass. Safe from any thread."""
        self._cancelled.set()
        self.backend.cancel()

    def generate(
        self, prompt: Sequence[int], chooser: Chooser, *, max_tokens: int | None, stop_ids: frozenset[int]
    ) -> Generator[Step]:
        """Yields tokens until `max_tokens`, a stop id (which is yielded), a full context or `cancel`.

        Raises:
            PromptError: the prompt is empty, or holds an id that is no token.
            ContextLengthError: the prompt leaves no room for a token.
        """
        self.check(prompt)
        # Here, not when iteration begins: a `cancel` in between counts.
        self._cancelled.clear()
        self.prefill = Prefill(0, 0, 0.0)
        return self._steps(prompt, chooser, max_tokens, stop_ids)

    def _steps(
        self, prompt: Sequence[int], chooser: Chooser, max_tokens: int | None, stop_ids: frozenset[int]
    ) -> Generator[Step]:
        room = self.backend.capacity - len(prompt) + 1
        left = room if max_tokens is None else min(max_tokens, room)
        begun = time.perf_counter()
        try:
            logits = self._take_in(prompt)
            while not self._cancelled.is_set():
                token = chooser.choose(logits, len(self._tokens))
                now = time.perf_counter()
                yield Step(token, (now - begun) * 1e3)
                begun = now
                left -= 1
                if left == 0 or token in stop_ids or self._cancelled.is_set():
                    return
                logits = self._extend([token], want_logits=True)
        except PassCancelledError:
            return

    def forget(self) -> None:
        """Empties the cache."""
        self._tokens.clear()
        self.backend.truncate(0)

    def check(self, prompt: Sequence[int]) -> None:
        """Refuses a prompt that cannot be continued.

        Raises:
            PromptError, ContextLengthError: as `generate`.
        """
        if not prompt:
            raise PromptError("The prompt is empty.", "Give at least one token of text.")
        if len(prompt) > self.backend.capacity:
            message = f"The prompt has {len(prompt)} tokens, the context holds {self.backend.capacity}."
            raise ContextLengthError(message, "Shorten it, or load the model with a larger context (-c).")
        vocabulary = self.backend.geometry.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            message = f"The prompt holds a token id outside the model's vocabulary of {vocabulary}."
            raise PromptError(message, f"Ids go from 0 to {vocabulary - 1}.")

    def _take_in(self, prompt: Sequence[int]) -> Floats:  # (V,)
        """Evaluates what the cache does not hold of the prompt; the last token always, for its logits."""
        begun = time.perf_counter()
        cached = min(self._shared_prefix(prompt), len(prompt) - 1)
        self._truncate(cached)
        last = len(prompt)
        logits: Floats = np.zeros(0, np.float32)
        try:
            for start in range(cached, last, self._chunk):
                if self._cancelled.is_set():
                    raise PassCancelledError("Cancelled between two chunks of the prompt.")
                end = min(start + self._chunk, last)
                logits = self._extend(prompt[start:end], want_logits=end == last)
        finally:
            self.prefill = Prefill(cached, len(self._tokens) - cached, (time.perf_counter() - begun) * 1e3)
        return logits

    def _extend(self, tokens: Sequence[int], *, want_logits: bool) -> Floats:  # (V,), of the last token
        start, size = self.backend.length, len(tokens)
        rows = np.array([size - 1] if want_logits else [], np.int64)
        ids, positions = np.array(tokens, np.int64), np.arange(start, start + size)
        output = self.backend.forward(ids, positions, rows)
        self._tokens.extend(tokens)
        return output.logits[0] if want_logits else output.logits

    def _shared_prefix(self, prompt: Sequence[int]) -> int:
        shared = 0
        for mine, theirs in zip(self._tokens, prompt, strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared

    def _truncate(self, length: int) -> None:
        del self._tokens[length:]
        self.backend.truncate(length)
