"""How a reply in a terminal is shown and ends: its thought, Ctrl-C, and a note on why it ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from edgeinfer import Result, TokenStream


@dataclass(frozen=True)
class EndingHints:
    """What the user can do about a reply that ended too early."""

    longer: str  # for a longer reply
    roomier: str  # for a larger context
    empty: str = ""  # for a reply without text; empty if nothing helps


def ending(result: Result, max_tokens: int | None, hints: EndingHints) -> str:
    """Explain in brackets why a reply was cut off; empty if it ended by itself."""
    made = result.usage.completion_tokens
    if result.finish_reason == "cancelled":
        return "[stopped]"
    if result.finish_reason == "length":
        full = max_tokens is None or made < max_tokens
        return f"[context full; {hints.roomier}]" if full else f"[{made} tokens; {hints.longer}]"
    if result.text.strip():
        return ""
    return (
        f"[the model ended its reply at once; {hints.empty}]" if hints.empty else "[the model ended its reply at once]"
    )


_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ShownReply:
    """Writes a reply as it comes by `write`: its thought, where `out` is a terminal and shows one, dimmed before it."""

    def __init__(self, out: TextIO, write: Callable[[str], object], *, thoughts: bool = True) -> None:
        self._out, self._write, self._thoughts = out, write, thoughts and out.isatty()
        self._thinking = False

    def add(self, thought: str, text: str) -> None:
        if thought and self._thoughts:
            if not self._thinking:
                self._out.write(_DIM)
            self._thinking = True
            self._write(thought)
        if text:
            self.end_thought()
            self._write(text)

    def end_thought(self) -> None:
        """Write as before from here on."""
        if self._thinking:
            self._thinking = False
            self._write("\n")
            self._out.write(f"{_PLAIN}\n")
            self._out.flush()


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def cancel_on_interrupt(stream: TokenStream, *, answers: bool = False) -> Iterator[Interrupt]:
    """While open, the first Ctrl-C cancels `stream`, the second raises. With `answers`, one before these ends a thought
    of the model. Does nothing outside of the main thread, which alone receives signals."""
    state = Interrupt()
    asked = not answers

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if state.pressed:
            raise KeyboardInterrupt
        if not asked and stream.answer_now():
            asked = True
            return
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
