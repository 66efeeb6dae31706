"""Anthropic's /v1/messages: requests, answers and events."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.apps.server.bodies import json_body
from edgeinfer.apps.server.completions import NAMED_EVENTS, CompletionKind
from edgeinfer.apps.server.service import Service
from edgeinfer.core.results import Chunk, Result
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields, form, sampling, thinking, warnings
from edgeinfer.openai.messages import Message, read_message, split_prefill
from edgeinfer.openai.prompt import ChatPrompt, PromptReplies
from edgeinfer.openai.replies import Call
from edgeinfer.openai.tools import ToolChoice, ToolUse, read_choice, read_functions

LeaveOut = Callable[[str], None]

_HINT = (
    "Text, documents of text, search results, the assistant's tool_use and the user's tool_result are read; files and "
    "URLs are not opened."
)
# Another server's thought, which only that one can read.
_HIDDEN = "redacted_thinking"
# Blocks about tools of other servers, without text or with text that only those servers can read.
_ELSEWHERE = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "tool_addition", "tool_removal",
    "fallback",
)  # fmt: skip
_ROLES = ("user", "assistant", "system")


def read_messages(value: Any, system: Any, leave_out: LeaveOut) -> list[Message]:
    """Read the conversation as OpenAI's messages, the system text first; `leave_out` is called with each block that the
    model does not read, except thoughts."""
    if not isinstance(value, list) or not value:
        hint = 'Give a list such as [{"role": "user", "content": "Hello"}].'
        raise RequestError("messages is not a non-empty list.", hint, param="messages")
    messages: list[Message] = []
    if system:
        messages.append(read_message({"role": "system", "content": _text(system, "system")}, "system"))
    for place, message in enumerate(value):
        messages += _message(message, f"messages[{place}]", leave_out)
    return messages


def _message(message: Any, where: str, leave_out: LeaveOut) -> list[Message]:
    """One message, and one for each tool result in it."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise RequestError(f"{where} has no known role.", f"Roles are {', '.join(_ROLES)}.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [read_message({"role": role, "content": content}, where)]
    if not isinstance(content, list) or not (content or role == "assistant"):
        raise RequestError(f"{where}.content is missing.", "Send a string or blocks.", param=f"{where}.content")
    made: list[Message] = []
    text, thought, calls = "", "", []
    for place, block in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            answer = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            made.append(read_message(answer | {"content": _text(block.get("content") or "", f"{at}.content")}, at))
        elif kind in _ELSEWHERE:
            leave_out(f"{at} ({kind})")
        elif kind == "thinking" and role == "assistant":
            written = block.get("thinking")
            thought += written if isinstance(written, str) else ""
        elif kind != _HIDDEN:
            text += _block_text(block, at)
    if text or thought or calls or not made:
        own = {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})
        own |= {"reasoning_content": thought} if thought else {}
        made.append(read_message(own, where))
    return made


def _text(content: Any, where: str) -> str:
    """The text of a content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused("is neither a string nor a list of blocks", where)
    return "".join(_block_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    match kind:
        case "text" | "compaction":  # compaction is a summary, null if it failed
            text = block.get("text" if kind == "text" else "content")
            if isinstance(text, str) or (text is None and kind == "compaction"):
                return text or ""
            raise _refused("has no text", where)
        case "document":
            return _document(block, where)
        case "search_result":
            return f"{_titled(block, 'title', 'source')}{_text(block.get('content'), f'{where}.content')}\n\n"
        case "tool_reference":
            return f"{block.get('tool_name')}\n"
    raise _refused(f"is {f'of type {kind!r}'[:80] if isinstance(kind, str) else 'no block'}", where)


def _document(block: Mapping[str, Any], where: str) -> str:
    """The text of a document, after its title and context."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        raise _refused("is a document that is not text", where)
    name = "data" if kind == "text" else "content"
    return f"{_titled(block, 'title', 'context')}{_text(source.get(name), f'{where}.source.{name}')}\n\n"


def _titled(block: Mapping[str, Any], *names: str) -> str:
    """Fields of a block that describe its text, each as a paragraph."""
    return "".join(f"{text}\n\n" for name in names if isinstance(text := block.get(name), str) and text)


def _refused(what: str, where: str) -> RequestError:
    return RequestError(f"{where} {what}.", _HINT, param=where, code="unsupported_content")


# Fields about users, costs and storage, which do not change the text.
_IGNORED = (
    "metadata", "service_tier", "inference_geo", "speed", "cache_control", "user_profile_id", "workspace_id", "betas",
    "billing_policy",
)  # fmt: skip


class MessagesReply(PromptReplies):
    """Implements `contract.Completion` for /v1/messages."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        name = fields.text("model") or model.info.name
        stream = fields.flag("stream")
        most = fields.take("max_tokens", int, "a whole number")
        if most is None:
            raise fields.missing("max_tokens", "Say how many tokens the reply may have.")
        # A reply of 0 tokens only fills the cache with the prompt; here that takes its first token.
        self._shown = most != 0
        options = fields.checked("max_tokens", "max_tokens", most or 1)
        options |= fields.option("stop_sequences", "stop")
        options |= sampling(fields) | form(fields, "output_format")  # the older name of output_config.format
        prompt = _read_prompt(fields, model, options)
        prompt.require_whole()
        fields.ignore(*_IGNORED)
        fields.end()
        super().__init__(prompt, stream=stream, ignored=fields.ignored)
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name}
        self._blocks = 0
        self._open: str | None = None  # the type of the block that is being written

    def opening(self) -> list[Event]:
        message: Event = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._asked(),
        }
        return [{"type": "message_start", "message": message}]

    def _asked(self) -> Event:
        """Prompt tokens; cached ones are known only when the reply begins, and come last."""
        (prompt,) = self._prompts
        assert isinstance(prompt, ChatPrompt) and prompt.tokens is not None, "it was prepared"
        return {"input_tokens": len(prompt.tokens.ids), "output_tokens": 0}

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        pieces = self._reply.push(chunk)
        return self._events(pieces) if self._shown else []

    def finished(self, index: int, result: Result) -> list[Event]:
        pieces = self._reply.finish(result)
        events = self._events(pieces) if self._shown else []
        if not self._blocks and self._shown:
            events += self._begin({"type": "text", "text": ""})
        delta = {"type": "message_delta", "delta": self._ended(), "usage": self._usage(result)}
        return [*events, *self._end(), delta]

    def closing(self) -> list[Event]:
        return [{"type": "message_stop"}]

    def whole(self) -> Event:
        text, calls = self._reply.text, [_block(call) for call in self._reply.calls]
        thought = self._reply.reasoning
        thoughts = [{"type": "thinking", "thinking": thought, "signature": _signature(thought)}] if thought else []
        said = [{"type": "text", "text": text}] if text or not (thought or calls) else []
        content, result = [*thoughts, *said, *calls] if self._shown else [], self._reply.result
        assert result is not None, "the reply is not finished"
        answer = {**self._head, "content": content, **self._ended(), "usage": self._usage(result)}
        return answer | warnings(self.ignored)

    def _ended(self) -> Event:
        result = self._reply.result
        assert result is not None, "the reply is not finished"
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if result.stop_string is not None else reasons[self._reply.finish_reason]
        if not self._shown:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": reason, "stop_sequence": result.stop_string}

    def _usage(self, result: Result) -> Event:
        cached = result.timings.cached_prompt_tokens
        return {
            "input_tokens": result.usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": result.usage.completion_tokens if self._shown else 0,
        }

    def _events(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    if self._open != "text":
                        events += self._begin({"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case ReasoningPiece(text):
                    if self._open != "thinking":
                        events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
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
        signed: list[Event] = []
        if self._open == "thinking":
            signed.append(self._delta({"type": "signature_delta", "signature": _signature(self._reply.reasoning)}))
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": self._blocks - 1}]


def _signature(thought: str) -> str:
    """What clients send back with a thought. Nothing here checks it, as models take any thought for theirs."""
    return hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
ANTHROPIC_KINDS: Mapping[str, CompletionKind] = {
    "/v1/messages": CompletionKind(MessagesReply, replace(NAMED_EVENTS, comment=_PING)),
}


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a message."""
    async with (
        json_body(request, service.security, most=service.most_body()) as body,
        service.use(body.get("model"), request.receive) as model,
    ):
        return JSONResponse({"input_tokens": await service.host.tokenize(model, partial(_counted, body))})


def _counted(body: Mapping[str, Any], model: ChatModel[Any]) -> int:
    fields = Fields(body)
    prompt = _read_prompt(fields, model, {}).prepared(model)
    fields.ignore("model", *_IGNORED)
    fields.end()
    assert prompt.tokens is not None, "it was just prepared"
    return len(prompt.tokens.ids)


def _read_prompt(fields: Fields, model: ChatModel[Any], options: dict[str, Any]) -> ChatPrompt:
    """Read the messages, system text and tools of a request."""
    messages, prefill = split_prefill(read_messages(fields.any("messages"), fields.any("system"), fields.leave_out))
    tools = [_tool(tool, place, fields) for place, tool in enumerate(fields.items("tools"))]
    functions = read_functions(tools, leave_out=fields.leave_out)
    choice = _choice(fields, functions)
    config, effort = fields.inner("output_config"), None
    if config is not None:
        options |= form(config, "format")
        effort = config.text("effort")
        config.end()
    variables = thinking(fields, options)
    variables |= {"reasoning_effort": effort} if effort else {}
    use = ToolUse(dialect_of(model), choice)
    return ChatPrompt(messages, use, options, variables or None, prefill, fields=("messages", "output_config.format"))


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


def _tool(tool: Any, place: int, fields: Fields) -> dict[str, Any]:
    """Convert a tool to OpenAI's form."""
    inner = Fields(tool, f"tools[{place}].", fields.ignored)
    kind = inner.text("type")
    if kind not in (None, "custom"):
        return {"type": kind}
    function = {name: inner.any(name) for name in ("name", "description", "strict")}
    function["parameters"] = inner.any("input_schema")
    inner.ignore("cache_control", "defer_loading", "eager_input_streaming", "allowed_callers")
    inner.end()
    return {"type": "function", "function": function}


def _block(call: Call) -> Event:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:  # the reply was cut off inside of it
        arguments = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
