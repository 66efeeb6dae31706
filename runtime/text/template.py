"""Renders a conversation with a model's chat template, as transformers does; knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from edgeinfer.errors import PromptError, TemplateError
from edgeinfer.runtime.text.sandbox import GuardedEnvironment

__all__ = ["MAX_OUTPUT_CHARACTERS", "MAX_SOURCE_CHARACTERS", "ChatTemplate"]

MAX_SOURCE_CHARACTERS = 1_000_000  # the largest published templates have some 30,000
MAX_OUTPUT_CHARACTERS = 16_000_000  # several times the text of the longest contexts
_MAX_DEPTH = 64  # of nested values in messages and tools


class ChatTemplate:
    """A compiled chat template, for any number of threads.

    Templates come with models and are not trusted: they run in a sandbox, and one that does too much work fails.

    Args:
        source: jinja2 text.
        special_tokens: names to texts that the template may use, such as bos_token.
        now: the clock behind `strftime_now`.

    Attributes:
        source: as it was given.

    Raises:
        TemplateError: the source is too large or malformed.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(
                f"The chat template is too large ({len(source)} characters).",
                f"The limit is {MAX_SOURCE_CHARACTERS} characters.",
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = GuardedEnvironment()
        self._environment.globals["raise_exception"] = _reject
        self._environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            with self._environment.allowance():
                self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The chat template is malformed at line {error.lineno}: {error.message}.",
                "Fix chat_template.jinja or export the model again.",
            ) from error
        except Exception as error:  # absurd input makes jinja2 and the compiler fail in many ways
            raise _failure("cannot be compiled", error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the text the model was trained on.

        Args:
            messages: mappings with a str `role` and a `content` that is a str or a list of text parts, which are
                joined; `content` may be None or absent beside `tool_calls`. Other keys pass through.
            add_generation_prompt: end with what introduces the assistant's reply.
            tools: JSON schemas of functions, as OpenAI shapes them.
            variables: further names for the template, such as enable_thinking.

        Raises:
            PromptError: messages, tools or variables are malformed.
            TemplateError: the template failed, rejected the messages or does too much work.
        """
        conversation = _conversation(messages)
        plain_tools = None if tools is None else [_plain(tool, "tools") for tool in tools]
        names = {
            **self._special_tokens,
            **{name: _plain(value, name) for name, value in (variables or {}).items()},
            "messages": conversation,
            "tools": plain_tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            with self._environment.allowance():
                for piece in self._template.generate(names):
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARACTERS:
                        raise jinja2.TemplateRuntimeError(f"more than {MAX_OUTPUT_CHARACTERS} characters of output")
                    pieces.append(piece)
        except Exception as error:  # whatever a template's code raises is the template's failure
            raise _failure("failed", error) from error
        return "".join(pieces)


def _failure(what: str, error: Exception) -> TemplateError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TemplateError(
        f"The chat template {what}: {reason.rstrip('.')}.",
        "Check the messages against what the model's template allows.",
    )


def _reject(message: str) -> NoReturn:
    """`raise_exception` in templates."""
    raise jinja2.TemplateRuntimeError(message)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(
            "The messages are not a non-empty list.", 'Give a list such as [{"role": "user", "content": "Hello"}].'
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"Message {index} is not a mapping with a text 'role'.", "Give each message role and content."
        )
    plain: dict[str, Any] = _plain(message, f"message {index}")
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_part(part, index) for part in content)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise PromptError(
            f"The content of message {index} is {type(content).__name__}, not text.",
            "Give a str or a list of text parts.",
        )
    return plain


def _part(part: object, index: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise PromptError(
        f"Message {index} has a part that is not text.", 'Parts look like {"type": "text", "text": "..."}.'
    )


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types alone: templates see no object with methods of its own."""
    if depth > _MAX_DEPTH:
        raise PromptError(f"The {where} nest more than {_MAX_DEPTH} levels deep.", "Flatten them.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(_plain(key, where, depth + 1)): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise PromptError(f"The {where} hold a {type(value).__name__}, which is not JSON.", "Use JSON types only.")
