"""Puts conversations into a form that a chat template renders whole, which is found by rendering probes.

Templates differ in the roles they know, in the order of roles they insist on, and in whether content is text or a list
of parts. What they do not know they refuse, or leave out silently. So a probe, a conversation of the same shape whose
texts are easy to find, is rendered in one form after the other, as it was given first, until no text is missing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from edgeinfer.core.records import dataclass

Message = dict[str, Any]

# Hermes' and Qwen's notation, in which calls are written as text where the template does not know them.
_CALL = "<tool_call>\n{call}\n</tool_call>"
_ANSWER = "<tool_response>\n{content}\n</tool_response>"
_BETWEEN = "\n\n"  # texts that become one message
_SYSTEM = ("system", "developer")
# What each change costs: forms are tried from the cheapest on, so that no more is changed than must be.
_COSTS: Mapping[str, Mapping[Any, float]] = {
    "content": {"as given": 0, "text": 0.5, "parts": 0.6, "parts but system": 0.7, "parts of users": 0.8},
    "system": {"as given": 0, "renamed": 1, "first": 1.1, "none": 1.2},
    "calls": {"as given": 0, "other arguments": 1, "one by one": 1.6, "in text": 2.2},
    "empty": {"as given": 0, "text": 0.4, "null": 0.8, "left out": 0.9},
    "merged": {False: 0, True: 1},
    "led": {False: 0, True: 1.1},
    "listed": {False: 0, True: 1.3},
}
_MOST_FORMS, _MOST_MESSAGES = 96, 4000  # that are tried, and of all those together
_SHORT = 64  # characters of what stays as it is in a probe


@dataclass(frozen=True)
class Form:
    """What is changed about a conversation."""

    # Contents as they were given, all as text, or as lists of parts.
    content: Literal["as given", "text", "parts", "parts but system", "parts of users"] = "as given"
    # Which system messages are left: all, also those of developers by that name, the first, or none. The text of others
    # goes before that of the user message behind them.
    system: Literal["as given", "renamed", "first", "none"] = "as given"
    # Calls as they were given, their arguments as text instead of an object or the other way round, each in a message
    # of its own with its answer behind it, or written as text, with answers as messages of the user's.
    calls: Literal["as given", "other arguments", "one by one", "in text"] = "as given"
    # An empty content of a message with calls is as it was given, "", or None; or a reply that says nothing at all is
    # left out.
    empty: Literal["as given", "text", "null", "left out"] = "as given"
    merged: bool = False  # messages of one role in a row become one
    led: bool = False  # an empty user message stands before an assistant's that begins the conversation
    listed: bool = False  # where there are no tools, the template is given an empty list of them

    @property
    def cost(self) -> float:
        return sum(costs[getattr(self, name)] for name, costs in _COSTS.items())

    def of(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in this form; messages that stay as they are may be the same objects."""
        made = [message for message in messages if self.empty != "left out" or not _says_nothing(message)]
        if self.calls == "in text":
            made = calls_in_text(made)
        elif self.calls == "other arguments":
            made = [_turned(message) for message in made]
        elif self.calls == "one by one":
            made = _one_by_one(made)
        if self.system != "as given":
            made = _without_system(made, self.system)
        if self.merged:
            made = _merged(made)
        if self.led and (place := _unled(made)) is not None:
            made.insert(place, {"role": "user", "content": ""})
        return [self._filled(message) for message in made]

    def _filled(self, message: Message) -> Message:
        role, content = message["role"], message["content"]
        if not content and message.get("tool_calls") and self.empty in ("text", "null"):
            return {**message, "content": "" if self.empty == "text" else None}
        if self.content == "as given":
            return message
        parts = self.content == "parts" or (self.content == "parts but system" and role not in _SYSTEM)
        if not (parts or (self.content == "parts of users" and role == "user")):
            return message if isinstance(content, str | None) else {**message, "content": joined(content)}
        if isinstance(content, list) and content:
            return message
        return {**message, "content": [{"type": "text", "text": content or ""}]}


AS_GIVEN = Form()


def forms(messages: Sequence[Message], *, parts: bool, lists: bool) -> Iterator[Form]:
    """Other forms that a conversation can have, the smallest change first; `lists` if it may need an empty list of
    tools."""
    roles = [message["role"] for message in messages]
    calls = any(message.get("tool_calls") for message in messages)
    contents = [name for name in _COSTS["content"] if name.startswith("parts") == parts]
    systems = ["as given", *(["renamed"] if "developer" in roles else [])]
    if any(role in _SYSTEM for role in roles):
        systems += (["first"] if any(role in _SYSTEM for role in roles[1:]) else []) + ["none"]
    callings = ["as given", *(["other arguments"] if calls else []), *(["in text"] if calls or "tool" in roles else [])]
    callings += ["one by one"] if any(len(message.get("tool_calls") or ()) > 1 for message in messages) else []
    empties = ["as given", *(["text", "null"] if calls else [])]
    empties += ["left out"] if any(map(_says_nothing, messages)) else []
    product = itertools.product(contents, systems, callings, empties, *[(False, True)] * 2, (False, lists))
    seen = [(AS_GIVEN.of(messages), False)]
    most = max(8, min(_MOST_FORMS, _MOST_MESSAGES // len(messages)))
    cheapest = sorted((Form(*each) for each in product), key=lambda form: form.cost)
    for form in cheapest[: 4 * most]:  # many of them give the same
        made = (form.of(messages), form.listed)
        if made not in seen:
            seen.append(made)
            yield form
        if len(seen) > most:
            return


def calls_in_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls into the text of messages, and answers as messages of the user."""
    made: list[Message] = []
    answering = False
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            text = _ANSWER.format(content=joined(content))
            if answering:
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [_CALL.format(call=call_text(call)) for call in calls]
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "content")}
            made.append({**kept, "content": "\n".join(filter(None, [joined(content), *texts]))})
        else:
            made.append(message)
        answering = message["role"] == "tool"
    return made


def call_text(call: Mapping[str, Any]) -> str:
    """Write a call as a JSON object with its name and arguments; arguments that are no JSON stay as they are."""
    function = _function(call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}'


def joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _says_nothing(message: Message) -> bool:
    return message["role"] == "assistant" and not (message["content"] or message.get("tool_calls"))


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def _turned(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    turned: list[Message] = []
    for call in calls:
        function = dict(_function(call))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            read = _object(arguments)
            function["arguments"] = arguments if read is None else read
        else:
            function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        turned.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": turned}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Put each call in a message of its own, followed by its answers; answers that name no call come last."""
    made: list[Message] = []
    place = 0
    while place < len(messages):
        message, calls = messages[place], messages[place].get("tool_calls") or ()
        behind = place + 1
        while len(calls) > 1 and behind < len(messages) and messages[behind]["role"] == "tool":
            behind += 1
        answers = list(messages[place + 1 : behind])
        for number, call in enumerate(calls if len(calls) > 1 else ()):
            made.append({**message, "content": message["content"] if number == 0 else None, "tool_calls": [call]})
            made += [each for each in answers if each.get("tool_call_id") == call.get("id")]
            answers = [each for each in answers if each.get("tool_call_id") != call.get("id")]
        made += answers if len(calls) > 1 else [message]
        place = behind
    return made


def _object(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _without_system(messages: Sequence[Message], kept: str) -> list[Message]:
    """Rename system messages, or put those that are not kept before the text of the next user message."""
    made: list[Message] = []
    waiting: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] in _SYSTEM:
            if kept == "renamed" or (kept == "first" and place == 0):
                made.append({**message, "role": "system"})
            else:
                waiting.append({**message, "role": "user"})
        elif waiting and message["role"] == "user":
            made.append(_one([*waiting, message]))
            waiting = []
        else:
            made += [_one(waiting)] if waiting else []
            made.append(message)
            waiting = []
    return made + ([_one(waiting)] if waiting else [])


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of one role, except answers of tools."""
    made: list[Message] = []
    for message in messages:
        before = made[-1] if made else None
        if before and message["role"] == before["role"] != "tool" and not before.get("tool_calls"):
            made[-1] = _one([before, message])
        else:
            made.append(message)
    return made


def _one(messages: Sequence[Message]) -> Message:
    """Join messages; fields besides content are the last one's."""
    texts = [joined(message["content"]) for message in messages]
    return {**messages[0], **messages[-1], "content": _BETWEEN.join(filter(None, texts))}


def _unled(messages: Sequence[Message]) -> int | None:
    """Index of an assistant's message that begins the conversation; None if a user's does."""
    place = next((place for place, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    return place if place < len(messages) and messages[place]["role"] == "assistant" else None


@dataclass(frozen=True)
class ProbeConversation:
    """A conversation of the shape of another, whose texts can be found again in what a template makes of it. `texts`
    says where each probe text is, such as "messages[0].content, of the role system"."""

    messages: list[Message]
    tools: list[Message] | None
    texts: Mapping[str, str]

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> ProbeConversation:
        """Make the probe of a conversation."""
        maker = _ProbeMaker({})
        made = [maker.message(message, f"messages[{place}]") for place, message in enumerate(messages)]
        probe_tools = None if tools is None else [maker.tool(tool) for tool in tools[:1] if isinstance(tool, Mapping)]
        return cls(made, probe_tools, maker.texts)

    @property
    def key(self) -> str:
        """A text that is equal for all conversations of one shape."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str)


@dataclass(frozen=True)
class _ProbeMaker:
    texts: dict[str, str]

    def probe(self, where: str) -> str:
        probe = f"zq{len(self.texts)}qz"
        self.texts[probe] = where
        return probe

    def message(self, message: Message, where: str) -> Message:
        made = {
            name: "text"
            if isinstance(value, list | dict) or (isinstance(value, str) and len(value) > _SHORT)
            else value
            for name, value in message.items()
        }
        role, content = message["role"], message["content"]
        if content:
            what = f"{where}.content, of the role {role[:_SHORT]}"
            parts = [{**part, "text": self.probe(what)} for part in content] if isinstance(content, list) else None
            made["content"] = self.probe(what) if parts is None else parts
        else:
            made["content"] = content
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [self.call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        return made

    def call(self, call: Message, where: str) -> Message:
        function = dict(_function(call))
        arguments = function.get("arguments")
        function["name"] = self.probe(f"{where}.function.name")
        if arguments:
            name = f"{where}.function.arguments"
            read = _object(arguments) if isinstance(arguments, str) else arguments
            if isinstance(read, dict):
                made = {self.probe(name): self.probe(name)} if read else {}
                function["arguments"] = json.dumps(made) if isinstance(arguments, str) else made
            else:
                function["arguments"] = self.probe(name)
        return {**call, "function": function} if "function" in call else function

    def tool(self, tool: Mapping[str, Any]) -> Message:
        name, description, parameter = (
            self.probe(f"a tool's {what}") for what in ("name", "description", "parameters")
        )
        parameters = {
            "type": "object",
            "properties": {parameter: {"type": "string", "description": name}},
            "required": [parameter],
        }
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function} if "function" in tool else function
