"""Turns in which a model calls tools: the request that offers them, the calls, and the messages that repeat them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from edgeinfer.apps.mcp.servers import MOST_CHARACTERS, ServerTool
from edgeinfer.core.records import dataclass
from edgeinfer.openai.calls import Piece, TextPiece
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message, read_messages
from edgeinfer.openai.prompt import ChatPrompt
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions

if TYPE_CHECKING:
    from edgeinfer import Model

# Replies of one turn: models that call the same tool again and again are stopped.
MOST_ROUNDS = 16
REFUSED = "The user did not allow this call, and nothing was done. Go on without it, or ask the user."
STOPPED = "The user stopped this call."

CallStatus = Literal["asked", "running", "done", "failed", "refused"]


@dataclass(frozen=True)
class ToolCall:
    """A call in a reply, and what came of it."""

    id: str
    name: str
    server: str  # empty where no server has such a tool
    arguments: str  # JSON, as the model wrote it
    round: int = 0  # how many rounds of calls came before in the same reply
    at: int = 0  # how much of the reply's text stands before it
    status: CallStatus = "asked"
    result: str = ""

    @classmethod
    def of(cls, id: str, name: str, arguments: str, tool: ServerTool | None, round: int = 0, at: int = 0) -> ToolCall:
        """A call that waits to be allowed; one of an unknown tool has failed already."""
        if tool is None:
            return cls(id, name, "", arguments, round, at, "failed", f"There is no tool named {name}.")
        return cls(id, name, tool.server, arguments, round, at)

    def ended(self, status: CallStatus, result: str) -> ToolCall:
        return replace(self, status=status, result=result)


def tool_prompt(
    model: Model, messages: Sequence[Mapping[str, Any]], tools: Iterable[ServerTool], options: Mapping[str, Any]
) -> ChatPrompt:
    """A request that offers tools. Where a schema asks for what cannot be enforced, arguments are any objects."""
    offered = [tool.as_tool for tool in tools]

    def prompt(offered: list[dict[str, Any]]) -> ChatPrompt:
        use = ToolUse(dialect_of(model), read_choice(None, read_functions(offered), True))
        return ChatPrompt(read_messages(list(messages)), use, options)

    made = prompt(offered)
    try:
        made.check(model)
    except RequestError as error:
        if error.code != "unsupported_schema":
            raise
        for tool in offered:
            described = json.dumps(tool["function"]["parameters"], ensure_ascii=False)
            tool["function"]["description"] += f"\nArguments: {described}"
            tool["function"]["parameters"] = {"type": "object"}
        made = prompt(offered)
    return made


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def most_characters(model: Model) -> int:
    """How long a result may be: about a third of the context in most languages."""
    return min(MOST_CHARACTERS, model.context)


def turn_messages(content: str, calls: Sequence[ToolCall]) -> list[Message]:
    """A reply as messages: before each round its text and calls, then their results, and the rest of the text."""
    messages: list[Message] = []
    start = 0
    for number in sorted({call.round for call in calls}):
        of_round = [call for call in calls if call.round == number]
        at = of_round[0].at
        functions = [{"name": call.name, "arguments": call.arguments} for call in of_round]
        made = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(of_round, functions, strict=True)
        ]
        messages.append({"role": "assistant", "content": content[start:at], "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": call.result or STOPPED} for call in of_round]
        start = at
    if content[start:] or not calls:
        messages.append({"role": "assistant", "content": content[start:]})
    return messages


def printable(text: str, most: int) -> str:
    """A text from elsewhere that a terminal may show: without control characters, and cut."""
    shown = "".join(each if each.isprintable() or each == "\n" else " " for each in text[:most])
    return shown if len(text) <= most else f"{shown}…"
