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

__all__ = ["Chooser", "Engine", "Multistep", "Prefill", "Step"]


class Chooser(Protocol):
    """Chooses the token of an absolute position from its logits."""

    def token(self, logits: Floats, position: int) -> int:  # (V,)
        """The token at `position`."""

    def accept(self, token: int) -> None:
        """The token joins the reply."""


class Multistep(Protocol):
    """Decodes several tokens per pass, as `speculation.rounds.Rounds` does."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Starts after these tokens, of which the cache holds all but the last."""

    def next(self, room: int) -> Sequence[int]:
        """One to `room` tokens, accepted by the chooser; the cache then holds all tokens but the last."""


@dataclass(frozen=True)
class Prefill:
    """How a prompt was taken in: tokens reused from the cache, tokens evaluated, milliseconds."""

    cached: int
    evaluated: int
    ms: float


@dataclass(frozen=True)
class Step:
    """One decoded token and the milliseconds since the one before it; of one pass's tokens the first has them all."""

    token: int
    ms: float


_ONE_ROW = np.zeros(1, np.int64)


class _Plain:
    """One token per pass."""

    def __init__(self, backend: Backend, chooser: Chooser) -> None:
        self._backend = backend
        self._chooser = chooser
        self._root = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._root = tokens[-1]

    def next(self, room: int) -> tuple[int]:
        start = self._backend.length
        output = self._backend.forward(np.array([self._root]), np.array([start]), _ONE_ROW)
        self._root = self._chooser.token(output.logits[0], start + 1)
        self._chooser.accept(self._root)
        return (self._root,)


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
        self,
        prompt: Sequence[int],
        chooser: Chooser,
        *,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        rounds: Multistep | None = None,
    ) -> Generator[Step]:
        """Yields tokens until `max_tokens`, a stop id (which is yielded), a full context or `cancel`.

        Args:
            rounds: decodes what follows the first token, by the same chooser; None is one token per pass.

        Raises:
            PromptError: the prompt is empty, or holds an id that is no token.
            ContextLengthError: the prompt leaves no room for a token.
        """
        self.check(prompt)
        # Here, not when iteration begins: a `cancel` in between counts.
        self._cancelled.clear()
        self.prefill = Prefill(0, 0, 0.0)
        room = self.backend.capacity - len(prompt) + 1
        left = room if max_tokens is None else min(max_tokens, room)
        return self._steps(prompt, chooser, left, stop_ids, rounds or _Plain(self.backend, chooser))

    def _steps(
        self, prompt: Sequence[int], chooser: Chooser, left: int, stop_ids: frozenset[int], rounds: Multistep
    ) -> Generator[Step]:
        begun = time.perf_counter()
        try:
            token = chooser.token(self._take_in(prompt), len(prompt))
            chooser.accept(token)
            tokens: Sequence[int] = (token,)
            # Drafters take in the prompt too, which belongs to the first token's time.
            rounds.begin([*prompt, token])
            now = time.perf_counter()
            yield Step(token, (now - begun) * 1e3)
            while True:
                left -= len(tokens)
                if left == 0 or tokens[-1] in stop_ids or self._cancelled.is_set():
                    return
                begun, root = now, tokens[-1]
                tokens = _until(rounds.next(left), stop_ids)
                self._tokens += [root, *tokens[:-1]]
                now = time.perf_counter()
                for place, token in enumerate(tokens):
                    if place and self._cancelled.is_set():
                        return
                    yield Step(token, 0.0 if place else (now - begun) * 1e3)
        except PassCancelledError:
            return
        finally:
            # A stop id inside a round, or a reader who left: rows of tokens that nobody was given.
            if self.backend.length > len(self._tokens):
                self.backend.truncate(len(self._tokens))

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


def _until(tokens: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """The tokens up to and with the first stop id."""
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens
