"""A conversation: its messages, kept in step with the replies and saved as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from edgeinfer.async_replies import AsyncTokenStream
from edgeinfer.bundle.writing import write_file
from edgeinfer.core.errors import PromptError, TemplateError, UsageError, shown
from edgeinfer.core.options import format_size
from edgeinfer.core.options.types import ReplyDict
from edgeinfer.core.results import ModelInfo, Result
from edgeinfer.generation import TokenStream
from edgeinfer.model_thread import ModelThread
from edgeinfer.runtime.kv_cache.session_file import SessionFile, is_session, open_session

_FORMAT = "edgeinfer-chat"
_VERSION = 1
_WITH_CACHE = ".session"
_MOST_BYTES = 256 * 1000**2  # more than any context holds
_ROLES = ("system", "user", "assistant", "tool")
_OF_CALLS = {"tool_calls": list, "tool_call_id": str}


class ConversationModel(Protocol):
    """The part of `edgeinfer.Model` that conversations use."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def reply_thread(self) -> ModelThread: ...

    @property
    def stream_chat(self) -> Callable[..., TokenStream]: ...

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None: ...

    def resume(self, session: SessionFile) -> bool: ...


class Chat:
    """A conversation with a model.

    Args:
        model: answers.
        system: text of the system message, if any.
        history: earlier messages with "role" and "content", a str or a list of text parts, also calls of functions and
            their answers. A system message may come first.

    Raises:
        UsageError: a message of the history or the system message is malformed, or there are two system messages.
    """

    def __init__(
        self, model: ConversationModel, system: str | None = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._model = model
        turns = _read_history(history)
        if turns and turns[0]["role"] == "system":
            if system is not None:
                raise UsageError("There are two system messages.", "Leave out `system`, or the one in the history.")
            system = turns.pop(0)["content"]
        if not isinstance(system, str | None):
            raise UsageError(f"The system message is {shown(system)}, which is not a string.", "Pass a string.")
        self.system = system
        self._turns: list[dict[str, Any]] = turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI-style messages; a copy."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [dict(turn) for turn in self._turns]

    def send(self, text: str, **options: Unpack[ReplyDict]) -> Result:
        """Answer a user message and return the whole reply; arguments and errors are those of `stream`."""
        return self.stream(text, **options).complete()

    def stream(self, text: str, **options: Unpack[ReplyDict]) -> TokenStream:
        """Answer a user message chunk by chunk. Once the reply ends, even early, both become part of the conversation.

        Args:
            text: the user's message.
            options: as `Model.generate` takes them; sampling options that are left out are those that the model's
                makers recommend.

        Raises:
            PromptError: the message is empty, or no text.
            TemplateError, ContextLengthError, UsageError: as `Model.stream_chat`; the conversation is unchanged.
        """
        if not isinstance(text, str):
            hint = "Pass a string; an earlier conversation goes to model.chat(history=...)."
            raise PromptError(f"The message is {shown(text)}, which is not a string.", hint)
        if not text.strip():
            raise PromptError("The message is empty.", "Write something.")
        asked = {"role": "user", "content": text}

        def add(result: Result) -> None:
            said = {"role": "assistant", "content": result.text}
            # The template leaves out what its model does not read again.
            thought = {"reasoning_content": result.reasoning} if result.reasoning else {}
            self._turns += [asked, said | thought]

        return self._model.stream_chat([*self.messages, asked], on_finish=add, **options)

    async def asend(self, text: str, **options: Unpack[ReplyDict]) -> Result:
        """`send` for asynchronous programs: the event loop keeps running, and a cancelled task ends the reply."""
        return await self.astream(text, **options).complete()

    def astream(self, text: str, **options: Unpack[ReplyDict]) -> AsyncTokenStream:
        """`stream` for asynchronous programs: `async for chunk in chat.astream("Hello"): ...`."""
        return AsyncTokenStream(self._model.reply_thread, lambda: self.stream(text, **options), self)

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append a turn that was made otherwise, such as one with calls of functions and their answers."""
        self._turns += _read_history(messages, start=len(self._turns) + 1)

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self._turns.clear()

    def save(self, path: str | Path) -> None:
        """Write the conversation, atomically: as JSON, or with its rows in the model's cache if the name ends in
        ".session", so that continuing costs nothing. StorageError where the path cannot be written."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self._model.info.name,
            "system": self.system,
            "turns": self._turns,
        }
        text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        if Path(path).suffix == _WITH_CACHE:
            self._model.save_session(path, self._tokens(), text)
        else:
            write_file(Path(path), text.encode("utf-8", "surrogatepass"))

    def _tokens(self) -> list[int]:
        """The tokens before the next message; none where the template rejects the messages so far."""
        try:
            return self._model.tokenize_chat(self.messages)
        except (TemplateError, PromptError):
            return []

    @classmethod
    def open(cls, model: ConversationModel, path: str | Path) -> Chat:
        """Open a saved conversation, to continue it with this model; UsageError where the file holds none."""
        source = Path(path)
        if not is_session(source):
            return cls._read(model, source, lambda: _text_of(source))
        with open_session(source) as session:
            chat = cls._read(model, source, lambda: session.text)
            model.resume(session)
        return chat

    @classmethod
    def _read(cls, model: ConversationModel, source: Path, text: Callable[[], str]) -> Chat:
        try:
            data = json.loads(text())
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{source} cannot be read: {error}.", "Use a file written by Chat.save.") from error
        if not _is_saved_chat(data):
            raise UsageError(f"{source} is not a saved conversation.", "Use a file written by Chat.save.")
        chat = cls(model, data["system"])
        chat._turns = data["turns"]
        return chat


def _read_history(history: Sequence[Mapping[str, Any]], start: int = 0) -> list[dict[str, Any]]:
    turns = []
    for index, message in enumerate(history, start):
        given = message if isinstance(message, Mapping) else {}
        role = "system" if given.get("role") == "developer" else given.get("role")
        kept = {name: given[name] for name, kind in _OF_CALLS.items() if isinstance(given.get(name), kind)}
        content = _joined(given.get("content") or "" if kept else given.get("content"))
        if role not in _ROLES or content is None or (role == "system" and index):
            hint = 'Write {"role": "user" or "assistant", "content": "..."}; a "system" message may come first.'
            raise UsageError(f"history[{index}] is {shown(message)}.", hint)
        if role == "assistant" and isinstance(thought := given.get("reasoning_content"), str) and thought:
            kept["reasoning_content"] = thought
        turns.append({"role": str(role), "content": content, **kept})
    return turns


def _joined(content: Any) -> str | None:
    """The text of a content, which is a string or a list of text parts; None where it is neither."""
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else None
    parts = [part if isinstance(part, Mapping) and part.get("type") == "text" else {} for part in content]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _text_of(source: Path) -> str:
    with source.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {format_size(_MOST_BYTES)}")
    return data.decode("utf-8")


def _is_saved_chat(data: Any) -> bool:
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
        return False
    turns = data.get("turns")
    if not isinstance(data.get("system", 0), str | None) or not isinstance(turns, list):
        return False
    return all(isinstance(t, dict) and t.get("role") in _ROLES and isinstance(t.get("content"), str) for t in turns)
