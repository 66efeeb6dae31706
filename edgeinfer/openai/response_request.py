"""The fields of a request to /v1/responses, with its input as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.openai.contract import ChatModel
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.messages import Message, joined, read_message
from edgeinfer.openai.prompt import ChatPrompt
from edgeinfer.openai.reply_fields import IGNORED, MOST_ALTERNATIVES, form, limit, sampling, thinking
from edgeinfer.openai.tool_formats import dialect_of
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions
from edgeinfer.records import dataclass

_KEPT = "It holds a picture, or what only the server that wrote it can read: send the messages themselves."
# Items of which nothing is told to the model: what one thought, and what tools of another server did unseen.
_UNSEEN = (
    "reasoning", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output",
    "additional_tools", "compaction_trigger", "program", "program_output", "computer_call", "configuration_update",
)  # fmt: skip
# Calls of tools that are no functions, with the field that says what was asked for, and their answers.
_CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
_CALLS |= {"mcp_call": "arguments"}
_ANSWERS = {f"{kind}_output" for kind in ("function_call", *_CALLS)}


def read_input(
    value: Any, instructions: str | None, leave_out: Callable[[str], None] = lambda _: None
) -> list[Message]:
    """The conversation that a response goes on with.

    Args:
        leave_out: called with each item that is not told to the model, but for thoughts.
    """
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
    if kind in _UNSEEN:
        if kind != "reasoning":
            leave_out(f"{where} ({kind})")
        return []
    message = f"{where} is {f'of type {kind!r}' if isinstance(kind, str) else 'no item'}."
    raise RequestError(message, _KEPT, param=where, code="unsupported_content")


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
    """What a call and its answer have in common; those of some tools have `id` alone, and an answer may have none."""
    return next((item[name] for name in ("call_id", "id") if item.get(name) is not None), "")


def _by_turn(messages: list[Message]) -> list[Message]:
    """A turn of the assistant's is one message: what it says, and the calls behind."""
    turns: list[Message] = []
    for message in messages:
        before = turns[-1] if turns else None
        if before is not None and message.get("tool_calls") and before["role"] == "assistant":
            turns[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            turns.append(message)
    return turns


# Of cutting a conversation that is too long: none is, which then shows.
_CUTTING = ("truncation", "context_management")
_IGNORED = (*IGNORED, *_CUTTING, "stream_options", "max_tool_calls", "background_options")
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponseRequest:
    """A request.

    Attributes:
        logprobs: whether log-probabilities are told.
        told: what the answer says of the request.
        ignored: fields of it that change nothing.
    """

    stream: bool
    prompt: ChatPrompt
    logprobs: bool
    told: Mapping[str, Any]
    ignored: tuple[str, ...]


def read_request(body: Mapping[str, Any], model: ChatModel[Any]) -> ResponseRequest:
    """The request, checked."""
    fields = Fields(body)
    stream = fields.flag("stream")
    instructions = fields.text("instructions")
    messages = read_input(fields.any("input"), instructions, fields.leave_out)
    tools, wanted = fields.items("tools"), fields.any("tool_choice")
    several = fields.take("parallel_tool_calls", bool, "true or false") is not False
    functions = read_functions(tools, flat=True, leave_out=fields.leave_out)
    choice = read_choice(wanted, functions, several)
    alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
    logprobs = _LOGPROBS in fields.items("include") or bool(alternatives)
    options = limit(fields, "max_output_tokens", "max_completion_tokens", "max_tokens")
    options |= sampling(fields) | _text(fields)
    if logprobs:
        options["logprobs"] = alternatives or 0
    variables = thinking(fields, options, calls=choice.mode != "none")
    effort = variables.get("reasoning_effort")
    metadata = fields.take("metadata", dict, "an object") or {}
    fields.ignore(*_IGNORED)
    fields.only("prompt", (), "Nothing is stored here: send the text as input.")
    fields.end()
    used = GenerationConfig.for_chat(model.sampling, options)
    told = {
        "instructions": instructions,
        "max_output_tokens": options.get("max_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": several,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": used.temperature,
        "text": {"format": _told_format(options)},
        "tool_choice": wanted or "auto",
        "tools": [_told_tool(tool) for tool in tools],
        "top_logprobs": alternatives or 0,
        "top_p": used.top_p,
    }
    use = ToolUse(dialect_of(model.tool_template_text), choice)
    prompt = ChatPrompt(messages, use, options, variables or None, fields=("input", "text.format"))
    return ResponseRequest(stream, prompt, logprobs, told, tuple(fields.ignored))


def _text(fields: Fields) -> dict[str, Any]:
    """Options of the field `text`."""
    inner = fields.inner("text")
    if inner is None:
        return {}
    options = form(inner, "format")
    inner.end()
    return options


def _told_format(options: Mapping[str, Any]) -> dict[str, Any]:
    if "json_schema" in options:
        return {"type": "json_schema", "name": "schema", "schema": options["json_schema"], "strict": True}
    return {"type": "json_object" if "json_object" in options else "text"}


def _told_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": True, "description": None, **tool}
