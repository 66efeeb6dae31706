"""The messages of Anthropic's requests as OpenAI's: blocks of content become text, calls and answers of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message, read_message

LeaveOut = Callable[[str], None]

_HINT = (
    "Text, documents of text, search results, the assistant's tool_use and the user's tool_result are read; files and "
    "URLs are not opened."
)
# What a model thought is not told to it again.
_THOUGHT = ("thinking", "redacted_thinking")
# What tools of another server did, of which blocks hold no text or text that only that server can read.
_ELSEWHERE = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "tool_addition", "tool_removal",
    "fallback",
)  # fmt: skip
_ROLES = ("user", "assistant", "system")


def read_messages(value: Any, system: Any, leave_out: LeaveOut) -> list[Message]:
    """The conversation, with the system's text in front.

    Args:
        leave_out: called with each block that is not told to the model, but for thoughts.
    """
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
    """A message: of its own, and one for each answer of a tool."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise RequestError(f"{where} has no known role.", f"Roles are {', '.join(_ROLES)}.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [read_message({"role": role, "content": content}, where)]
    if not isinstance(content, list) or not (content or role == "assistant"):
        raise RequestError(f"{where}.content is missing.", "Send a string or blocks.", param=f"{where}.content")
    made: list[Message] = []
    text, calls = "", []
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
        elif kind not in _THOUGHT:
            text += _block(block, at)
    if text or calls or not made:
        own = {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})
        made.append(read_message(own, where))
    return made


def _text(content: Any, where: str) -> str:
    """The text of a content, which is one or a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused("is neither a string nor a list of blocks", where)
    return "".join(_block(block, f"{where}[{place}]") for place, block in enumerate(content))


def _block(block: Any, where: str) -> str:
    """The text of a block."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    match kind:
        case "text" | "compaction":  # the latter is a summary, null where none could be made
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
    """The text of a document, behind what is said of it."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        raise _refused("is a document that is not text", where)
    name = "data" if kind == "text" else "content"
    return f"{_titled(block, 'title', 'context')}{_text(source.get(name), f'{where}.source.{name}')}\n\n"


def _titled(block: Mapping[str, Any], *names: str) -> str:
    """Fields of a block that say what its text is, each in a paragraph."""
    return "".join(f"{text}\n\n" for name in names if isinstance(text := block.get(name), str) and text)


def _refused(what: str, where: str) -> RequestError:
    return RequestError(f"{where} {what}.", _HINT, param=where, code="unsupported_content")
