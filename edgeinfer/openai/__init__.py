"""OpenAI's wire formats over a model, as plain dicts: requests read, answers and events written; knows no HTTP. Fields
and values follow the OpenAI API reference; `timings` adds llama-server's figures."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar, cast

from edgeinfer.core.errors import UsageError
from edgeinfer.openai.chat import ChatCompletion
from edgeinfer.openai.contract import (
    ChatCompletionChunk,
    ChatCompletionObject,
    ChatModel,
    Completion,
    Event,
    ReplyStream,
)
from edgeinfer.openai.response import ResponseCompletion
from edgeinfer.openai.text import TextCompletion

T = TypeVar("T")

_KINDS: dict[str, Callable[[Mapping[str, Any], ChatModel[Any]], Completion]] = {
    "chat.completion": ChatCompletion,
    "text_completion": TextCompletion,
    "response": ResponseCompletion,
}


def make_completion(kind: str, body: Mapping[str, Any], model: ChatModel[Any]) -> Completion:
    """A request of one of `_KINDS`, checked."""
    if kind not in _KINDS:
        raise UsageError(f"There is no kind of request {kind!r}.", f"Choose one of {', '.join(_KINDS)}.")
    return _KINDS[kind](body, model)


def chat_completion(
    model: ChatModel[Any], messages: Sequence[Mapping[str, Any]], /, *, stream: bool, **request: Any
) -> ChatCompletionObject | Iterator[ChatCompletionChunk]:
    """Answers one request; see `Model.create_chat_completion`."""
    completion = ChatCompletion({**request, "messages": messages, "stream": stream}, model)
    if stream:
        return cast(Iterator[ChatCompletionChunk], events(model, completion))
    return cast(ChatCompletionObject, whole(model, completion))


def answering(model: ChatModel[Any], completion: Completion) -> Generator[Any, None, Event]:
    """Make the replies of a request one after the other: yields each stream, then reads it; returns the answer."""
    for index in range(completion.n):
        stream = completion.start(model, index)
        yield stream
        for _ in _reply(completion, index, stream):
            pass
    return completion.whole()


def whole(model: ChatModel[Any], completion: Completion) -> Event:
    return completed(answering(model, completion))


def completed(making: Generator[Any, None, T]) -> T:
    """What a generator returns that makes replies, with the model to itself."""
    try:
        while True:
            next(making)
    except StopIteration as done:
        value: T = done.value
        return value


def events(model: ChatModel[Any], completion: Completion) -> Iterator[Event]:
    """The events of a request's answer. The first reply begins at once, so that errors show before the first event."""
    return _events(model, completion, completion.start(model, 0))


def _events(model: ChatModel[Any], completion: Completion, first: ReplyStream) -> Iterator[Event]:
    with closing(first):
        yield from completion.opening()
        yield from _reply(completion, 0, first)
    for index in range(1, completion.n):
        with completion.start(model, index) as stream:
            yield from _reply(completion, index, stream)
    yield from completion.closing()


def _reply(completion: Completion, index: int, stream: ReplyStream) -> Iterator[Event]:
    for chunk in stream:
        yield from completion.chunk(index, chunk)
    yield from completion.finished(index, stream.result)
