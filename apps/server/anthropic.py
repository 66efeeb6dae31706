"""/v1/messages as Anthropic has it: what its requests ask for, and its answers and events."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.apps.server.bodies import json_body
from edgeinfer.apps.server.completions import NAMED_EVENTS, CompletionKind
from edgeinfer.apps.server.events import Framing
from edgeinfer.apps.server.service import Service
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields, sampling
from edgeinfer.openai.messages import Message, read_message, split_started
from edgeinfer.openai.prompt import ChatPrompt, OneReply
from edgeinfer.openai.replies import ArgumentsPiece, Call, CallPiece, Piece, TextPiece
from edgeinfer.openai.schemas import closed
from edgeinfer.openai.tool_formats import dialect_of
from edgeinfer.openai.tools import ToolChoice, ToolUse, read_choice, read_functions
from edgeinfer.results import Chunk, Result

__all__ = ["ANTHROPIC_KINDS", "MessagesReply", "count_tokens"]

_IGNORED = ("metadata", "service_tier", "container", "context_management", "mcp_servers", "inference_geo", "speed")
_HINT = "Blocks of text, documents of text, tool_use and tool_result are supported; files and URLs are not opened."
# Where the whole answer would be told, blocks of thought are left out, as no model is told again what one thought.
_THOUGHT = ("thinking", "redacted_thinking")


class MessagesReply(OneReply):
    """Implements `contract.Completion` for a message.

    Args:
        body: of the request.
        model: that answers.

    Raises:
        RequestError: a field is unknown, malformed or asks for what cannot be.
    """

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        name = fields.text("model") or model.info.name
        stream = fields.flag("stream")
        options = fields.option("max_tokens")
        if not options:
            raise fields.missing("max_tokens", "Say how many tokens the reply may have.")
        stops = fields.items("stop_sequences")
        if stops:
            options |= fields.checked("stop_sequences", "stop", stops)
        options |= sampling(fields) | _form(fields)
        prompt = _read_prompt(fields, model, options)
        prompt.require_whole()
        fields.ignore(*_IGNORED)
        fields.ignore_others()
        fields.end()
        super().__init__(prompt, stream=stream, ignored=fields.ignored)
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name}
        self._blocks = 0
        self._open: str | None = None  # the type of the block that is being written

    def opening(self) -> list[Event]:
        """That there is a message."""
        message: Event = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return [{"type": "message_start", "message": message}]

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        """What became certain with a chunk."""
        return self._events(self._reply.push(chunk))

    def finished(self, index: int, result: Result) -> list[Event]:
        """What was held back, why the reply ended, and its tokens."""
        events = self._events(self._reply.finish(result))
        if not self._blocks:
            events += self._begin({"type": "text", "text": ""})
        delta = {"type": "message_delta", "delta": self._ended(), "usage": _usage(result)}
        return [*events, *self._end(), delta]

    def closing(self) -> list[Event]:
        """That nothing follows."""
        return [{"type": "message_stop"}]

    def whole(self) -> Event:
        """The answer."""
        text, calls = self._reply.text, [_block(call) for call in self._reply.calls]
        said = [{"type": "text", "text": text}] if text or not calls else []
        return {**self._head, "content": [*said, *calls], **self._ended(), "usage": _usage(self._reply.result)}

    def _ended(self) -> Event:
        result = self._reply.result
        assert result is not None, "the reply is not finished"
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if result.stop_string is not None else reasons[self._reply.finish_reason]
        return {"stop_reason": reason, "stop_sequence": result.stop_string}

    def _events(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    if self._open != "text":
                        events += self._begin({"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case CallPiece(_, id_, name):
                    events += self._begin({"type": "tool_use", "id": id_, "name": name, "input": {}})
                case ArgumentsPiece(_, text):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def _begin(self, block: Event) -> list[Event]:
        events = self._end()
        self._blocks, self._open = self._blocks + 1, block["type"]
        return [*events, {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._blocks - 1}]


_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
ANTHROPIC_KINDS: Mapping[str, CompletionKind] = {
    "/v1/messages": CompletionKind(MessagesReply, Framing(NAMED_EVENTS.media_type, NAMED_EVENTS.encode, _PING)),
}


async def count_tokens(service: Service, request: Request) -> Response:
    """Tells how many tokens the prompt of a message has."""
    async with (
        json_body(request, service.security, most=service.most_body()) as body,
        service.use(body.get("model"), request.receive) as model,
    ):
        if model.tokenizes_beside:
            return JSONResponse({"input_tokens": await asyncio.to_thread(_counted, body, model)})
        return JSONResponse({"input_tokens": await service.host.ask(lambda model: _counted(body, model))})


def _counted(body: Mapping[str, Any], model: ChatModel[Any]) -> int:
    fields = Fields(body)
    prompt = _read_prompt(fields, model, {}).prepared(model)
    fields.ignore("model", "output_config", *_IGNORED)
    fields.ignore_others()
    fields.end()
    assert prompt.tokens is not None, "it was just prepared"
    return len(prompt.tokens.ids)


def _read_prompt(fields: Fields, model: ChatModel[Any], options: Mapping[str, Any]) -> ChatPrompt:
    """The conversation of a request, its system text and its tools.

    Args:
        options: of the reply.

    Raises:
        RequestError: it is malformed, or holds what is no text.
    """
    messages, begun = split_started(_messages(fields.any("messages"), fields.any("system")))
    functions = read_functions([_tool(tool, place) for place, tool in enumerate(fields.items("tools"))])
    choice = _choice(fields, functions)
    thinking = fields.inner("thinking")
    variables = None if thinking is None else {"enable_thinking": thinking.any("type") in ("enabled", "adaptive")}
    budget = None if thinking is None else thinking.take("budget_tokens", int, "a number of tokens")
    if thinking is not None and budget is not None and "json_schema" not in options:
        options = {**options, **thinking.checked("budget_tokens", "thinking_budget", budget)}
    use = ToolUse(dialect_of(model.chat_template_text), choice)
    return ChatPrompt(messages, use, options, variables, begun, fields=("messages", "output_config.format"))


def _form(fields: Fields) -> dict[str, Any]:
    """Options of the field that asks for a form of the reply."""
    config = fields.inner("output_config")
    if config is None:
        return {}
    config.ignore("effort")
    inner = config.inner("format")
    config.end()
    if inner is None:
        return {}
    kind = inner.text("type")
    schema = inner.take("schema", dict, "a JSON Schema, an object")
    if kind != "json_schema" or schema is None:
        raise inner.wrong("type", kind, 'Give {"type": "json_schema", "schema": {...}}.')
    return {"json_schema": closed(schema)}


def _choice(fields: Fields, functions: Any) -> ToolChoice:
    inner = fields.inner("tool_choice")
    if inner is None:
        return read_choice(None, functions, True)
    kind, name = inner.text("type"), inner.text("name")
    several = not inner.flag("disable_parallel_tool_use")
    inner.end()
    wanted = {"auto": "auto", "any": "required", "none": "none"}.get(kind or "")
    if wanted is not None:
        return read_choice(wanted, functions, several)
    if kind != "tool":
        raise inner.wrong("type", kind, "It must be auto, any, none or tool.")
    return read_choice({"type": "function", "function": {"name": name}}, functions, several=False)


def _tool(tool: Any, place: int) -> dict[str, Any]:
    """A tool as OpenAI's requests have it."""
    inner = Fields(tool, f"tools[{place}].")
    kind = inner.text("type")
    if kind not in (None, "custom"):
        message = f"tools[{place}] is of type {kind!r}."
        hint = "Only the client's own functions can be called."
        raise RequestError(message, hint, param=f"tools[{place}].type", code="unsupported_tool")
    function = {name: inner.any(name) for name in ("name", "description")}
    function["parameters"] = inner.any("input_schema")
    inner.ignore("cache_control", "strict", "defer_loading", "eager_input_streaming", "allowed_callers")
    inner.ignore("input_examples")
    inner.end()
    return {"type": "function", "function": function}


def _messages(value: Any, system: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        hint = 'Give a list such as [{"role": "user", "content": "Hello"}].'
        raise RequestError("messages is not a non-empty list.", hint, param="messages")
    messages: list[Message] = []
    if system:
        messages.append(read_message({"role": "system", "content": _plain(system, "system")}, "system"))
    for place, message in enumerate(value):
        messages += _message(message, f"messages[{place}]")
    return messages


def _message(message: Any, where: str) -> list[Message]:
    """A message as OpenAI's requests have it: of its own, and one for each answer of a tool."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise RequestError(f"{where} has no known role.", "Roles are user and assistant.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [read_message({"role": role, "content": content}, where)]
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where}.content is missing.", "Send a string or blocks.", param=f"{where}.content")
    made: list[Message] = []
    text, calls = "", []
    for place, block in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            text += _plain([block], at)
        elif kind == "document" and role == "user":
            text += _document(block, at)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            answer = _plain(block.get("content") or "", at)
            made.append(read_message({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": answer}, at))
        elif kind not in _THOUGHT:
            shown = f"of type {kind!r}" if isinstance(kind, str) else "no block"
            raise RequestError(f"{at} is {shown[:80]}.", _HINT, param=at, code="unsupported_content")
    if text or calls or not made:
        own = {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})
        made.append(read_message(own, where))
    return made


def _document(block: Mapping[str, Any], where: str) -> str:
    """The text of a document, behind its title."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        raise RequestError(f"{where} is a document that is not text.", _HINT, param=where, code="unsupported_content")
    text = _plain(source.get("data" if kind == "text" else "content"), f"{where}.source")
    title = block.get("title")
    return f"{title}\n\n{text}\n\n" if isinstance(title, str) and title else f"{text}\n\n"


def _plain(content: Any, where: str) -> str:
    """The text of a content, which is one or a list of blocks of text."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [None]
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where} is not text.", _HINT, param=where, code="unsupported_content")
    return "".join(map(str, texts))


def _block(call: Call) -> Event:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:  # the reply was cut off inside of it
        arguments = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _usage(result: Result | None) -> dict[str, Any]:
    if result is None:
        return {"input_tokens": 0, "output_tokens": 0}
    cached = result.timings.cached_prompt_tokens
    return {
        "input_tokens": result.usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": result.usage.completion_tokens,
    }
