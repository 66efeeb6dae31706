"""Answers a request in the caller's own thread, one reply after the other; knows no endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from edgeinfer.openai.chat import ChatCompletion
from edgeinfer.openai.contract import Completion, Event

if TYPE_CHECKING:
    from edgeinfer.api import Model
    from edgeinfer.generation import TokenStream

__all__ = ["chat_completion", "events", "whole"]


def chat_completion(
    model: Model, messages: Sequence[Mapping[str, Any]], /, *, stream: bool, **request: Any
) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """Answers one request; see `Model.create_chat_completion`."""
    completion = ChatCompletion({**request, "messages": messages, "stream": stream}, model)
    return events(model, completion) if stream else whole(model, completion)


def whole(model: Model, completion: Completion) -> Event:
    """The answer to a request as one object."""
    for index in range(completion.n):
        for _ in _reply(completion, index, completion.start(model, index)):
            pass
    return completion.whole()


def events(model: Model, completion: Completion) -> Iterator[Event]:
    """The events of a request's answer. The first reply begins at once, so that errors show before the first event."""
    return _events(model, completion, completion.start(model, 0))


def _events(model: Model, completion: Completion, first: TokenStream) -> Iterator[Event]:
    with closing(first):
        yield from completion.opening()
        yield from _reply(completion, 0, first)
    for index in range(1, completion.n):
        with completion.start(model, index) as stream:
            yield from _reply(completion, index, stream)
    yield from completion.closing()


def _reply(completion: Completion, index: int, stream: TokenStream) -> Iterator[Event]:
    for chunk in stream:
        yield from completion.chunk(index, chunk)
    yield from completion.finished(index, stream.result)
