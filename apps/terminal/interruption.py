"""Ctrl-C while something runs: the first stops it in good order, the second at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol


class Cancellable(Protocol):
    """Something that can be asked to stop."""

    def cancel(self) -> None:
        """Asks for the stop and returns at once."""


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def cancel_on_interrupt(stream: Cancellable) -> Iterator[Interrupt]:
    """While open, the first Ctrl-C cancels `stream`, which then ends in good order; the second raises as usual.

    Only the main thread receives signals; in any other this does nothing.
    """
    state = Interrupt()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if state.pressed:
            raise KeyboardInterrupt
        state.pressed = True
        stream.cancel()

    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)
