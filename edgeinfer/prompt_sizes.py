"""Refuses prompts that are far too long for a model before work is done on all of them; knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.errors import ContextLengthError
from edgeinfer.model_parts import ModelParts
from edgeinfer.runtime.text import surely_longer

__all__ = ["require_fitting_messages", "require_fitting_text"]

# Contexts that a prompt may fill whose beginning is forgotten anyway.
_FORGOTTEN = 16
# How many times longer than the context's text messages may be: templates leave out some of what they are given.
_LEFT_OUT = 16


def require_fitting_text(parts: ModelParts, text: str) -> None:
    """Refuses a text that is far too long, before all of it is made tokens of; `Engine.check` judges the rest.

    Raises:
        ContextLengthError: it has far more tokens than the model takes.
    """
    most = _most_tokens(parts)
    if len(text) > most and surely_longer(parts.tokenizer, text, most, lambda: parts.longest_token):
        raise _too_long(len(text), most)


def require_fitting_messages(parts: ModelParts, messages: Sequence[Mapping[str, Any]]) -> None:
    """The same for messages, before a template is given them."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    size = sum(len(content) for content in contents if isinstance(content, str))
    most = _most_tokens(parts)
    if size > most * _LEFT_OUT and size > most * _LEFT_OUT * parts.longest_token:
        raise _too_long(size, most)


def _most_tokens(parts: ModelParts) -> int:
    engine = parts.engine
    return engine.backend.cache.capacity * (1 if engine.context_shift is None else _FORGOTTEN)


def _too_long(size: int, most: int) -> ContextLengthError:
    message = f"The prompt has {size} characters, far more than {most} tokens, which is what the model takes."
    return ContextLengthError(message, "Shorten it, or load the model with a larger context (-c).")
