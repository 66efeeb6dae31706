"""OpenAI's wire formats over a model, as plain dicts: requests read, answers and events written; knows no HTTP.

Fields and values follow the OpenAI API reference; `timings` adds llama-server's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import UsageError
from edgeinfer.openai.chat import ChatCompletion
from edgeinfer.openai.contract import Completion, Event
from edgeinfer.openai.errors import RequestError, error_body, unknown_model
from edgeinfer.openai.responses import ResponseCompletion
from edgeinfer.openai.synchronous import chat_completion
from edgeinfer.openai.text import TextCompletion

if TYPE_CHECKING:
    from edgeinfer.api import Model

__all__ = [
    "Completion",
    "Event",
    "RequestError",
    "chat_completion",
    "error_body",
    "make_completion",
    "unknown_model",
]

_KINDS: dict[str, Callable[[Mapping[str, Any], Model], Completion]] = {
    "chat.completion": ChatCompletion,
    "text_completion": TextCompletion,
    "response": ResponseCompletion,
}


def make_completion(kind: str, body: Mapping[str, Any], model: Model) -> Completion:
    """A request, checked.

    Args:
        kind: "chat.completion", "text_completion" or "response".
        body: the request's JSON object.
        model: that answers.

    Raises:
        UsageError: a field is unknown, malformed or asks for what cannot be.
    """
    if kind not in _KINDS:
        raise UsageError(f"There is no kind of request {kind!r}.", f"Choose one of {', '.join(_KINDS)}.")
    return _KINDS[kind](body, model)
