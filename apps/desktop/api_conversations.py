"""Endpoints about conversations, messages, replies and attached files."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any, cast, get_args
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.apps.desktop import transfer
from edgeinfer.apps.desktop.checks import NotFoundError, check_name
from edgeinfer.apps.desktop.control import choice_view
from edgeinfer.apps.desktop.library import model_of
from edgeinfer.apps.desktop.markdown import render_reply, render_user
from edgeinfer.apps.desktop.records import Attachment, Conversation, Message, ModelChoice, Role
from edgeinfer.apps.desktop.replies import Decision, RunningReply, context_of, tokens_for
from edgeinfer.apps.desktop.requests import (
    Endpoints,
    Table,
    attachment_ids,
    event_stream,
    fields,
    optional,
    search_text,
    whole_number,
)
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.desktop.settings import checked_options
from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.events import Event, while_connected
from edgeinfer.core.errors import TemplateError, UsageError

# Saves a new reply; returns it after its question if that is new too.
_Recorder = Callable[[], tuple[Message | None, Message]]

# Seconds between two renderings of a growing reply, and the share of time that they may take.
_EVERY_S, _SHARE = 0.1, 0.25
# The title before the first message.
_UNNAMED = "New chat"
_LONGEST_TITLE, _LONGEST_TEXT = 200, 1_000_000


class ConversationEndpoints(Endpoints):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._history = services.history
        self._replies = services.replies

    def table(self) -> Table:
        one = "/conversations/{id}"
        message = f"{one}/messages/{{message}}"
        return (
            ("GET", "/conversations", self.listed),
            ("POST", "/conversations", self.create),
            ("GET", one, self.read),
            ("PATCH", one, self.change),
            ("DELETE", one, self.delete),
            ("POST", f"{one}/messages", self.ask),
            ("POST", f"{message}/regenerate", partial(self._reply_again, self._history.regenerate)),
            ("POST", f"{message}/edit", self.edit),
            ("POST", f"{message}/continue", partial(self._reply_again, self._history.go_on)),
            ("POST", f"{one}/stop", partial(self._tell_reply, self._replies.stop)),
            ("POST", f"{one}/answer", partial(self._tell_reply, self._replies.answer_now)),
            ("POST", f"{one}/calls/{{call}}", self.decide),
            ("GET", f"{one}/reply", self.follow),
            ("GET", f"{one}/export", self.export),
            ("POST", "/import", self.import_file),
        )

    async def listed(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._history.summaries, search_text(request))
        return JSONResponse({"conversations": [asdict(each) | {"title": each.title or _UNNAMED} for each in found]})

    async def create(self, request: Request) -> Response:
        body = await fields(request, self._security, title=str, system=str)
        system = body.get("system", self._services.settings.now.system)
        title = _short(body.get("title", ""), _LONGEST_TITLE, "title")
        made = await asyncio.to_thread(self._history.create, title, _short(system, _LONGEST_TEXT, "system"))
        self._tell()
        return await self._view(made, status=201)

    async def read(self, request: Request) -> Response:
        return await self._view(await asyncio.to_thread(self._history.conversation, request.path_params["id"]))

    async def change(self, request: Request) -> Response:
        body = await fields(request, self._security, title=str, system=str, options=dict, leaf=str, choice=dict)
        changes = optional(body, "title", "system", "leaf")
        _short(changes.get("title", ""), _LONGEST_TITLE, "title")
        _short(changes.get("system", ""), _LONGEST_TEXT, "system")
        if "options" in body:
            checked_options(body["options"])
            changes["options"] = body["options"]
        if "choice" in body:
            changes["choice"] = _choice(body["choice"])
        id = request.path_params["id"]
        changed = await asyncio.to_thread(lambda: self._history.change(id, **changes))
        self._tell()
        return await self._view(changed)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._replies.stop(id)
        await asyncio.to_thread(self._history.delete, id)
        self._tell()
        return Response(status_code=204)

    async def ask(self, request: Request) -> Response:
        body = await fields(request, self._security, parent=str | None, content=str, attachments=list)
        files = attachment_ids(body)
        id, content = request.path_params["id"], _short(body.get("content", ""), _LONGEST_TEXT, "content")
        return await self._begin(id, lambda: self._history.ask(id, body.get("parent"), content, files, self._loaded()))

    async def edit(self, request: Request) -> Response:
        body = await fields(request, self._security, content=str)
        id, message = request.path_params["id"], request.path_params["message"]
        content = _short(body.get("content", ""), _LONGEST_TEXT, "content")
        whole = await asyncio.to_thread(self._history.conversation, id)
        old = whole.message(message)
        if old is None or old.role == "user":
            return await self._begin(id, lambda: self._history.edit_question(id, message, content, self._loaded()))
        new = await asyncio.to_thread(self._history.edit_reply, id, message, content)
        self._tell()
        return JSONResponse({"assistant": _message_view(new)}, status_code=202)

    async def _reply_again(self, record: Callable[[str, str], Message], request: Request) -> Response:
        id, message = request.path_params["id"], request.path_params["message"]
        return await self._begin(id, lambda: (None, record(id, message)))

    async def _tell_reply(self, what: Callable[[str], None], request: Request) -> Response:
        await asyncio.to_thread(self._history.conversation, request.path_params["id"])
        what(request.path_params["id"])
        return JSONResponse({}, status_code=202)

    async def decide(self, request: Request) -> Response:
        """Allow or refuse a call of a tool that waits for it."""
        body = await fields(request, self._security, allow=str)
        if (decision := body.get("allow")) not in get_args(Decision):
            raise UsageError("allow is out of range.", f"allow must be one of {', '.join(get_args(Decision))}.")
        self._replies.decide(request.path_params["id"], request.path_params["call"], cast(Decision, decision))
        return JSONResponse({}, status_code=202)

    async def follow(self, request: Request) -> Response:
        whole = await asyncio.to_thread(self._history.conversation, request.path_params["id"])
        return event_stream(self._picture(whole.id, self._replies.running(whole.id)), self._security)

    async def export(self, request: Request) -> Response:
        format = request.query_params.get("format", "json")
        if format not in _EXPORTS:
            raise UsageError(f"There is no format {format!r}.", f"Choose one of {', '.join(_EXPORTS)}.")
        write, kind, ending = _EXPORTS[format]
        whole = await asyncio.to_thread(self._history.conversation, request.path_params["id"])
        text = await asyncio.to_thread(write, whole)
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(_file_name(whole) + ending)}"}
        return Response(text, media_type=kind, headers=headers)

    async def import_file(self, request: Request) -> Response:
        data = await request.body()
        read = await asyncio.to_thread(transfer.read_json, data)
        await asyncio.to_thread(self._history.add, read)
        self._tell()
        return await self._view(read, status=201)

    async def _begin(self, id: str, record: _Recorder) -> Response:
        """Start a reply; answer with its new messages."""
        kept: list[Message | None] = []

        def keep() -> Message:
            question, reply = record()
            kept.append(question)
            return reply

        reply = await self._replies.begin(id, keep)
        self._tell()
        views = {} if kept[0] is None else {"user": _message_view(kept[0])}
        return JSONResponse(views | {"assistant": _message_view(reply, RunningReply(reply))}, status_code=202)

    async def _picture(self, id: str, running: RunningReply | None) -> AsyncGenerator[Event, None]:
        """Yield the growing message, then the finished one."""
        shown = None if running is None else running.message.id
        if running is not None:
            async for content in running.contents():
                started = time.monotonic()
                html = await asyncio.to_thread(render_reply, content)
                yield Event(
                    {"id": shown, "html": html, "content": content, "live": running.live} | _calls(running), "text"
                )
                took = time.monotonic() - started
                await running.wait_over(max(_EVERY_S, took / _SHARE))
        whole = await asyncio.to_thread(self._history.conversation, id)
        last = whole.message(shown or whole.leaf)
        failed = shown is not None and last is not None and last.status == "error"
        yield Event({} if last is None else _message_view(last), "failed" if failed else "done")

    async def _view(self, conversation: Conversation, status: int = 200) -> Response:
        running = self._replies.running(conversation.id)
        data = await asyncio.to_thread(_conversation_view, conversation, running)
        return JSONResponse(data, status_code=status)

    def _loaded(self) -> ModelChoice | None:
        """The loaded model, which the conversation uses from its next message on."""
        return self._services.control.choice

    def _tell(self) -> None:
        self._services.feed.publish("conversations", {})


_EXPORTS = {
    "json": (transfer.write_json, "application/json", ".json"),
    "markdown": (transfer.write_markdown, "text/markdown; charset=utf-8", ".md"),
}


def _file_name(conversation: Conversation) -> str:
    """A file name that every system accepts."""
    kept = "".join(c if c.isalnum() or c in " -_" else " " for c in conversation.title)
    return " ".join(kept.split())[:60].strip() or "conversation"


def _short(text: str, most: int, name: str) -> str:
    if len(text) > most:
        raise UsageError(f"{name} is longer than {most:,} characters.", "Shorten it.")
    return text


def _choice(data: dict[str, Any]) -> ModelChoice:
    """Read which model a conversation uses."""
    known = ("model", "memory", "context")
    model = data.get("model")
    if set(data) - set(known) or not isinstance(model, str) or not model:
        raise UsageError("choice has unknown fields, or no model.", f"Known fields: {', '.join(known)}.")
    numbers = {name: whole_number(data, name) for name in known[1:]}
    return ModelChoice(model_of(check_name(model, "model")), **numbers)


def _conversation_view(conversation: Conversation, running: RunningReply | None) -> dict[str, Any]:
    c = conversation
    return {
        **{name: getattr(c, name) for name in ("id", "created", "updated", "system", "leaf")},
        "title": c.title or _UNNAMED,
        "options": dict(c.options),
        "choice": choice_view(c.choice),
        "replying": None if running is None else running.message.id,
        "messages": [_message_view(message, running) for message in c.messages],
    }


def _message_view(message: Message, running: RunningReply | None = None) -> dict[str, Any]:
    """A message with its HTML. A reply left "replying" by a failed write counts as interrupted."""
    m = message
    if m.status == "replying" and (running is None or running.message.id != m.id):
        m = replace(m, status="interrupted")
    return {
        **{name: getattr(m, name) for name in ("id", "parent", "role", "content", "created", "status")},
        "calls": [asdict(call) for call in m.calls],
        "html": _html(m.role, m.content),
        "error": None if m.failure is None else asdict(m.failure),
        "figures": None if m.figures is None else asdict(m.figures),
        "attachments": [attachment_view(file) for file in m.attachments],
    }


def _calls(running: RunningReply) -> dict[str, Any]:
    return {"calls": [asdict(call) for call in running.calls]}


@lru_cache(maxsize=256)
def _html(role: Role, content: str) -> str:
    return render_user(content) if role == "user" else render_reply(content)


_LONGEST_NAME = 200


def attachment_view(attachment: Attachment) -> dict[str, Any]:
    """A file without its text."""
    a = attachment
    shown = {"id": a.id, "name": a.name, "kind": a.kind, "bytes": a.bytes, "pages": a.pages}
    return shown | {"characters": len(a.content), "document": a.document}


def kept_view(kept: Attachment) -> dict[str, Any]:
    """A kept file without its text, with the disk space that its cache takes."""
    return attachment_view(kept) | {"tokens": kept.tokens, "kept_bytes": context_of(kept).kept_bytes()}


class AttachmentEndpoints(Endpoints):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._attachments = services.history.attachments

    def table(self) -> Table:
        return (
            ("POST", "/attachments", self.attach),
            ("GET", "/attachments/{id}", self.read),
            ("DELETE", "/attachments/{id}", self.discard),
            ("POST", "/attachments/{id}/keep", self.keep),
            ("GET", "/kept", self.kept),
            ("DELETE", "/kept/{id}", self.remove),
            ("POST", "/tokens", self.tokens),
        )

    async def attach(self, request: Request) -> Response:
        """Store the request's body as a file; its name is in the query."""
        given = check_name(request.query_params.get("name", ""), "name", _LONGEST_NAME)
        # Some browsers send a whole path.
        name = PurePosixPath(given.replace("\\", "/")).name or "file"
        data = await request.body()
        kind, text, pages = await self._services.documents.read(name, data)
        made = Attachment(uuid.uuid4().hex, name, kind, len(data), text, pages)
        await asyncio.to_thread(self._attachments.add, made)
        return JSONResponse(attachment_view(made), status_code=201)

    async def read(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._attachments.get, request.path_params["id"])
        return JSONResponse(attachment_view(found) | {"content": found.content})

    async def discard(self, request: Request) -> Response:
        await asyncio.to_thread(self._attachments.discard, request.path_params["id"])
        return Response(status_code=204)

    async def keep(self, request: Request) -> Response:
        """Have the model read a file now, and keep both the file and its cache for later."""
        body = await fields(request, self._security, conversation=str | None)
        file = await asyncio.to_thread(self._attachments.get, request.path_params["id"])
        await asyncio.to_thread(self._attachments.require_room, file.id)
        whole = await asyncio.to_thread(self._conversation, body.get("conversation"))
        given_up, made = threading.Event(), list[Attachment]()

        async def read() -> None:
            tokens = await self._services.replies.read(file, whole.system, given_up)
            made.append(await asyncio.to_thread(self._attachments.keep, file.id, tokens))

        try:
            await while_connected(request.receive, read())
        except ClientGoneError:
            return Response(status_code=204)  # the client has gone
        finally:
            given_up.set()
        self._services.feed.publish("kept", {})
        return JSONResponse(await asyncio.to_thread(kept_view, made[0]), status_code=201)

    async def kept(self, request: Request) -> Response:
        found = await asyncio.to_thread(lambda: list(map(kept_view, self._attachments.kept())))
        return JSONResponse({"kept": found})

    async def remove(self, request: Request) -> Response:
        id = request.path_params["id"]
        await asyncio.to_thread(self._attachments.remove, id, lambda file: context_of(file).forget())
        self._services.feed.publish("kept", {})
        return Response(status_code=204)

    async def tokens(self, request: Request) -> Response:
        """Count the tokens of a message as if it were sent now, and of each file."""
        kinds = {"conversation": str | None, "parent": str | None, "content": str, "attachments": list}
        body = await fields(request, self._security, **kinds)
        files = await asyncio.to_thread(self._attachments.chosen, attachment_ids(body))
        model = self._services.host.model
        if model is None:
            return JSONResponse({"tokens": None, "context": None, "each": {}})
        whole, reply = await asyncio.to_thread(self._draft, body, files)
        kept = await asyncio.to_thread(self._attachments.kept_ids)

        def count(model: Any) -> tuple[int, dict[str, int]]:
            each = {file.id: len(model.tokenize(file.content, parse_special=False)) for file in files}
            try:
                return tokens_for(model, whole, reply, kept), each
            except TemplateError:  # the template refuses such messages, as the reply will say
                return sum(each.values()), each

        total, each = await self._services.host.tokenize(model, count)
        return JSONResponse({"tokens": total, "context": model.context, "each": each})

    def _conversation(self, id: str | None) -> Conversation:
        """The conversation of this id, or a new one."""
        if id is not None:
            return self._services.history.conversation(id)
        return Conversation("", "", 0, 0, self._services.settings.now.system)

    def _draft(self, body: dict[str, Any], files: Sequence[Attachment]) -> tuple[Conversation, Message]:
        """The conversation with the draft added, and its reply."""
        whole, content = self._conversation(body.get("conversation")), body.get("content", "")
        asked = Message("draft", body.get("parent"), "user", content, 0, attachments=tuple(files))
        if asked.parent is not None and whole.message(asked.parent) is None:
            raise NotFoundError("The conversation has no such message.", "Reload the page.")
        whole = dataclasses.replace(whole, messages=(*whole.messages, asked))
        return whole, Message("reply", asked.id, "assistant", "", 0)
