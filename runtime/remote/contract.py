"""What decides a reply from elsewhere: rounds of a draft, in answer to which tokens come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.records import dataclass
from edgeinfer.results import FinishReason

__all__ = ["Decided", "RemoteReply", "RemoteServer"]


@dataclass(frozen=True)
class Decided:
    """Tokens that were decided.

    Attributes:
        last: of the round.
        ending: why the reply is over; None where it goes on.
        server_ms: milliseconds of the round in the server, known with its last tokens.
    """

    tokens: tuple[int, ...]
    last: bool = True
    ending: FinishReason | None = None
    server_ms: float = 0.0


class RemoteReply(Protocol):
    """One reply that a model elsewhere decides. One thread at a time."""

    @property
    def model(self) -> str:
        """The model's name; empty before the first round is over."""

    @property
    def digest(self) -> str:
        """The sha256 of what it is; empty before the first round is over."""

    @property
    def retries(self) -> int:
        """Requests that were sent again."""

    def verify(self, reply: Sequence[int], draft: Sequence[int], further: int, tell: Callable[[Decided], bool]) -> None:
        """One round, which is sent again where the way fails: what is decided is always the same.

        Args:
            reply: all tokens that were decided before.
            draft: what may follow them.
            further: tokens wanted after those that come of the draft; they are told as they come.
            tell: takes what is decided, in order, and says whether more is wanted.

        Raises:
            RemoteError: the server cannot be reached, refuses, or is another than before.
        """

    def close(self) -> None:
        """Gives up the round that another thread waits for, and the connection."""


class RemoteServer(Protocol):
    """A server whose model decides replies."""

    @property
    def url(self) -> str:
        """Where it is."""

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> RemoteReply:
        """A reply to a prompt, of which nothing is sent yet.

        Args:
            options: of GenerationConfig, by name.
        """
