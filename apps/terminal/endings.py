"""How a reply in a terminal ends: Ctrl-C, and a note on why it ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

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


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def cancel_on_interrupt(stream: TokenStream) -> Iterator[Interrupt]:
    """While open, the first Ctrl-C cancels `stream`, the second raises. Does nothing outside of the main thread, which
    alone receives signals."""
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
