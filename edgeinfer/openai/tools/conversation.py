"""Messages about calls of functions, in the way that a model's chat template takes them; knows nothing of grammars."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.openai.messages import Message
from edgeinfer.openai.tools.format import ToolFormat
from edgeinfer.openai.tools.functions import Function
from edgeinfer.openai.tools.hermes import described, response
from edgeinfer.openai.tools.registry import Dialect

__all__ = ["conversation"]


def conversation(messages: Sequence[Message], dialect: Dialect, functions: Sequence[Function]) -> list[Message]:
    """The messages for the template; where that knows no functions, they tell of `functions` and of earlier calls."""
    if dialect.native:
        return [_fitted(message, dialect.format) for message in messages]
    told = [_told(message, dialect.format) for message in messages]
    return _with_system(_merged(told), described(functions)) if functions else _merged(told)


def _fitted(message: Message, form: ToolFormat) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = form.fitted_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": form.fitted_id(call["id"])} for call in message["tool_calls"]]
    return changed


def _told(message: Message, form: ToolFormat) -> Message:
    if message["role"] == "tool":
        return {"role": "tool", "content": response(message["content"])}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    text = f"{message['content']}\n{written}" if message["content"] else written
    return {"role": message["role"], "content": text}


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Answers of functions as messages of the user's, those of one turn in one."""
    merged: list[Message] = []
    answering = False
    for message in messages:
        answer = message["role"] == "tool"
        if answer and answering:
            merged[-1]["content"] += "\n" + message["content"]
        else:
            merged.append({"role": "user", "content": message["content"]} if answer else message)
        answering = answer
    return merged


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
