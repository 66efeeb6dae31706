"""Conversations as files: JSON that can be imported, Markdown to read."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

from edgeinfer.apps.desktop.checks import TooLargeError, check_name, check_values
from edgeinfer.apps.desktop.history import MOST_ATTACHMENTS, MOST_CHARACTERS
from edgeinfer.apps.desktop.records import (
    ROLES,
    STATUSES,
    Attachment,
    Conversation,
    Figures,
    Message,
    ReplyFailure,
    Status,
    from_json,
)
from edgeinfer.apps.desktop.settings import checked_options
from edgeinfer.apps.mcp.turns import ToolCall
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size

MOST_BYTES = 16 * 1000**2
_FORMAT, _VERSION = "edgeinfer-conversation", 1
_HINT = "Give a file that the app exported as JSON."
_HEAD = {"format", "version", "title", "system", "options", "created", "updated", "leaf", "messages"}
_MESSAGE = {"id", "parent", "role", "content", "created", "status", "error", "figures", "attachments", "calls"}
_FILE: Mapping[str, Any] = {"name": str, "kind": str, "bytes": int, "pages": int | None, "content": str}
_SPEAKERS = {"user": "You", "assistant": "Assistant"}


def write_json(conversation: Conversation) -> str:
    """Write the whole conversation with all its branches."""
    c = conversation
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "title": c.title,
        "system": c.system,
        "options": dict(c.options),
        "created": c.created,
        "updated": c.updated,
        "leaf": c.leaf,
        "messages": [_written(message) for message in c.messages],
    }
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def write_markdown(conversation: Conversation) -> str:
    """Write the visible branch."""
    parts = [f"# {conversation.title or 'Conversation'}"]
    if conversation.system:
        parts.append("\n".join(f"> {line}".rstrip() for line in conversation.system.splitlines()))
    for message in conversation.path(conversation.leaf):
        ended = "" if message.status == "complete" else f" ({message.status})"
        files = ", ".join(f"`{file.name}`" for file in message.attachments)
        attached = f"Attached: {files}" if files else ""
        called = "\n".join(f"Called `{call.name}` with `{call.arguments}`: {call.status}." for call in message.calls)
        parts += [f"## {_SPEAKERS[message.role]}{ended}", attached, called, message.content.strip("\n")]
    return "\n\n".join(part for part in parts if part) + "\n"


def read_json(data: bytes) -> Conversation:
    """Read an exported conversation and give it new ids."""
    if len(data) > MOST_BYTES:
        raise TooLargeError(f"The file is larger than {format_size(MOST_BYTES)}.", "Export fewer messages.")
    try:
        parsed = json.loads(data.decode("utf-8"))
        check_values(parsed, "The file")
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError("The file is not JSON.", _HINT) from error
    _require(isinstance(parsed, dict) and parsed.get("format") == _FORMAT, "it is not an exported conversation")
    _require(parsed.get("version") == _VERSION, f"its version is {parsed.get('version')!r}, this edgeinfer reads 1")
    _only(parsed, _HEAD, "The conversation")
    listed = parsed.get("messages")
    _require(isinstance(listed, list), "messages must be a list")
    messages: dict[str, Message] = {}
    for entry in listed:
        _add(entry, messages)
    leaf = parsed.get("leaf")
    _require(leaf is None or (isinstance(leaf, str) and leaf in messages), "leaf must be the id of a message")
    options = parsed.get("options", {})
    _require(isinstance(options, dict), "options must be an object")
    last = next(reversed(messages.values())).id if messages else None
    return Conversation(
        id=uuid.uuid4().hex,
        title=check_name(_text(parsed, "title"), "title"),
        created=_created(parsed),
        updated=time.time(),
        system=_text(parsed, "system"),
        options=checked_options(options),
        leaf=last if leaf is None else messages[leaf].id,
        messages=tuple(messages.values()),
    )


def _written(message: Message) -> dict[str, Any]:
    figures = None if message.figures is None else dataclasses.asdict(message.figures)
    failure = None if message.failure is None else dataclasses.asdict(message.failure)
    files = [{name: getattr(file, name) for name in _FILE} for file in message.attachments]
    # Omitted if there are none.
    calls = [dataclasses.asdict(call) for call in message.calls]
    return (
        ({"attachments": files} if files else {})
        | ({"calls": calls} if calls else {})
        | {
            "id": message.id,
            "parent": message.parent,
            "role": message.role,
            "content": message.content,
            "created": message.created,
            "status": _ended(message.status),
            "error": failure,
            "figures": figures,
        }
    )


def _calls(entries: Any) -> tuple[ToolCall, ...]:
    _require(isinstance(entries, list), "calls must be a list")
    return tuple(from_json(ToolCall, entry) for entry in entries)


def _ended(status: Status) -> Status:
    """The status of a copy, which no longer grows."""
    return "interrupted" if status == "replying" else status


def _add(entry: Any, messages: dict[str, Message]) -> None:
    """Read a message. Its parent must come first in the file, which rules out cycles."""
    _require(isinstance(entry, dict), "every message must be an object")
    _only(entry, _MESSAGE, "A message")
    id, parent, role = entry.get("id"), entry.get("parent"), entry.get("role")
    _require(isinstance(id, str) and bool(id) and id not in messages, "every message must have an id of its own")
    _require(role in ROLES, f"role must be one of {', '.join(ROLES)}")
    _require(
        parent is None or (isinstance(parent, str) and parent in messages),
        "parent must be the id of an earlier message",
    )
    before = "assistant" if parent is None else messages[parent].role
    _require(before != role, "user's messages and replies must alternate")
    status = entry.get("status", "complete")
    _require(status in STATUSES, f"status must be one of {', '.join(STATUSES)}")
    failure, figures = entry.get("error"), entry.get("figures")
    messages[id] = Message(
        id=uuid.uuid4().hex,
        parent=None if parent is None else messages[parent].id,
        role=role,
        content=_text(entry, "content"),
        created=_created(entry),
        status=_ended(status),
        failure=None if failure is None else from_json(ReplyFailure, failure),
        figures=None if figures is None else from_json(Figures, figures),
        calls=_calls(entry.get("calls", [])),
        attachments=_files(entry),
    )


def _files(entry: dict[str, Any]) -> tuple[Attachment, ...]:
    listed = entry.get("attachments", [])
    _require(isinstance(listed, list), "attachments must be a list")
    _require(not listed or entry["role"] == "user", "only user's messages have attachments")
    _require(len(listed) <= MOST_ATTACHMENTS, f"a message has at most {MOST_ATTACHMENTS} attachments")
    for file in listed:
        _require(isinstance(file, dict) and set(file) == set(_FILE), f"an attachment has {', '.join(_FILE)}")
        for name, kind in _FILE.items():
            right = isinstance(file[name], kind) and not isinstance(file[name], bool)
            _require(right, f"{name} of an attachment has a wrong type")
        check_name(file["name"], "The name of an attachment")
    _require(sum(len(file["content"]) for file in listed) <= MOST_CHARACTERS, "attachments are too long")
    return tuple(Attachment(uuid.uuid4().hex, **file) for file in listed)


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    _require(isinstance(value, str), f"{name} must be a string")
    return str(value)


def _created(data: dict[str, Any]) -> float:
    value = data.get("created", time.time())
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(number and math.isfinite(value) and 0 <= value < 1e11, "created must be seconds since 1970")
    return float(value)


def _only(data: dict[str, Any], known: set[str], what: str) -> None:
    unknown = ", ".join(sorted(map(repr, set(data) - known)))
    _require(not unknown, f"{what} has unknown fields: {unknown}")


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise UsageError(f"The file cannot be imported: {rule}.", _HINT)
