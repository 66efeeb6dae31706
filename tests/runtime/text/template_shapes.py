"""Conversations of every shape that clients send, and what a chat template makes of them here and in transformers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import EdgeInferError
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.replies import dialect_of
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions
from edgeinfer.runtime.text.template import ChatTemplate

TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# s, d, u, a: messages of system, developer, user, assistant; c: a call, C: two calls, b: a call with text; t: an
# answer of a tool.
_PLAIN = "u su suau uau suauau s ssu du usu uasu uu suu uuau uaau au sau aau sua"
_CALLING = "uct suct uctau uctu uCtt uCttau sucta ubtu uctctu ut sutu ucu"
ORDERS = (*_PLAIN.split(), *_CALLING.split())
_CONTENTS = ("text", "part", "parts", "empty")
_ARGUMENTS = ("object", "json", "{", "null", "[]", "{'mark': 1}")
_TEXT = re.compile(r"vk\d+kv")
_NOTHING = re.compile(r"\b(None|null)\b")
_PRINTED = re.compile(r"""["']text["']: ?["']vk\d+kv""")


@dataclass(frozen=True)
class Shape:
    """A conversation, all texts of which are marks.

    Attributes:
        order: of roles, a letter each.
        content: how contents are given; "empty" is the assistant's content, null where there are calls.
        arguments: how those of calls are given.
        tools: whether functions are offered.
    """

    order: str
    content: str = "text"
    arguments: str = "object"
    tools: bool = False

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.order} {self.content} {self.arguments}{' tools' if self.tools else ''}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As clients send them."""
        numbers = itertools.count()
        return [message for place, kind in enumerate(self.order) for message in self._messages(kind, place, numbers)]

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """As clients send them."""
        if not self.tools:
            return None
        parameters = {
            "type": "object",
            "properties": {"vk92kv": {"type": "string", "description": "of it"}},
            "required": ["vk92kv"],
        }
        function = {"name": "vk90kv", "description": "vk91kv", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def _messages(self, kind: str, place: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
        role = {"s": "system", "d": "developer", "u": "user", "t": "tool"}.get(kind, "assistant")
        message: dict[str, Any] = {"role": role, "content": self._content(role, numbers)}
        if kind in "cCb":
            calls = [self._call(f"call{place}000{at}", numbers) for at in range(2 if kind == "C" else 1)]
            message["tool_calls"] = calls
            if kind != "b":
                message["content"] = "" if self.content == "empty" else None
        if kind == "t":
            # That of the call before, or of its second call.
            called = max(self.order.rfind(each, 0, place) for each in "cCb")
            message["tool_call_id"] = f"call{called}000{place - called - 1}" if called >= 0 else "call00000"
        yield message

    def _content(self, role: str, numbers: Iterator[int]) -> Any:
        if self.content == "empty" and role == "assistant":
            return ""
        if self.content == "parts":
            return [{"type": "text", "text": f"vk{next(numbers)}kv"} for _ in range(2)]
        text = f"vk{next(numbers)}kv"
        return [{"type": "text", "text": text}] if self.content == "part" else text

    def _call(self, id_: str, numbers: Iterator[int]) -> dict[str, Any]:
        name, key, value = (f"vk{next(numbers)}kv" for _ in range(3))
        arguments: Any = {key: value}
        if self.arguments == "json":
            arguments = f'{{"{key}": "{value}"}}'
        elif self.arguments != "object":
            arguments = self.arguments.replace("mark", key)
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _shapes() -> Iterator[Shape]:
    for order in ORDERS:
        calls = any(kind in "cCb" for kind in order)
        for tools in (False, True):
            for content in _CONTENTS:
                if content != "empty" or "a" in order or calls:
                    yield Shape(order, content, "object", tools)
            if calls:
                for arguments in _ARGUMENTS[1:]:
                    yield Shape(order, "text", arguments, tools)


SHAPES = tuple(_shapes())


@dataclass(frozen=True)
class Verdict:
    """What came of a shape.

    Attributes:
        kind: "as transformers", "another form" (which transformers refuses, or leaves something out of), "refused" by
            name; "differs" from transformers, "incomplete", or refused "unnamed".
        detail: of what should not be.
    """

    kind: str
    detail: str = ""


def judged(source: str, shape: Shape, template: ChatTemplate | None = None) -> Iterator[Verdict]:
    """What a template makes of a shape, by Python's way in and by that of requests."""
    template = template or ChatTemplate(source, TOKENS)
    messages, tools = shape.messages, shape.functions
    yield _judged(source, template, messages, tools, messages, tools)
    read = read_messages(messages)
    use = ToolUse(dialect_of(source), read_choice(None, read_functions(tools or []), True))
    yield _judged(source, template, use.messages(read), use.template_tools, messages, tools)


def _judged(
    source: str,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    sent: Any,
    offered: Any,
) -> Verdict:
    marks = set(_TEXT.findall(f"{sent}{offered}"))
    expected = _expected(source, messages, tools)
    try:
        text = template.render(messages, tools=tools)
    except EdgeInferError as error:
        named = error.hint and (
            "messages[" in error.message or "a tool's" in error.message or "failed: " in error.message
        )
        if expected is not None and marks <= _whole(expected):
            return Verdict("differs", f"refused: {error.message}")
        return Verdict("refused" if named else "unnamed", error.message)
    if missing := marks - _whole(text):
        return Verdict("incomplete", f"{sorted(missing)} in {text!r}")
    if expected is not None and marks <= _whole(expected):
        same = text == expected
        return Verdict("as transformers" if same else "differs", "" if same else f"{text!r} is not {expected!r}")
    return Verdict("another form")


def _whole(text: str) -> set[str]:
    """The marks of a text, unless lists of parts were printed."""
    return set() if _PRINTED.search(text) else set(_TEXT.findall(text))


def _expected(source: str, messages: Sequence[Any], tools: Any) -> str | None:
    """What transformers makes of it; None where it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # A template that writes null content writes "None", of which no model learnt anything.
    for given in (messages, [{**message, "content": message["content"] or ""} for message in messages]):
        try:
            rendered = render_jinja_template(
                [list(given)], tools=tools, chat_template=source, add_generation_prompt=True, **TOKENS
            )[0]
        except Exception:
            continue
        text = str(rendered[0])
        said = text.replace("null", "") if "'null'" in f"{messages}" else text  # as arguments
        if not (any(message["content"] is None for message in given) and _NOTHING.search(said)):
            return text
    return None
