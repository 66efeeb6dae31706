"""Functions that a reply may call: read from a request, described to the model, enforced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.records import dataclass
from edgeinfer.openai.call_grammar import OfferedFunction, calls_grammar
from edgeinfer.openai.calls import CallReader, PlainReader, ReplyReader
from edgeinfer.openai.contract import ChatModel
from edgeinfer.openai.dialects import TAG, Dialect, Kinds, ToolFormat
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.messages import Message
from edgeinfer.openai.schemas import closed
from edgeinfer.runtime.text.fitting import calls_in_text
from edgeinfer.runtime.text.streaming import CallMark

# OpenAI's names, and those of other makers: dots of modules, slashes and colons of servers.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOST = 512


# As Qwen's templates say it.
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class ToolFunction:
    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON Schema of its arguments, of type object
    strict: bool = False  # arguments must follow all of the schema

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The schema that arguments must follow; objects that list their properties have no others."""
        return closed(self.parameters)

    def as_tool(self) -> dict[str, Any]:
        """The function in the form of OpenAI's requests and chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def read_functions(
    tools: Sequence[Any], *, flat: bool = False, leave_out: Callable[[str], None] | None = None
) -> tuple[ToolFunction, ...]:
    """Read the functions of a request's tools, which in /v1/responses hold their fields themselves (`flat`).
    `leave_out` is called with each tool that only another server can run; without it such tools are refused."""
    if len(tools) > _MOST:
        raise RequestError(f"The request has {len(tools)} tools.", f"The limit is {_MOST}.", param="tools")
    places = [f"tools[{index}]" for index in range(len(tools))]
    kept = [(tool, at) for tool, at in zip(tools, places, strict=True) if not _left_out(tool, at, leave_out)]
    functions = tuple(_function(tool, at, flat) for tool, at in kept)
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"Two tools are named {name!r}.", "Use a different name for each.", param=kept[index][1])
    return functions


def _left_out(tool: Any, where: str, leave_out: Callable[[str], None] | None) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if leave_out is None or not isinstance(kind, str) or kind in ("", "function"):
        return False
    leave_out(f"{where} ({kind})")
    return True


def _function(tool: Any, where: str, flat: bool) -> ToolFunction:
    outer = Fields(tool, f"{where}.")
    kind = outer.text("type")
    if kind not in (None, "", "function"):
        message = f"{where} is of type {kind!r}."
        raise RequestError(message, "Only functions can be called.", param=f"{where}.type", code="unsupported_tool")
    inner = outer if flat else outer.inner("function")
    if inner is None:
        raise outer.missing("function", "Give the function's name and parameters.")
    name = inner.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise inner.wrong("name", name, "A name has up to 128 letters, digits, dots, slashes, colons, - and _.")
    parameters = inner.take("parameters", dict, "a JSON Schema, an object") or {"type": "object", "properties": {}}
    kind = parameters.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise inner.wrong("parameters", parameters, "Its type must be object.")
    strict = inner.flag("strict")
    inner.ignore("defer_loading", "allowed_callers")
    if kind != "object":
        parameters = {"type": "object"} | {word: value for word, value in parameters.items() if word != "type"}
    return ToolFunction(name, inner.text("description") or "", parameters, strict)


_HINT = 'Give none, auto, required or {"type": "function", "function": {"name": ...}}.'


@dataclass(frozen=True)
class ToolChoice:
    """The functions that the reply may call; `several` allows more than one call."""

    mode: Literal["none", "auto", "required"]
    functions: tuple[ToolFunction, ...]
    several: bool


def read_choice(value: Any, functions: Sequence[ToolFunction], several: bool) -> ToolChoice:
    """Read a request's choice, with a function's name inside `function` or, as in /v1/responses, next to `type`."""
    offered = tuple(functions)
    mode = value if isinstance(value, str) else None
    if value is None or mode in ("", "none", "auto"):
        return ToolChoice("auto" if offered and mode != "none" else "none", offered, several)
    if not offered:
        raise RequestError("tool_choice requires a call, but there are no tools.", "Add tools.", param="tool_choice")
    if mode == "required":
        return ToolChoice("required", offered, several)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice("required", (_named(value, offered),), several=False)
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value), offered, several)
    raise RequestError(f"tool_choice={value!r} is not supported.", _HINT, param="tool_choice")


def _allowed(value: Any, offered: tuple[ToolFunction, ...], several: bool) -> ToolChoice:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise RequestError("tool_choice.allowed_tools is malformed.", "Set mode and tools.", param="tool_choice")
    return ToolChoice(mode, tuple(_named(tool, offered) for tool in tools), several)


def _named(value: Any, offered: tuple[ToolFunction, ...]) -> ToolFunction:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    found = next((function for function in offered if function.name == name), None)
    if found is None:
        message = f"tool_choice names {name!r}, which is not among the tools."
        raise RequestError(message, "Name one of them.", param="tool_choice")
    return found


def conversation(messages: Sequence[Message], dialect: Dialect, functions: Sequence[ToolFunction]) -> list[Message]:
    """The messages for the template; where it knows no functions, messages describe `functions` and earlier calls."""
    if dialect.native:
        return _fitted(messages, dialect.format)
    return _with_system(calls_in_text(messages), _described(functions)) if functions else calls_in_text(messages)


def _fitted(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The messages with ids of calls as the template wants them."""
    made, known, index = [], dict[str, str](), 0
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = calls = [dict(call) for call in message["tool_calls"]]
            for call in calls:
                known[call["id"]] = form.fitted_id(call["id"], call["function"]["name"], index)
                call["id"] = known[call["id"]]
                index += 1
        if "tool_call_id" in message:
            given = message["tool_call_id"]
            changed["tool_call_id"] = known.get(given) or form.fitted_id(given, "", index)
        made.append(changed)
    return made


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# Forms of a reply that can be combined with calls, and those that cannot.
_WITH_CALLS = ("json_schema", "json_object")
_OTHERS = ("regex", "grammar", "choices")


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, in the dialect of one model."""

    dialect: Dialect
    choice: ToolChoice
    tokens: dict[int, dict[int, str]] = field(default_factory=dict, compare=False)  # of tags, by model
    # Grammars that were made, and what they leave out of schemas.
    made: dict[Any, tuple[str, tuple[str, ...]]] = field(default_factory=dict, compare=False)

    @property
    def calls(self) -> bool:
        return self.choice.mode != "none"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Constraints on calls that are not enforced; known after `options`."""
        return next((left_out for _, left_out in self.made.values()), ())

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        if not (self.calls and self.dialect.native):
            return None
        return [function.as_tool() for function in self.choice.functions]

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in the form that the model's chat template takes."""
        return conversation(messages, self.dialect, self.choice.functions if self.calls else ())

    def options(self, model: ChatModel[Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """The given options, changed for a reply that may hold calls."""
        if not self.calls:
            return dict(asked)
        other = next((name for name in _OTHERS if name in asked), None)
        if other is not None:
            raise RequestError(f"{other} cannot be combined with tools.", "Leave one out.", param=other)
        options = {name: value for name, value in asked.items() if name not in _WITH_CALLS}
        content = {"type": "object"} if "json_object" in asked else asked.get("json_schema")
        if content is not None and not self.dialect.format.anywhere:
            message = "A reply format cannot be combined with tools, as this model's calls are JSON objects too."
            raise RequestError(message, "Leave one out.", param="tools")
        try:
            grammar = self._grammar(model, content)
        except GrammarError as error:
            raise RequestError(error.message, error.hint, param="tools", code="unsupported_schema") from error
        return {**options, "grammar": grammar}

    def _grammar(self, model: ChatModel[Any], content: Any) -> str:
        tokens, free = self._tokens(model), self._free_tokens(model)
        key = json.dumps([tokens, free, content], sort_keys=True, default=str)
        if key not in self.made:
            self.made[key] = calls_grammar(
                self.dialect.format,
                [OfferedFunction(each.name, each.strict, each.parameters) for each in self.choice.functions],
                required=self.choice.mode == "required",
                several=self.choice.several,
                tokens=tokens,
                free_tokens=free,
                content=content,
            )
        return self.made[key][0]

    def reader(self, model: ChatModel[Any]) -> ReplyReader:
        if not self.calls:
            return PlainReader()
        kinds = Kinds({function.name: function.parameters for function in self.choice.functions})
        return CallReader(self.dialect.format, self._names, kinds, self._tokens(model))

    def mark(self, model: ChatModel[Any]) -> CallMark | None:
        """The start of calls in the reply; None where it holds none."""
        if not self.calls:
            return None
        form, tokens = self.dialect.format, self._tokens(model)
        token = next((id_ for id_, text in tokens.items() if form.opening.startswith(text)), None)
        anywhere = tuple(text for each in form.family if each.anywhere for text in each.markers(self._names))
        first = tuple(text for each in form.family if not each.anywhere for text in each.markers(self._names))
        return CallMark(anywhere if token is None else (), first, token)

    @property
    def _names(self) -> list[str]:
        return [function.name for function in self.choice.functions]

    def _tokens(self, model: ChatModel[Any]) -> dict[int, str]:
        """The tags of the dialect that are special tokens, which have no text, by id."""
        if id(model) not in self.tokens:
            texts = [text for form in self.dialect.format.family for text in form.tag_texts]
            self.tokens[id(model)] = _special(model, texts)
        return self.tokens[id(model)]

    def _free_tokens(self, model: ChatModel[Any]) -> list[int]:
        """Other special tokens that the chat template writes, such as those around thoughts."""
        return sorted(_special(model, TAG.findall(model.tool_template_text or "")).keys() - self._tokens(model).keys())


def _special(model: ChatModel[Any], texts: Sequence[str]) -> dict[int, str]:
    found = {}
    for text in dict.fromkeys(texts):
        ids = model.tokenize(text, add_special=False)
        if len(ids) == 1 and not model.detokenize(ids):
            found[ids[0]] = text
    return found


def _described(functions: Sequence[ToolFunction]) -> str:
    lines = [json.dumps(function.as_tool(), ensure_ascii=False) for function in functions]
    return _DESCRIPTION.format(functions="\n".join(lines))
