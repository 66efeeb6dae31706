"""Renders a conversation with a model's chat template, as transformers does; knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from edgeinfer.errors import PromptError, TemplateError
from edgeinfer.runtime.text.allowance import ELEMENT_COST, MAX_INTEGER_BITS, size_of
from edgeinfer.runtime.text.known_templates import is_known
from edgeinfer.runtime.text.render_process import RenderProcess, RenderProcessError, can_start
from edgeinfer.runtime.text.rendering import MAX_OUTPUT_CHARACTERS, RenderError, Rendering, check_syntax

__all__ = ["MAX_GIVEN_BYTES", "MAX_OUTPUT_CHARACTERS", "MAX_SOURCE_CHARACTERS", "ChatTemplate"]

MAX_SOURCE_CHARACTERS = 100_000  # the largest published templates have some 30,000
MAX_GIVEN_BYTES = 8_000_000  # of messages, tools and variables: several times the longest contexts
_MAX_DEPTH = 64  # of nested values in messages and tools
# What `strftime_now` knows, each also without its leading zero, as "%-d".
_DIRECTIVES = "aAbBcdDeFfGgHhIjklMmpPRsSTuUVwWxXyYzZ"


class ChatTemplate:
    """A chat template, for any number of threads.

    Templates come with models and are not trusted: they may use listed operations only, and one that does too much work
    fails. One whose text is not known besides is rendered in a process of its own, which can be ended whatever it does.
    Frozen applications have no interpreter to start; there it is rendered in this process, inside the same limits.

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
        self._now = now
        self._process: RenderProcess | None = None
        self._rendering: Rendering | None = None
        try:
            if is_known(source) or not can_start():
                self._rendering = Rendering(source)
            else:
                check_syntax(source)
                self._process = RenderProcess(source)
        except RenderError as error:
            hint = "Fix chat_template.jinja or export the model again."
            raise TemplateError(f"The chat template {error.what}: {error.reason}.", hint) from error

    @property
    def process(self) -> RenderProcess | None:
        """What renders it elsewhere; None where this process does."""
        return self._process

    def close(self) -> None:
        """Ends the process that renders it, if there is one. The next render starts another."""
        if self._process is not None:
            self._process.close()

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
            PromptError: messages, tools or variables are malformed or too long.
            TemplateError: the template failed, rejected the messages or does too much work.
        """
        conversation = _conversation(messages)
        plain_tools = None if tools is None else [_plain(tool, "tools") for tool in tools]
        names = {
            **self._special_tokens,
            **{str(name): _plain(value, str(name)) for name, value in (variables or {}).items()},
            "messages": conversation,
            "tools": plain_tools,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        given = _size(names)
        if given > MAX_GIVEN_BYTES:
            raise PromptError(
                f"The messages are too long ({given} bytes).", f"The limit is {MAX_GIVEN_BYTES} bytes; shorten them."
            )
        moment = _moment(self._now()) if "strftime_now" in self.source else {}
        try:
            if self._rendering is not None:
                return self._rendering.render(names, given, moment)
            assert self._process is not None
            answer = self._process.ask({"names": names, "given": given, "moment": moment})
        except RenderError as error:
            raise _failure(error.what, error.reason) from error
        except RenderProcessError as error:
            raise _failure("failed", str(error)) from error
        if "text" not in answer:
            raise _failure(answer["what"], answer["reason"])
        text: str = answer["text"]
        return text


def _failure(what: str, reason: str) -> TemplateError:
    return TemplateError(
        f"The chat template {what}: {reason}.",
        "Check the messages against what the model's template allows, or take its makers' own template.",
    )


def _moment(now: datetime) -> dict[str, str]:
    """What each directive gives now; a template's own text never reaches the system's formatting."""
    parts = {"%": "%"}
    for directive in (prefix + letter for prefix in ("", "-") for letter in _DIRECTIVES):
        try:
            parts[directive] = now.strftime(f"%{directive}")
        except ValueError:  # not known to this system
            continue
    return parts


def _size(value: Any) -> int:
    """Bytes that plain values take, about."""
    if isinstance(value, str):
        return ELEMENT_COST + size_of(value)
    if isinstance(value, dict):
        return ELEMENT_COST + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return ELEMENT_COST + sum(map(_size, value))
    return ELEMENT_COST


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
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise PromptError(f"The {where} hold a number of more than {MAX_INTEGER_BITS} bits.", "Give it as text.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(_plain(key, where, depth + 1)): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise PromptError(f"The {where} hold a {type(value).__name__}, which is not JSON.", "Use JSON types only.")
