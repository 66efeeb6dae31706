"""What a model is given to read: the messages of a conversation, as far as the context has room, and files that are
kept for later, which it reads once, apart from each other, before every conversation that they are attached to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import edgeinfer
from edgeinfer.apps.desktop.records import Attachment, Conversation, Message
from edgeinfer.errors import CapabilityError, ContextLengthError, UserError

if TYPE_CHECKING:
    from edgeinfer import Model, TokenStream


# Of the user's messages.
_AT_ONCE = 2


class ReadingEndedError(UserError):
    """A file was no longer to be read."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "conflict"


def context_of(file: Attachment) -> edgeinfer.Context:
    """A file as the model reads it before a conversation."""
    return edgeinfer.Context(file.name, content=file.quoted)


def why_not_apart(model: Model) -> str | None:
    """Why a model cannot read files apart from conversations; None where it can."""
    try:
        model.require_contexts()
    except CapabilityError as error:
        return error.message
    return None


def files_apart(
    model: Model | None, conversation: Conversation, leaf: str | None, kept: Collection[str]
) -> list[Attachment]:
    """The files of a branch that a model reads apart, each once."""
    files = [file for message in conversation.path(leaf) for file in message.attachments if file.document in kept]
    if not files or model is None or why_not_apart(model) is not None:
        return []
    return list({file.document: file for file in files}.values())


def messages_for(conversation: Conversation, reply: Message, apart: Sequence[Attachment] = ()) -> list[dict[str, str]]:
    """Returns the branch that leads to a reply, as messages for the model. A turn whose reply failed is left out."""
    turns = [{"role": "system", "content": conversation.system}] if conversation.system else []
    path, named = conversation.path(reply.parent), {file.document for file in apart if file.document is not None}
    for message, after in zip(path, [*path[1:], None], strict=True):
        failed = after is not None and after.role == "assistant" and not after.content
        if (prompt := message.prompt(named)) and not failed:
            turns.append({"role": message.role, "content": prompt})
    return turns


def tokens_for(model: Model, conversation: Conversation, reply: Message, kept: Collection[str]) -> int:
    """Tokens that a model reads before a reply, whether or not the context holds them."""
    apart = files_apart(model, conversation, reply.parent, kept)
    # Each ends with an empty line there.
    before = sum(len(model.tokenize(f"{file.quoted}\n\n", parse_special=False)) for file in apart)
    return before + len(model.tokenize_chat(messages_for(conversation, reply, apart), begun=reply.content))


@dataclass(frozen=True)
class Fitted:
    """Messages that leave room for a reply.

    Attributes:
        tokens: of the messages.
        left_out: how many the oldest were that had to be left out.
    """

    messages: list[dict[str, str]]
    tokens: list[int]
    left_out: int


def without_oldest(model: Model, messages: Sequence[dict[str, str]], begun: str, room: int) -> Fitted:
    """Leaves out the oldest messages, but for a system message, until there is room for a reply or one is left."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    # A text begins with what a user says, and several are left out at once: the next replies then begin alike.
    starts = [place for place, message in enumerate(turns) if message["role"] == "user"]
    starts = sorted({*starts[_AT_ONCE::_AT_ONCE], *starts[-1:]})
    most = model.context - min(room, model.context // 4)

    @cache
    def behind(start: int) -> Fitted:
        kept = [*system, *turns[start:]]
        return Fitted(kept, model.tokenize_chat(kept, begun=begun, fitting=True), start)

    def fits(start: int) -> bool:
        try:
            return len(behind(start).tokens) <= most
        except ContextLengthError:  # so much too long that not all of it was made tokens of
            return False

    if not starts or fits(0):
        return behind(0)
    place = bisect_left(starts, True, key=fits)
    return behind(starts[min(place, len(starts) - 1)])


def stream_behind(
    model: Model,
    files: Sequence[Attachment],
    messages: Sequence[dict[str, str]],
    ended: Callable[[], bool],
    **options: Any,
) -> TokenStream:
    """Answers messages behind files that are read apart, those first that the model has not read yet."""

    def look(tokens: int) -> None:
        if ended():
            raise ReadingEndedError("The file was not read to its end.", "Try again.")

    return model.with_contexts(list(map(context_of, files))).stream_chat(messages, progress=look, **options)
