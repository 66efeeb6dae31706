"""The values that the history keeps: conversations, messages, files, figures of a reply."""

from __future__ import annotations

import dataclasses
import typing
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from edgeinfer.apps.mcp.turns import ToolCall
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Result

_T = TypeVar("_T", "ReplyFailure", "Figures", ToolCall)
Role = Literal["user", "assistant"]
# "interrupted" is a reply whose program ended.
Status = Literal["complete", "replying", "stopped", "error", "interrupted"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
STATUSES: tuple[Status, ...] = typing.get_args(Status)


@dataclass(frozen=True)
class ReplyFailure:
    """Why a reply failed."""

    message: str
    hint: str = ""
    code: str = "error"  # for programs, such as "context_full"
    minimum_bytes: int | None = None  # the smallest sufficient budget, if memory was short
    tokens: int | None = None  # of the conversation, if the context is too small


@dataclass(frozen=True)
class Figures:
    """Figures of a reply."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float
    tokens_per_second: float
    drafted: int
    accepted: int
    context: int  # the model's context in tokens
    finish_reason: str
    model: str
    approximate: bool = False  # whether files were read separately, which changes the result slightly
    left_out: int = 0  # oldest messages that did not fit

    @classmethod
    def of_result(cls, result: Result, context: int, left_out: int = 0) -> Self:
        return cls(
            prompt_tokens=result.usage.prompt_tokens,
            cached_tokens=result.timings.cached_prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            ttft_ms=round(result.timings.ttft_ms, 3),
            tokens_per_second=round(result.timings.tokens_per_second, 3),
            drafted=result.speculation.drafted,
            accepted=result.speculation.accepted,
            context=context,
            finish_reason=result.finish_reason,
            model=result.model.name,
            approximate=result.contexts is not None and not result.contexts.lossless,
            left_out=left_out,
        )


@dataclass(frozen=True)
class Attachment:
    """A file attached to a user's message."""

    id: str
    name: str
    kind: str  # "text" or "pdf"
    bytes: int  # size of the file
    content: str  # its text
    pages: int | None = None  # of a PDF
    document: str | None = None  # id of the kept file that it copies; its own id if it is kept itself
    tokens: int | None = None  # of a kept file

    @property
    def quoted(self) -> str:
        """The form in a prompt: its name, then its text between two lines."""
        pages = "" if self.pages is None else f" ({self.pages} page{'s' if self.pages > 1 else ''})"
        return f"File: {self.name}{pages}\n---\n{self.content}\n---"

    def sent(self) -> Attachment:
        """The file as a message has it: a copy of a kept one."""
        return dataclasses.replace(self, id=uuid.uuid4().hex) if self.document == self.id else self


@dataclass(frozen=True)
class ModelChoice:
    """The model of a conversation and how it is loaded."""

    model: str | None = None  # path or hub id; None is the built-in model
    memory: int | None = None  # budget of the process in bytes; None is unlimited
    context: int | None = None  # in tokens; None leaves it to the plan


@dataclass(frozen=True)
class Message:
    """A message in a conversation's tree."""

    id: str
    parent: str | None  # id of the previous message; None starts the conversation
    role: Role
    content: str
    created: float  # seconds since 1970
    status: Status = "complete"
    failure: ReplyFailure | None = None  # with status "error"
    figures: Figures | None = None  # of a reply
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[ToolCall, ...] = ()  # of tools, in a reply

    def prompt(self, apart: Collection[str] = ()) -> str:
        """The text that the model reads: files first, so that the question comes last. `apart` lists kept files to
        leave out."""
        files = [f"File: {f.name}" if f.document in apart else f.quoted for f in self.attachments]
        return "\n\n".join([*files, *([self.content] if self.content else [])])


@dataclass(frozen=True)
class Conversation:
    """A conversation with all its branches."""

    id: str
    title: str  # empty until the first message
    created: float
    updated: float
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)  # generation options of its replies
    leaf: str | None = None  # the last message of the visible branch
    messages: tuple[Message, ...] = ()  # in order of creation
    choice: ModelChoice | None = None  # its model; None before the first reply

    def message(self, id: str | None) -> Message | None:
        return next((message for message in self.messages if message.id == id), None)

    def path(self, leaf: str | None) -> list[Message]:
        """The messages from the first to `leaf`."""
        known = {message.id: message for message in self.messages}
        found: list[Message] = []
        while leaf is not None and len(found) < len(known):
            found.append(known[leaf])
            leaf = known[leaf].parent
        return found[::-1]


@dataclass(frozen=True)
class Summary:
    """An entry of the list of conversations."""

    id: str
    title: str
    created: float
    updated: float
    snippet: str = ""  # text around the search word; empty without a search or if the title matches


def from_json(kind: type[_T], data: object) -> _T:
    """Read a failure or figures from JSON."""
    # The name of the field in an exported file.
    name = {ReplyFailure: "error", Figures: "figures"}.get(kind, "calls")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(data, dict) or not set(data) <= set(fields):
        raise UsageError(f"{name} must be an object of {', '.join(fields)}.", "Leave it out.")
    types = typing.get_type_hints(kind)
    for field_name in fields:
        if field_name not in data:
            if fields[field_name].default is dataclasses.MISSING:
                raise UsageError(f"{name} lacks {field_name!r}.", "Leave it out as a whole.")
            continue
        value, wanted = data[field_name], types[field_name]
        choices = typing.get_args(wanted) if typing.get_origin(wanted) is Literal else None
        sound = value in choices if choices else isinstance(value, wanted | int if wanted is float else wanted)
        if not sound or isinstance(value, bool) != (wanted is bool):
            raise UsageError(f"{name}.{field_name} has a wrong type.", "Leave it out as a whole.")
    return kind(**data)
