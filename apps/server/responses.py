"""/v1/responses with a memory: responses that others continue, replies in the background, and streams that go on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from edgeinfer import Model
from edgeinfer.apps.server.bodies import ignored_header, json_body
from edgeinfer.apps.server.completions import NAMED_EVENTS, CompletionKind, complete, make_replies
from edgeinfer.apps.server.errors import error_answer
from edgeinfer.apps.server.events import EventStream, StreamedResponse, while_connected
from edgeinfer.apps.server.guard import KEY_USE
from edgeinfer.apps.server.service import Endpoint, Service
from edgeinfer.core.errors import StorageError
from edgeinfer.core.user_files import make_private
from edgeinfer.openai.contract import Completion, Event
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.response import ResponseCompletion

_log = logging.getLogger("edgeinfer.server")

# Bytes of all stored responses, seconds to wait for another process, and finished background replies whose events stay.
_MOST_BYTES, _BUSY_S, _MOST_ENDED = 64 * 1000**2, 5.0, 8
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, used INTEGER NOT NULL, size INTEGER NOT NULL,
    input TEXT NOT NULL, response TEXT NOT NULL)"""
# Those that were used longest ago go first.
_EVICT = """DELETE FROM responses WHERE id IN (SELECT id FROM (
    SELECT id, sum(size) OVER (ORDER BY used DESC, id) AS total FROM responses) WHERE total > ?)"""


@dataclass(frozen=True)
class StoredResponse:
    """A response, the input of its own request, and the one before it."""

    owner: str  # whose key asked for it
    previous: str | None
    input: list[Any]
    response: Event


class ResponseStore:
    """Responses in a private file of `most` bytes at most. Safe from any thread."""

    def __init__(self, folder: Path, most: int = _MOST_BYTES) -> None:
        self._most, self._lock = most, threading.Lock()
        self._path = folder / "responses.sqlite"
        with self._errors():
            make_private(folder)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._path.chmod(0o600)
            self._file = sqlite3.connect(self._path, _BUSY_S, isolation_level=None, check_same_thread=False)
            # Deleted text must not stay readable in the file.
            for setting in ("secure_delete = ON", "auto_vacuum = FULL", "journal_mode = TRUNCATE"):
                self._file.execute(f"PRAGMA {setting}")
            self._file.execute(_TABLE)

    def keep(self, id_: str, kept: StoredResponse) -> None:
        """Store a response; without room for it, it is not kept."""
        texts = [json.dumps(value, ensure_ascii=False) for value in (kept.input, kept.response)]
        size = sum(len(text.encode()) for text in texts)
        row = (id_, kept.owner, kept.previous, time.time_ns(), size, *texts)
        with self._lock, self._errors(), self._transaction():
            self._file.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._file.execute(_EVICT, (self._most,))

    def find(self, id_: str, owner: str) -> StoredResponse | None:
        """A response of this owner's, which counts as used."""
        with self._lock, self._errors():
            asked = "UPDATE responses SET used = ? WHERE id = ? AND owner = ? RETURNING previous, input, response"
            rows = self._file.execute(asked, (time.time_ns(), id_, owner)).fetchall()
        return StoredResponse(owner, rows[0][0], *map(json.loads, rows[0][1:])) if rows else None

    def conversation(self, id_: str, owner: str) -> list[Any]:
        """The items that lead up to the end of a response."""
        turns: list[StoredResponse] = []
        wanted: str | None = id_
        while wanted is not None:
            turn = self.find(wanted, owner)
            if turn is None:
                message = f"Previous response with id {wanted!r} not found."
                hint = "Send the whole conversation: it was not stored, or made room for later ones."
                code = "previous_response_not_found"
                raise RequestError(message, hint, param="previous_response_id", code=code)
            turns.append(turn)
            wanted = turn.previous
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.response["output"])]

    def delete(self, id_: str, owner: str) -> bool:
        with self._lock, self._errors():
            return self._file.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id_, owner)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:  # a full disk has ended it already
                self._file.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            hint = "Make room, or remove the file; edgeinfer serve --responses off keeps none."
            raise StorageError(f"{self._path} cannot be used: {error}.", hint) from error


class KeptCompletion(ResponseCompletion):
    """A response that goes on from a stored one, and may be stored."""

    def __init__(self, store: ResponseStore, owner: str, body: Mapping[str, Any], model: Model) -> None:
        given = dict(body)
        fields = Fields({name: given.pop(name, None) for name in ("previous_response_id", "background", "store")})
        self.previous = fields.text("previous_response_id")
        self.background = fields.flag("background")
        self.stored = fields.take("store", bool, "true or false") is not False
        if self.background and not self.stored:
            raise fields.wrong("store", False, "A reply in the background is stored, to be fetched later.")
        asked = given.get("input")
        own = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if self.previous is not None and (own is None or isinstance(own, list)):
            given["input"] = [*store.conversation(self.previous, owner), *(own or ())]
        super().__init__(given, model)
        self.owner = owner
        self.own: list[Any] = own or []

    def in_progress(self) -> Event:
        return self._response("in_progress")

    def kept(self) -> StoredResponse:
        return StoredResponse(self.owner, self.previous, self.own, self.whole())

    def _response(self, status: str) -> Event:
        own = {"previous_response_id": self.previous, "store": self.stored, "background": self.background}
        return super()._response(status) | own


class _Live:
    """A reply in the background: its response so far, and all of its events, which clients may read at any time."""

    def __init__(self, completion: KeptCompletion) -> None:
        self.completion = completion
        self.owner = completion.owner
        self.response: Event = {}
        self.encoded: list[bytes] = []
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._changed = asyncio.Event()

    async def add(self, events: Sequence[Event]) -> None:
        for event in events:
            self.response = event.get("response", self.response)
            self.encoded.append(NAMED_EVENTS.encode(event))
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    async def fail(self, error: Exception) -> None:
        _, body = error_answer(error)
        reported = {"code": body["error"].get("code") or "server_error", "message": body["error"]["message"]}
        response = self.response | {"status": "failed", "error": reported}
        event = {"type": "response.failed", "response": response, "sequence_number": len(self.encoded)}
        await self.add([event])

    async def cancel(self) -> None:
        if self.task is not None and not self.ended:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
            self.response |= {"status": "cancelled"}

    async def follow(self, stream: EventStream, after: int) -> None:
        """Write the events behind a number, and those to come."""
        place = after + 1
        while True:
            changed = self._changed
            if place < len(self.encoded):
                new, place = self.encoded[place:], len(self.encoded)
                await stream.write(b"".join(new))
            elif self.ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


RESPONSE_KIND = CompletionKind(ResponseCompletion, NAMED_EVENTS, lambda _, body: {"type": "error"} | body)


class ResponseEndpoints:
    """Without a store, nothing is kept, and no response can be continued."""

    def __init__(self, service: Service, store: ResponseStore | None) -> None:
        self._service = service
        self._store = store
        self._live: dict[str, _Live] = {}
        # By path; also served without /v1.
        self.asked: Mapping[str, Endpoint] = {"/responses/{id}": self.get, "/responses/{id}/input_items": self.items}
        self.posted: Mapping[str, Endpoint] = {
            "/responses": self.create,
            "/responses/input_tokens": self.count,
            "/responses/{id}/cancel": self.cancel,
        }
        self.deleted: Mapping[str, Endpoint] = {"/responses/{id}": self.delete}

    async def close(self) -> None:
        for live in list(self._live.values()):
            await live.cancel()
        if self._store is not None:
            self._store.close()

    async def create(self, request: Request) -> Response:
        """Answer, and store the answer."""
        if self._store is None:
            return await complete(self._service, RESPONSE_KIND, request)
        detach = partial(self._detach, request)
        kind = replace(RESPONSE_KIND, make=self._make(request), ended=self._keep, detach=detach)
        return await complete(self._service, kind, request)

    async def count(self, request: Request) -> Response:
        """Count the prompt tokens of a request."""
        service, make = self._service, self._make(request)

        def counted(body: Mapping[str, Any], model: Model) -> int:
            completion = make(body, model)
            completion.prepare(model)
            return completion.prompt_tokens

        async with (
            json_body(request, service.security, most=service.most_body()) as body,
            service.use(body.get("model"), request.receive) as model,
        ):
            tokens = await service.host.tokenize(model, partial(counted, body))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def get(self, request: Request) -> Response:
        """Give a response, or with `stream=true` the events of one in the background behind `starting_after`."""
        live = self._found_live(request)
        if request.query_params.get("stream", "").lower() != "true":
            return JSONResponse(live.response if live is not None else (await self._found(request)).response)
        if live is None:
            await self._found(request)
            message = "Only a reply in the background, running or just ended, can be streamed again."
            raise RequestError(message, "Leave out stream to have the whole response.", param="stream")
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 9:
            raise RequestError(f"starting_after={after!r} is no number of an event.", param="starting_after")
        return self._followed(live, int(after))

    async def items(self, request: Request) -> Response:
        """List the items of a request's own input."""
        id_ = request.path_params["id"]
        live = self._found_live(request)
        own = (await self._found(request)).input if live is None else live.completion.own
        data = [{"type": "message", "id": f"msg_{id_[5:]}_{place}"} | item for place, item in enumerate(own)]
        if request.query_params.get("order", "desc") != "asc":
            data.reverse()
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": False})

    async def cancel(self, request: Request) -> Response:
        """End a reply in the background."""
        live = self._found_live(request)
        if live is None:
            await self._found(request)
            raise RequestError("Only a reply in the background can be cancelled.", "Close the connection instead.")
        await live.cancel()
        return JSONResponse(live.response)

    async def delete(self, request: Request) -> Response:
        live = self._found_live(request)
        if live is None:
            await self._found(request)
        else:
            await live.cancel()
            del self._live[live.completion.id]
        id_ = request.path_params["id"]
        if self._store is not None:
            await asyncio.to_thread(self._store.delete, id_, _owner(request))
        return JSONResponse({"id": id_, "object": "response", "deleted": True})

    def _make(self, request: Request) -> Callable[[Mapping[str, Any], Model], ResponseCompletion]:
        return ResponseCompletion if self._store is None else partial(KeptCompletion, self._store, _owner(request))

    async def _keep(self, completion: Completion) -> None:
        """Store a finished response; where that fails the client still gets it."""
        assert isinstance(completion, KeptCompletion) and self._store is not None, "made by `create`"
        if completion.stored:
            try:
                await asyncio.to_thread(self._store.keep, completion.id, completion.kept())
            except StorageError as error:
                _log.warning("A response was not stored. %s", error)

    def _detach(self, request: Request, completion: Completion, using: contextlib.AsyncExitStack) -> Response | None:
        """Let a reply go on without its client, if that was asked for."""
        assert isinstance(completion, KeptCompletion), "made by `create`"
        if not completion.background:
            return None
        ended = [id_ for id_, live in self._live.items() if live.ended]
        for id_ in ended[: len(ended) - _MOST_ENDED + 1]:
            del self._live[id_]
        live = self._live[completion.id] = _Live(completion)
        live.response = completion.in_progress()
        live.task = asyncio.get_running_loop().create_task(self._run(live, using.pop_all(), request))
        if completion.stream:
            return self._followed(live, -1)
        return JSONResponse(live.response, headers=ignored_header(completion.ignored))

    async def _run(self, live: _Live, using: contextlib.AsyncExitStack, request: Request) -> None:
        completion = live.completion
        async with using:
            try:
                await live.add(completion.opening())
                await make_replies(self._service, completion, live.add, request)
                await self._keep(completion)
                await live.add(completion.closing())
            except Exception as error:  # of any kind: its clients learn of it from the response
                await live.fail(error)
            finally:
                live.end()

    def _followed(self, live: _Live, after: int) -> Response:
        async def write(receive: Receive, send: Send) -> None:
            stream = EventStream(send, self._service.security.comment_seconds, framing=NAMED_EVENTS)
            await while_connected(receive, live.follow(stream, after), stream.comment())
            await stream.end()

        return StreamedResponse(write)

    def _found_live(self, request: Request) -> _Live | None:
        live = self._live.get(request.path_params["id"])
        return live if live is not None and live.owner == _owner(request) else None

    async def _found(self, request: Request) -> StoredResponse:
        id_, store = request.path_params["id"], self._store
        found = None if store is None else await asyncio.to_thread(store.find, id_, _owner(request))
        if found is None:
            hint = "Nothing is stored here." if store is None else "It was not stored, or made room for later ones."
            raise RequestError(f"Response with id {id_!r} not found.", hint, status=404, code="not_found")
        return found


def _owner(request: Request) -> str:
    """Whose responses a request may see: those that were asked for with the same key."""
    use = request.scope.get(KEY_USE)
    return "" if use is None else hashlib.sha256(use.key.key.encode()).hexdigest()
