"""A reply that no model makes, for tests of what shows it: it can be interrupted, and has made-up figures."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Self

from edgeinfer.core.results import Chunk, MemoryUse, ModelInfo, Result, SpeculationUse, Timings, Usage


class FakeStream:
    """Streams words; after `interrupt_after` of them the user presses Ctrl-C."""

    def __init__(self, words: Sequence[str], interrupt_after: int | None = None, cached: int = 0) -> None:
        self._all = words
        self._interrupt_after = interrupt_after
        self._cached = cached
        self._cancelled = False
        self._words: list[str] = []
        self.closed = False

    def __iter__(self) -> Iterator[Chunk]:
        for index, word in enumerate(self._all):
            if self._cancelled:
                return
            self._words.append(word)
            yield Chunk(word, (index,))
            if index + 1 == self._interrupt_after:
                signal.raise_signal(signal.SIGINT)

    def answer_now(self) -> bool:
        return False

    def cancel(self) -> None:
        self._cancelled = True

    def complete(self) -> Result:
        for _ in self:
            pass
        return self.result

    @property
    def result(self) -> Result:
        return Result(
            text="".join(self._words),
            token_ids=tuple(range(len(self._words))),
            finish_reason="cancelled" if self._cancelled else "length",
            usage=Usage(5, len(self._words)),
            timings=Timings(1.0, 2.0, 12.0, 4.0, 4.0, 5.0, 250.0, self._cached),
            memory=MemoryUse(None, 1000, 2_000_000, 1_000_000, 500_000, {"weights": 900}),
            speculation=SpeculationUse("off"),
            model=ModelInfo("toy", "llama", 64, 4.5, "onnx", "portable"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
