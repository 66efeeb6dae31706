"""What a request is to whoever serves it: parsed and checked, then turned into wire objects; knows no endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from edgeinfer.results import Chunk, Result

if TYPE_CHECKING:
    from edgeinfer.api import Model
    from edgeinfer.generation import TokenStream

__all__ = ["Completion", "Event"]

Event = dict[str, Any]


class Completion(Protocol):
    """One request. Its replies may be made in any order, also a chunk of each in turn.

    Streamed, a client is sent what `opening`, `chunk`, `finished` and `closing` give, in order; else `whole`, once
    `chunk` and `finished` were called for every reply all the same.
    """

    @property
    def n(self) -> int:
        """How many replies there are."""

    @property
    def stream(self) -> bool:
        """Whether the client wants the events, and not the whole."""

    def check(self, model: Model) -> None:
        """Finds out what is wrong with the form of the reply that was asked for, such as a JSON Schema. That may take
        some seconds, which `start` then need not take again. Safe from any thread.

        Raises:
            RequestError: it cannot be had.
        """

    def prepare(self, model: Model) -> None:
        """Makes tokens of the prompts, which `start` then need not do. Once at most, and where the model's tokens can
        be made beside a running reply, on any thread.

        Raises:
            PromptError, ContextLengthError, TemplateError, UsageError: as `Model.stream_chat`.
        """

    def start(self, model: Model, index: int) -> TokenStream:
        """Begins a reply, on the model's thread.

        Raises:
            PromptError, ContextLengthError, TemplateError, UsageError: as `Model.stream_chat`.
        """

    def opening(self) -> list[Event]:
        """Events before any text."""

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        """Events of a chunk of a reply; maybe none."""

    def finished(self, index: int, result: Result) -> list[Event]:
        """Events of a reply's end, after its last chunk."""

    def closing(self) -> list[Event]:
        """Events after every reply's end."""

    def whole(self) -> Event:
        """The answer as one object, after every reply's end."""
