"""The fields of a request for a response; knows nothing of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeinfer.config import GenerationConfig
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.options import IGNORED, MOST_ALTERNATIVES, form, limit, sampling
from edgeinfer.openai.prompt import ChatPrompt
from edgeinfer.openai.responses.input import read_input
from edgeinfer.openai.tools import ToolUse, dialect_of, read_choice, read_functions

if TYPE_CHECKING:
    from edgeinfer.api import Model

__all__ = ["ResponseRequest", "read_request"]

_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponseRequest:
    """A request.

    Attributes:
        logprobs: whether log-probabilities are told.
        told: what the answer says of the request.
    """

    stream: bool
    prompt: ChatPrompt
    logprobs: bool
    told: Mapping[str, Any]


def read_request(body: Mapping[str, Any], model: Model) -> ResponseRequest:
    """The request, checked.

    Raises:
        RequestError: a field is unknown, malformed or asks for what cannot be.
    """
    fields = Fields(body)
    stream = fields.flag("stream")
    instructions = fields.text("instructions")
    messages = read_input(fields.any("input"), instructions)
    tools, wanted = fields.items("tools"), fields.any("tool_choice")
    several = fields.take("parallel_tool_calls", bool, "true or false") is not False
    functions = read_functions(tools, flat=True)
    choice = read_choice(wanted, functions, several)
    alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
    logprobs = _LOGPROBS in fields.items("include") or bool(alternatives)
    options = limit(fields, "max_output_tokens")
    options |= sampling(fields) | _text(fields)
    if logprobs:
        options["logprobs"] = alternatives or 0
    effort = _effort(fields)
    metadata = fields.take("metadata", dict, "an object") or {}
    _refuse(fields)
    fields.end()
    told = {
        "instructions": instructions,
        "max_output_tokens": options.get("max_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": several,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": options.get("temperature", GenerationConfig.temperature),
        "text": {"format": _told_format(options)},
        "tool_choice": wanted or "auto",
        "tools": [_told_tool(tool) for tool in tools],
        "top_logprobs": alternatives or 0,
        "top_p": options.get("top_p", GenerationConfig.top_p),
    }
    variables = None if effort is None else {"reasoning_effort": effort}
    use = ToolUse(dialect_of(model.chat_template_text), choice)
    prompt = ChatPrompt(messages, use, options, variables, fields=("input", "text.format"))
    return ResponseRequest(stream, prompt, logprobs, told)


def _text(fields: Fields) -> dict[str, Any]:
    """Options of the field `text`."""
    inner = fields.inner("text")
    if inner is None:
        return {}
    options = form(inner, "format")
    inner.ignore("verbosity")
    inner.end()
    return options


def _effort(fields: Fields) -> str | None:
    inner = fields.inner("reasoning")
    return None if inner is None else inner.text("effort")


def _refuse(fields: Fields) -> None:
    """What is ignored, and what cannot be."""
    fields.ignore(*IGNORED, "stream_options", "max_tool_calls")
    fields.only("background", (False,), "Wait for the answer, or have it streamed.")
    fields.refuse("previous_response_id", "conversation", hint="Nothing is stored here: send the whole conversation.")
    fields.refuse("prompt", hint="Nothing is stored here: send the text as input.")
    fields.only("truncation", ("disabled",), "No part of a conversation is dropped silently: shorten it.")
    fields.refuse("context_management", hint="No part of a conversation is dropped silently: shorten it.")
    fields.refuse("moderation", hint="Replies are not moderated here.")
    fields.refuse("image", hint="This model writes text only.")


def _told_format(options: Mapping[str, Any]) -> dict[str, Any]:
    if "json_schema" in options:
        return {"type": "json_schema", "name": "schema", "schema": options["json_schema"], "strict": True}
    return {"type": "json_object" if "json_object" in options else "text"}


def _told_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": True, "description": None, **tool}
