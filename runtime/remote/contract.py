"""What decides a reply from elsewhere: rounds of a draft, in answer to which tokens come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import FinishReason
from edgeinfer.runtime.decoding.shares import DraftAdvice
from edgeinfer.runtime.text.contract import TokenizerLike


@dataclass(frozen=True)
class RemoteAccess:
    """How a server is asked, and with which key."""

    url: str  # of the server, without /v1
    key: str | None  # that it asks for; None where it asks for none
    model: str | None  # name of the one to ask for; None is the server's first
    digest: str | None  # that its model must have; None is any
    tokenizer: TokenizerLike
    begin_ids: tuple[int, ...] = ()  # tokens that begin the drafting model's texts
    end_ids: frozenset[int] = frozenset()  # tokens that end them


@dataclass(frozen=True)
class Decided:
    """Tokens that were decided."""

    tokens: tuple[int, ...]
    last: bool = True
    ending: FinishReason | None = None  # why the reply is over; None where it goes on
    server_ms: float = 0.0  # milliseconds of the round in the server, known with its last tokens
    verified: int | None = None  # drafted tokens that the server looked at; None is all of them
    # What is best for all replies that share the server's passes now; None if there are no others.
    advice: DraftAdvice | None = None


class RemoteReply(Protocol):
    """One reply that a model elsewhere decides. One thread at a time."""

    @property
    def verifies(self) -> bool:
        """Whether drafts can be verified; where they cannot, the server streams."""

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
        """One round, which is sent again where the way fails: what is decided is always the same."""

    def close(self) -> None:
        """Gives up the round that another thread waits for, and the connection."""


class RemoteServer(Protocol):
    """A server whose model decides replies."""

    @property
    def url(self) -> str:
        """Where it is."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuses options by which this server decides no reply."""

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> RemoteReply:
        """A reply to a prompt, of which nothing is sent yet."""
