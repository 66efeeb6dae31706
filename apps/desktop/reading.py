"""Files that are kept for later, as a model reads them: once, apart from each other, before every conversation that
they are attached to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import edgeinfer
from edgeinfer.apps.desktop.records import Attachment, Conversation, Message
from edgeinfer.errors import CapabilityError, UserError

if TYPE_CHECKING:
    from edgeinfer import Model, TokenStream

__all__ = ["ReadingEndedError", "context_of", "files_apart", "messages_for", "stream_behind", "why_not_apart"]


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
    """The files of a branch that a model reads apart, each once.

    Args:
        leaf: the last message of the branch.
        kept: ids of the files that are kept now.
    """
    files = [file for message in conversation.path(leaf) for file in message.attachments if file.document in kept]
    if not files or model is None or why_not_apart(model) is not None:
        return []
    return list({file.document: file for file in files}.values())


def messages_for(conversation: Conversation, reply: Message, apart: Sequence[Attachment] = ()) -> list[dict[str, str]]:
    """Returns the branch that leads to a reply, as messages for the model. A turn whose reply failed is left out.

    Args:
        apart: files that the model reads before the conversation.
    """
    turns = [{"role": "system", "content": conversation.system}] if conversation.system else []
    path, named = conversation.path(reply.parent), {file.document for file in apart if file.document is not None}
    for message, after in zip(path, [*path[1:], None], strict=True):
        failed = after is not None and after.role == "assistant" and not after.content
        if (prompt := message.prompt(named)) and not failed:
            turns.append({"role": message.role, "content": prompt})
    return turns


def stream_behind(
    model: Model,
    files: Sequence[Attachment],
    messages: Sequence[dict[str, str]],
    ended: Callable[[], bool],
    **options: Any,
) -> TokenStream:
    """Answers messages behind files that are read apart, those first that the model has not read yet.

    Args:
        ended: whether it is no longer to read, which it asks after every pass.
        options: as `ContextModel.stream_chat` takes them.

    Raises:
        ReadingEndedError: it was not to read on.
        EdgeInferError: as `ContextModel.stream_chat`.
    """

    def look(tokens: int) -> None:
        if ended():
            raise ReadingEndedError("The file was not read to its end.", "Try again.")

    return model.with_contexts(list(map(context_of, files))).stream_chat(messages, progress=look, **options)
