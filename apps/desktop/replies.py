"""Replies under way: made by the host, kept in the history as they grow, followed by windows.

A reply belongs to its conversation, not to the window that asked for it: it goes on when the window closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import edgeinfer
from edgeinfer.apps.desktop.checks import ConflictError, NoModelError, hint_of
from edgeinfer.apps.desktop.history import History
from edgeinfer.apps.desktop.records import Attachment, Conversation, Figures, Message, ReplyFailure, Status
from edgeinfer.apps.desktop.settings import WHEN_FULL
from edgeinfer.apps.server.host import HostReply, ModelHost
from edgeinfer.errors import BudgetError, CapabilityError, ContextLengthError, EdgeInferError, UsageError, UserError

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
    return before + len(model.tokenize_chat(messages_for(conversation, reply, apart), prefill=reply.content))


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


def without_oldest(model: Model, messages: Sequence[dict[str, str]], prefill: str, room: int) -> Fitted:
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
        return Fitted(kept, model.tokenize_chat(kept, prefill=prefill, fitting=True), start)

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


_T = TypeVar("_T")
_log = logging.getLogger("edgeinfer.desktop")

# How often a growing reply is written to the disk.
_KEEP_S = 0.4


class RunningReply:
    """A reply that is being made.

    Attributes:
        message: its row, as it was when it began.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self._stopped = asyncio.Event()
        self._pieces = [message.content]
        self._grown = asyncio.Event()
        self._reply: HostReply | None = None
        self._prompt: int | None = None
        self._context: int | None = None
        self._tokens = 0
        self._first = self._latest = 0.0
        self._over = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether the user asked it to stop."""
        return self._stopped.is_set()

    @property
    def content(self) -> str:
        """The whole message so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def live(self) -> dict[str, Any]:
        """What is known of it while it is made, in the words of its figures; the prompt's tokens may be unknown."""
        lasted = self._latest - self._first
        speed = (self._tokens - 1) / lasted if self._tokens > 1 and lasted > 0 else 0.0
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._tokens, "context": self._context}
        return counts | {"tokens_per_second": round(speed, 3)}

    def read(self, prompt: int | None, context: int) -> None:
        """Notes the tokens that the model reads first, and how many its context holds."""
        self._prompt, self._context = prompt, context

    def add(self, text: str, tokens: int) -> None:
        """Adds text to the message, and counts its tokens."""
        self._latest = time.monotonic()
        self._first = self._first or self._latest
        self._tokens += tokens
        if text:
            self._pieces.append(text)
            self._tell()

    def attach(self, reply: HostReply) -> None:
        """Keeps the host's reply, to be able to stop it."""
        self._reply = reply
        if self.stopped:
            reply.cancel()

    def stop(self) -> None:
        """Ends it within the current pass."""
        self._stopped.set()
        if self._reply is not None:
            self._reply.cancel()

    def end(self) -> None:
        """Tells followers that the reply is over."""
        self._over.set()
        self._tell()

    async def unless_stopped(self, wait: Coroutine[Any, Any, None]) -> None:
        """Waits for something, or until the reply is to stop; raises what `wait` raises."""
        tasks = [asyncio.ensure_future(each) for each in (wait, self._stopped.wait())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if tasks[0] in done:
            tasks[0].result()

    async def wait_over(self, seconds: float) -> None:
        """Waits for so long, or until the reply is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    async def contents(self) -> AsyncIterator[str]:
        """Yields the whole message whenever it has grown; slow readers get the latest only."""
        shown = -1
        while not self._over.is_set():
            content = self.content
            if len(content) != shown:
                shown = len(content)
                yield content
            else:
                await self._grown.wait()

    def _tell(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class ConversationReplies:
    """The replies of all conversations, one of each at a time.

    Args:
        host: makes them.
        history: keeps them.
        ready: waits while a model is loading, and raises why it could not be.
        defaults: generation options that hold where a conversation says nothing else.
        finished: called when one has ended.
    """

    def __init__(
        self,
        host: ModelHost,
        history: History,
        ready: Callable[[], Coroutine[Any, Any, None]],
        defaults: Callable[[], Mapping[str, Any]],
        finished: Callable[[], None],
    ) -> None:
        self._host = host
        self._history = history
        self._ready = ready
        self._defaults = defaults
        self._finished = finished
        self._running: dict[str, RunningReply] = {}
        self._starting: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def running(self, conversation: str) -> RunningReply | None:
        """The reply that a conversation is getting."""
        return self._running.get(conversation)

    async def begin(self, conversation: str, record: Callable[[], Message]) -> Message:
        """Begins a reply, once its row is kept.

        Args:
            record: keeps the row and returns it, with status "replying"; called on another thread.
        """
        if conversation in self._running or conversation in self._starting:
            raise ConflictError("A reply is being made.", "Wait for it, or stop it.")
        self._starting.add(conversation)
        try:
            message = await asyncio.to_thread(record)
            running = self._running[conversation] = RunningReply(message)
        finally:
            self._starting.discard(conversation)
        task = asyncio.create_task(self._run(conversation, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return message

    def stop(self, conversation: str) -> None:
        """Stops the reply that a conversation is getting, if any."""
        running = self._running.get(conversation)
        if running is not None:
            running.stop()

    async def close(self) -> None:
        """Ends all replies and keeps what there is of them."""
        self._closing = True
        for running in self._running.values():
            running.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, conversation: str, running: RunningReply) -> None:
        status: Status = "error"
        failure: ReplyFailure | None = None
        figures: Figures | None = None
        try:
            whole = await asyncio.to_thread(self._history.conversation, conversation)
            figures = await self._make(whole, running)
            cut = running.stopped or figures is None or figures.finish_reason == "cancelled"
            status = "complete" if not cut else "stopped" if running.stopped and not self._closing else "interrupted"
        except ContextLengthError as error:
            failure = await self._too_long(error, conversation, running)
        except EdgeInferError as error:
            failure = _failure(error)
        except Exception as error:  # whatever it is, it is this reply's; the app goes on
            _log.exception("a reply failed")
            failure = ReplyFailure(f"Unexpected {type(error).__name__}.", "Try again; the program's output says more.")
        try:
            await asyncio.to_thread(self._history.finish, running.message.id, running.content, status, failure, figures)
        except EdgeInferError as error:
            _log.error("a reply could not be kept: %s", error)
        finally:
            del self._running[conversation]
            running.end()
            self._finished()

    async def _make(self, whole: Conversation, running: RunningReply) -> Figures | None:
        """Makes the text; returns its figures, or None if it did not start."""
        prefill, context, left_out = running.content, 0, 0
        kept = await asyncio.to_thread(self._history.attachments.kept_ids)
        messages = messages_for(whole, running.message)
        options = {**self._defaults(), **whole.options}
        shortened = options.pop("when_full", WHEN_FULL[0]) != WHEN_FULL[0]

        def fit(model: Any) -> Fitted:
            if shortened:
                return without_oldest(model, messages, prefill, options.get("max_tokens") or model.context)
            return Fitted(messages, model.tokenize_chat(messages, prefill=prefill, fitting=True), 0)

        def start(model: Any) -> Any:
            nonlocal context, left_out
            context = model.context
            if apart := files_apart(model, whole, running.message.parent, kept):
                asked = messages_for(whole, running.message, apart)
                running.read(None, context)
                return stream_behind(model, apart, asked, lambda: self._ends(running), prefill=prefill, **options)
            given = fitted if fitted is not None and model is tokenized_by else fit(model)
            left_out = given.left_out
            running.read(len(given.tokens), context)
            return model.stream_chat(given.messages, prefill=prefill, tokens=given.tokens, **options)

        await running.unless_stopped(self._ready())
        if running.stopped:
            return None
        if self._host.state.status != "ready":
            raise NoModelError("No model is loaded.", "Choose one.")
        tokenized_by, fitted = self._host.model, None
        apart = files_apart(tokenized_by, whole, running.message.parent, kept)
        if tokenized_by is not None and tokenized_by.tokenizes_beside and not apart:
            # Not on the model's thread, where other replies would wait for it.
            fitted = await asyncio.to_thread(fit, tokenized_by)
        async with self._host.submit(start, whole.id) as reply:
            running.attach(reply)
            written = time.monotonic() - _KEEP_S
            with contextlib.suppress(ReadingEndedError):
                async for chunk in reply:
                    running.add(chunk.text, len(chunk.token_ids))
                    if time.monotonic() - written >= _KEEP_S:
                        await self._keep(running)
                        written = time.monotonic()
        try:
            result = reply.result
        except UsageError:  # cancelled before it began
            return None
        return Figures.of_result(result, context, left_out)

    def _ends(self, running: RunningReply | None) -> bool:
        """Whether a file is no longer to be read: the model is to go, or the reply was stopped."""
        stopped = self._closing if running is None else running.stopped
        return stopped or self._host.state.status != "ready"

    async def read(self, file: Attachment, system: str, given_up: threading.Event) -> int:
        """Has the model read a file that is to be kept for later; returns its tokens."""
        if self._host.state.status != "ready":
            raise NoModelError("No model is loaded.", "Choose one.")
        turns = [{"role": "system", "content": system}] if system else []

        def start(model: Any) -> Any:
            model.require_contexts()
            asked = [*turns, {"role": "user", "content": file.name}]
            return stream_behind(model, [file], asked, lambda: given_up.is_set() or self._ends(None), max_tokens=1)

        async with self._host.submit(start, file.id) as reply:
            async for _ in reply:
                pass
        try:
            use = reply.result.contexts
        except UsageError:  # another model is being loaded
            use = None
        if use is None:
            raise ReadingEndedError("The file was not read to its end.", "Try again.")
        return use.tokens

    async def _too_long(self, error: ContextLengthError, conversation: str, running: RunningReply) -> ReplyFailure:
        """What is kept of a conversation that the context does not hold: how many tokens it takes, exactly."""
        failure, model = dataclasses.replace(_failure(error), code="context_full"), self._host.model
        with contextlib.suppress(EdgeInferError):
            whole = await asyncio.to_thread(self._history.conversation, conversation)
            kept = await asyncio.to_thread(self._history.attachments.kept_ids)
            if model is not None:
                tokens = await count_on(self._host, model, lambda m: tokens_for(m, whole, running.message, kept))
                if tokens >= model.context:
                    said = f"This chat takes {tokens:,} tokens, and the context holds {model.context:,}."
                    return dataclasses.replace(failure, message=said, hint="", tokens=tokens)
        return failure

    async def _keep(self, running: RunningReply) -> None:
        """Writes what there is; a disk that is full now may not be when the reply ends."""
        try:
            await asyncio.to_thread(self._history.write, running.message.id, running.content)
        except EdgeInferError as error:
            _log.warning("a reply could not be kept: %s", error)


async def count_on(host: ModelHost, model: Model, question: Callable[[Any], _T]) -> _T:
    """Asks a model what texts are in tokens, without waiting for its replies where it need not."""
    return await asyncio.to_thread(question, model) if model.tokenizes_beside else await host.ask(question)


def _failure(error: EdgeInferError) -> ReplyFailure:
    """Returns an error as it is kept with the message."""
    failure = ReplyFailure(error.message, hint_of(error.hint), getattr(error, "code", None) or "error")
    if isinstance(error, BudgetError):
        return dataclasses.replace(failure, code="memory_short", minimum_bytes=error.minimum_bytes or None)
    return failure
