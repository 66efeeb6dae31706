"""Why a reply ended where it did, in a few words for whoever reads it in a terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from edgeinfer import Result


class EndingWords(Protocol):
    """What helps against an end that was too early, in the words of the place."""

    @property
    def longer(self) -> str:
        """For a longer reply."""

    @property
    def roomier(self) -> str:
        """For a larger context."""

    @property
    def empty(self) -> str:
        """For a reply where there was none; empty where nothing does."""


@dataclass(frozen=True)
class CommandWords:
    """Of `edgeinfer run`."""

    longer: str = "-n for more"
    roomier: str = "-c for more"
    empty: str = ""


@dataclass(frozen=True)
class ChatWords:
    """Of the chat in the terminal."""

    longer: str = "/set max_tokens N for more"
    roomier: str = "/reset starts over; -c for more"
    empty: str = "ask in other words"


def ending(result: Result, max_tokens: int | None, words: EndingWords) -> str:
    """Says in brackets why a reply ended, where it did not come to its own end; empty where it did.

    Args:
        max_tokens: the most tokens that were asked for; None is until the context is full.
    """
    made = result.usage.completion_tokens
    if result.finish_reason == "cancelled":
        return "[stopped]"
    if result.finish_reason == "length":
        full = max_tokens is None or made < max_tokens
        return f"[context full; {words.roomier}]" if full else f"[{made} tokens; {words.longer}]"
    if result.text.strip():
        return ""
    return (
        f"[the model ended its reply at once; {words.empty}]" if words.empty else "[the model ended its reply at once]"
    )


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
