"""Why a reply ended where it did, in a few words for whoever reads it in a terminal."""

from __future__ import annotations

from dataclasses import dataclass
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
