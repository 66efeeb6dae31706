"""Endpoints about files of messages: attaching, reading and removing them, keeping them for later, and what they take
of the context."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import uuid
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgeinfer.apps.desktop.checks import NotFoundError, check_name
from edgeinfer.apps.desktop.reading import context_of, tokens_for
from edgeinfer.apps.desktop.records import Attachment, Conversation, Message
from edgeinfer.apps.desktop.replies import count_on
from edgeinfer.apps.desktop.requests import Endpoint, answered, attachment_ids, fields
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.events import while_connected
from edgeinfer.errors import TemplateError

_LONGEST_NAME = 200


def attachment_routes(services: Services) -> list[BaseRoute]:
    """The routes."""
    api = _Attachments(services)
    table: tuple[tuple[str, str, Endpoint], ...] = (
        ("POST", "/attachments", api.attach),
        ("GET", "/attachments/{id}", api.read),
        ("DELETE", "/attachments/{id}", api.discard),
        ("POST", "/attachments/{id}/keep", api.keep),
        ("GET", "/kept", api.kept),
        ("DELETE", "/kept/{id}", api.remove),
        ("POST", "/tokens", api.tokens),
    )
    return [Route(path, answered(endpoint), methods=[method]) for method, path, endpoint in table]


def attachment_view(attachment: Attachment) -> dict[str, Any]:
    """A file without its text."""
    a = attachment
    shown = {"id": a.id, "name": a.name, "kind": a.kind, "bytes": a.bytes, "pages": a.pages}
    return shown | {"characters": len(a.content), "document": a.document}


def kept_view(kept: Attachment) -> dict[str, Any]:
    """A kept file without its text, with what it takes on the disk once it is read."""
    return attachment_view(kept) | {"tokens": kept.tokens, "kept_bytes": context_of(kept).kept_bytes()}


class _Attachments:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._security = services.security
        self._attachments = services.history.attachments

    async def attach(self, request: Request) -> Response:
        """Takes the bytes of a file as the body, and its name from the address."""
        given = check_name(request.query_params.get("name", ""), "name", _LONGEST_NAME)
        # Some browsers give a path of another machine.
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
        """Has the model read a file now, and keeps both the file and what the model made of it for later."""
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
        def listed() -> list[dict[str, Any]]:
            return [kept_view(file) for file in self._attachments.kept()]

        return JSONResponse({"kept": await asyncio.to_thread(listed)})

    async def remove(self, request: Request) -> Response:
        def forget(file: Attachment) -> None:
            context_of(file).forget()

        await asyncio.to_thread(self._attachments.remove, request.path_params["id"], forget)
        self._services.feed.publish("kept", {})
        return Response(status_code=204)

    async def tokens(self, request: Request) -> Response:
        """What a message would take if it were sent now: all that the model would read, and each file alone."""
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
            except TemplateError:  # it takes no such messages, which the reply will say
                return sum(each.values()), each

        total, each = await count_on(self._services.host, model, count)
        return JSONResponse({"tokens": total, "context": model.context, "each": each})

    def _conversation(self, id: str | None) -> Conversation:
        """A conversation; where there is none yet, a new one."""
        if id is not None:
            return self._services.history.conversation(id)
        return Conversation("", "", 0, 0, self._services.settings.now.system)

    def _draft(self, body: dict[str, Any], files: Sequence[Attachment]) -> tuple[Conversation, Message]:
        """The conversation as it would be, and its reply."""
        whole, content = self._conversation(body.get("conversation")), body.get("content", "")
        asked = Message("draft", body.get("parent"), "user", content, 0, attachments=tuple(files))
        if asked.parent is not None and whole.message(asked.parent) is None:
            raise NotFoundError("The conversation has no such message.", "Reload the page.")
        whole = dataclasses.replace(whole, messages=(*whole.messages, asked))
        return whole, Message("reply", asked.id, "assistant", "", 0)
