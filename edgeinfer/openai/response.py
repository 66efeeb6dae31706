"""/v1/responses: a response from its request to its last event, and the items of its output."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import Chunk, Result, TokenLogprob
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import IGNORED, MOST_ALTERNATIVES, Fields, form, limit, sampling, thinking, warnings
from edgeinfer.openai.messages import Message, joined, read_message
from edgeinfer.openai.prompt import ChatPrompt, PromptReplies
from edgeinfer.openai.replies import entries, responses_usage, timings
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions

_KEPT = "It holds a picture, or what only the server that wrote it can read: send the messages themselves."
# Items that the model does not see: the work of tools that another server ran.
_UNSEEN = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output",
    "additional_tools", "compaction_trigger", "program", "program_output", "computer_call", "configuration_update",
)  # fmt: skip
# Calls of tools that are no functions, with the field that holds their input, and their answers.
_CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "mcp_call": "arguments",
}
_ANSWERS = {f"{kind}_output" for kind in ("function_call", *_CALLS)}


def read_input(
    value: Any, instructions: str | None, leave_out: Callable[[str], None] = lambda _: None
) -> list[Message]:
    """The conversation that a response continues; `leave_out` is called with each ignored item."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise RequestError(
            "input is neither a string nor a non-empty list of items.", "Send one of them.", param="input"
        )
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        messages += _messages(item, f"input[{index}]", leave_out)
    if not messages:
        raise RequestError("input has no message to answer.", "Send one.", param="input")
    return _by_turn(messages)


def _messages(item: Any, where: str, leave_out: Callable[[str], None]) -> list[Message]:
    kind = (item.get("type") or "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return [read_message({"role": item.get("role"), "content": item.get("content")}, where)]
    if kind == "function_call":
        return [_call(item, item.get("name"), item.get("arguments"), where)]
    if kind in _CALLS:
        asked = item.get(_CALLS[kind])
        asked = asked if isinstance(asked, Mapping) or kind == "mcp_call" else {_CALLS[kind]: asked}
        call = _call(item, item.get("name") or kind.removesuffix("_call"), asked, where)
        return [call, _answer(item, where)] if kind == "mcp_call" and item.get("output") is not None else [call]
    if kind in _ANSWERS:
        return [_answer(item, where)]
    if kind == "reasoning":
        thought = _written(item.get("content")) or _written(item.get("summary"))
        return [{"role": "assistant", "content": "", "reasoning_content": thought}] if thought else []
    if kind in _UNSEEN:
        leave_out(f"{where} ({kind})")
        return []
    message = f"{where} is {f'of type {kind!r}' if isinstance(kind, str) else 'no item'}."
    raise RequestError(message, _KEPT, param=where, code="unsupported_content")


def _written(parts: Any) -> str:
    """The text of a reasoning item's content or summary."""
    listed = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in listed if isinstance(part, Mapping)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _call(item: Mapping[str, Any], name: Any, arguments: Any, where: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": _id(item), "type": "function", "function": function}
    return read_message({"role": "assistant", "content": None, "tool_calls": [call]}, where)


def _answer(item: Mapping[str, Any], where: str) -> Message:
    output = item.get("output")
    if isinstance(output, list) and all(isinstance(part, Mapping) and "stdout" in part for part in output):
        output = "".join(f"{part.get('stdout') or ''}{part.get('stderr') or ''}" for part in output)
    content = joined(item.get("status", "") if output is None else output, f"{where}.output")
    return read_message({"role": "tool", "tool_call_id": _id(item), "content": content}, where)


def _id(item: Mapping[str, Any]) -> Any:
    """The id that a call and its answer share; items of some tools have only `id`, and an answer may have none."""
    return next((item[name] for name in ("call_id", "id") if item.get(name) is not None), "")


def _by_turn(messages: list[Message]) -> list[Message]:
    """Merge each turn of the assistant into one message: its thought, its text, then its calls."""
    turns: list[Message] = []
    for message in messages:
        before = turns[-1] if turns else None
        if before is not None and message.get("tool_calls") and before["role"] == "assistant":
            calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
            turns[-1] = {**before, "content": before["content"] or None, "tool_calls": calls}
        elif before is not None and message["role"] == "assistant" and _only_thinks(before):
            thoughts = [before["reasoning_content"], message.get("reasoning_content")]
            turns[-1] = {**message, "reasoning_content": "\n\n".join(filter(None, thoughts))}
        else:
            turns.append(message)
    # A thought that nothing follows is of a reply that was cut off.
    return turns[:-1] if len(turns) > 1 and _only_thinks(turns[-1]) else turns


def _only_thinks(message: Message) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


# Cutting a conversation that is too long: not done here, so that the error shows.
_CUTTING = ("truncation", "context_management")
_IGNORED = (*IGNORED, *_CUTTING, "stream_options", "max_tool_calls", "background_options")
_LOGPROBS = "message.output_text.logprobs"


def _text(fields: Fields) -> dict[str, Any]:
    inner = fields.inner("text")
    if inner is None:
        return {}
    options = form(inner, "format")
    inner.end()
    return options


def _echoed_format(options: Mapping[str, Any]) -> dict[str, Any]:
    if "json_schema" in options:
        return {"type": "json_schema", "name": "schema", "schema": options["json_schema"], "strict": True}
    return {"type": "json_object" if "json_object" in options else "text"}


class Item:
    """An item that is being written: number `place` of the response, with an id that starts with `prefix`."""

    def __init__(self, place: int, prefix: str) -> None:
        self.id = f"{prefix}_{secrets.token_hex(24)}"
        self._at = {"output_index": place}
        self._place = {"item_id": self.id, **self._at}

    def opening(self) -> list[Event]:
        return [{"type": "response.output_item.added", **self._at, "item": self.whole("in_progress")}]

    def closing(self, status: str) -> list[Event]:
        return [{"type": "response.output_item.done", **self._at, "item": self.whole(status)}]

    def whole(self, status: str) -> Event:
        raise NotImplementedError


class MessageItem(Item):
    def __init__(self, place: int) -> None:
        super().__init__(place, "msg")
        self._content = {**self._place, "content_index": 0}
        self._text = ""
        self._logprobs: list[TokenLogprob] = []

    def opening(self) -> list[Event]:
        added = {"type": "response.content_part.added", **self._content, "part": self._part()}
        return [*super().opening(), added]

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        self._text += text
        self._logprobs += logprobs
        found = entries(logprobs)
        return [{"type": "response.output_text.delta", **self._content, "delta": text, "logprobs": found}]

    def closing(self, status: str) -> list[Event]:
        found = entries(self._logprobs)
        done = {"type": "response.output_text.done", **self._content, "text": self._text, "logprobs": found}
        part = {"type": "response.content_part.done", **self._content, "part": self._part()}
        return [done, part, *super().closing(status)]

    def whole(self, status: str) -> Event:
        started = status != "in_progress"
        content = [self._part()] if started else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": entries(self._logprobs)}


class CallItem(Item):
    def __init__(self, place: int, call_id: str, name: str) -> None:
        super().__init__(place, "fc")
        self._call = {"call_id": call_id, "name": name}
        self._arguments = ""

    def delta(self, text: str) -> list[Event]:
        self._arguments += text
        return [{"type": "response.function_call_arguments.delta", **self._place, "delta": text}]

    def closing(self, status: str) -> list[Event]:
        call = {"name": self._call["name"], "arguments": self._arguments}
        done = {"type": "response.function_call_arguments.done", **self._place, **call}
        return [done, *super().closing(status)]

    def whole(self, status: str) -> Event:
        call = {**self._call, "arguments": self._arguments}
        return {"id": self.id, "type": "function_call", "status": status, **call}


class ReasoningItem(Item):
    def __init__(self, place: int) -> None:
        super().__init__(place, "rs")
        self._content = {**self._place, "content_index": 0}
        self._text = ""

    def delta(self, text: str) -> list[Event]:
        self._text += text
        return [{"type": "response.reasoning_text.delta", **self._content, "delta": text}]

    def closing(self, status: str) -> list[Event]:
        done = {"type": "response.reasoning_text.done", **self._content, "text": self._text}
        return [done, *super().closing(status)]

    def whole(self, status: str) -> Event:
        content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self._text}]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class ResponseCompletion(PromptReplies):
    """Implements `contract.Completion` for a response."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        stream = fields.flag("stream")
        instructions = fields.text("instructions")
        messages = read_input(fields.any("input"), instructions, fields.leave_out)
        tools, wanted = fields.items("tools"), fields.any("tool_choice")
        several = fields.take("parallel_tool_calls", bool, "true or false") is not False
        functions = read_functions(tools, flat=True, leave_out=fields.leave_out)
        choice = read_choice(wanted, functions, several)
        alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
        self._logprobs_wanted = _LOGPROBS in fields.items("include") or bool(alternatives)
        options = limit(fields, "max_output_tokens", "max_completion_tokens", "max_tokens")
        options |= sampling(fields) | _text(fields)
        if self._logprobs_wanted:
            options["logprobs"] = alternatives or 0
        variables = thinking(fields, options)
        effort = variables.get("reasoning_effort")
        metadata = fields.take("metadata", dict, "an object") or {}
        fields.ignore(*_IGNORED)
        fields.only("prompt", (), "Nothing is stored here: send the text as input.")
        fields.end()
        used = ReplyOptions.for_chat(model.sampling, options)
        self._echoed = {  # fields of the request that the answer repeats
            "instructions": instructions,
            "max_output_tokens": options.get("max_tokens"),
            "metadata": metadata,
            "parallel_tool_calls": several,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": used.temperature,
            "text": {"format": _echoed_format(options)},
            "tool_choice": wanted or "auto",
            "tools": [{"parameters": None, "strict": True, "description": None, **tool} for tool in tools],
            "top_logprobs": alternatives or 0,
            "top_p": used.top_p,
        }
        use = ToolUse(dialect_of(model), choice)
        prompt = ChatPrompt(messages, use, options, variables or None, fields=("input", "text.format"))
        super().__init__(prompt, stream=stream, ignored=fields.ignored)
        self._items: list[Item] = []
        self._written: list[Event] = []  # items that are complete
        self._numbers = count()
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.info.name,
        }

    def opening(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response("in_progress")} for kind in kinds])

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        return self._numbered(self._events(self._reply.push(chunk)))

    def finished(self, index: int, result: Result) -> list[Event]:
        events = self._events(self._reply.finish(result))
        left = self._logprobs()
        if not any(isinstance(item, MessageItem | CallItem) for item in self._items) or left:
            events += self._text("", left)
        return self._numbered(events + self._close(self._status))

    def closing(self) -> list[Event]:
        return self._numbered([{"type": f"response.{self._status}", "response": self.whole()}])

    def whole(self) -> Event:
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    def _events(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    events += self._text(text, self._logprobs())
                case ReasoningPiece(text):
                    if not self._items or not isinstance(self._items[-1], ReasoningItem):
                        events += self._open(ReasoningItem(len(self._items)))
                    item = self._items[-1]
                    assert isinstance(item, ReasoningItem), "it was just opened"
                    events += item.delta(text)
                case CallPiece(_, id_, name):
                    events += self._open(CallItem(len(self._items), id_, name))
                case ArgumentsPiece(_, text):
                    item = self._items[-1]
                    assert isinstance(item, CallItem), "arguments belong to the call before them"
                    events += item.delta(text)
        return events

    def _text(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        events: list[Event] = []
        if not self._items or not isinstance(self._items[-1], MessageItem):
            if not text and self._items and isinstance(self._items[-1], CallItem):
                return []  # log-probabilities of a call have no field
            events += self._open(MessageItem(len(self._items)))
        item = self._items[-1]
        assert isinstance(item, MessageItem), "a message was just opened"
        return events + (item.delta(text, logprobs) if text or logprobs else [])

    def _logprobs(self) -> list[TokenLogprob]:
        found = self._reply.take_logprobs()
        return found if self._logprobs_wanted else []

    def _open(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        return events + item.opening()

    def _close(self, status: str) -> list[Event]:
        if len(self._written) == len(self._items):
            return []
        item = self._items[-1]
        self._written.append(item.whole(status))
        return item.closing(status)

    def _numbered(self, events: list[Event]) -> list[Event]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]

    def _response(self, status: str) -> Event:
        response = {
            **self._head,
            **self._echoed,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._written),
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None,
        }
        result = self._reply.result
        if result is None:
            return response
        response |= warnings(self.ignored)
        return response | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": responses_usage([result]),
            "timings": timings([result]),
        }
