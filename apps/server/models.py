"""Models that clients load, unload and fetch, with progress, as llama-server's router and Ollama's /api/pull do it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Send

from edgeinfer import hub
from edgeinfer.apps.server.bodies import read_json
from edgeinfer.apps.server.events import JSON_LINES, EventFeed, EventStream, StreamedResponse, while_connected
from edgeinfer.apps.server.service import Endpoint, Service
from edgeinfer.core.errors import CapabilityError, EdgeInferError
from edgeinfer.openai.contract import Event
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields

# A name of the catalog or the hub, and no path.
_NAME = re.compile(r"(?:hf\.co/|huggingface\.co/)?([a-z0-9][\w.-]*(?:/[a-z0-9][\w.-]*)?(?::[\w.-]+)?)", re.I | re.A)


class _Fetch:
    """A model that is being fetched, and converted where it has to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stage, self.done, self.total = "pulling manifest", 0, 0
        self.error: EdgeInferError | None = None
        self.ended = False
        self.changed = asyncio.Event()

    def note(self, stage: str, done: int, total: int) -> None:
        self.stage, self.done, self.total = stage, done, total
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ModelActions:
    """With `fetches` false, clients can have nothing fetched."""

    def __init__(self, service: Service, *, fetches: bool) -> None:
        self._service = service
        self._fetches = fetches
        self._fetching: dict[str, _Fetch] = {}
        self._feed = EventFeed()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        # By path; those of llama-server are also served under /v1.
        self.asked: Mapping[str, Endpoint] = {"/models/sse": self.events}
        self.posted: Mapping[str, Endpoint] = {
            "/models": self.fetch,
            "/models/load": self.load,
            "/models/unload": self.unload,
        }
        self.pulled: Mapping[str, Endpoint] = {"/api/pull": self.pull}

    async def close(self) -> None:
        self._closed = True
        self._feed.close()
        tasks = [*self._tasks, *([] if self._watcher is None else [self._watcher])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, request: Request) -> Response:
        """Begin to load a model, which waits until no request uses another."""
        name = await self._named(request)
        await self._service.find(name)
        self._begin(self._load(name))
        return JSONResponse({"success": True})

    async def _load(self, name: str) -> None:
        with contextlib.suppress(EdgeInferError):  # the event of the state says why
            async with self._service.use(name, _never):
                pass

    async def unload(self, request: Request) -> Response:
        """Free a model's memory once no request uses it; the next one loads it again."""
        service, name = self._service, await self._named(request)
        found, loaded = await service.find(name), await service.loaded()
        if loaded is None or loaded.source != found.source or not service.model().in_memory:
            raise RequestError(f"{found.name} is not loaded.", "GET /models lists what is.", param="model")
        if service.switch is None:
            await service.host.ask(lambda model: model.unload())
        else:
            async with service.use(name, _never):
                service.switch.keep(0)
        return JSONResponse({"success": True})

    async def fetch(self, request: Request) -> Response:
        """Begin to fetch a model; GET /models/sse shows how far it is."""
        self._fetched(await self._named(request))
        return JSONResponse({"success": True})

    async def events(self, _: Request) -> Response:
        """Stream what happens to models."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

        async def write(receive: Receive, send: Send) -> None:
            stream = EventStream(send, self._service.security.comment_seconds)
            await stream.start()

            async def follow() -> None:
                async for event in self._feed.read():
                    await stream.events([event])

            await while_connected(receive, follow(), stream.comment())
            await stream.end()

        return StreamedResponse(write)

    async def pull(self, request: Request) -> Response:
        """Fetch a model, with progress in lines of JSON; leaving ends only the lines."""
        fields = Fields(await read_json(request, self._service.security))
        name, other = fields.text("model"), fields.text("name")
        streams = fields.take("stream", bool, "true or false") is not False
        fields.ignore("insecure", "username", "password")
        fields.end()
        fetching = self._fetched(name or other or "")

        async def write(receive: Receive, send: Send) -> None:
            stream = EventStream(send, self._service.security.comment_seconds, framing=JSON_LINES)

            async def follow() -> None:
                async for line in _lines(fetching):
                    await stream.objects([line])

            await while_connected(receive, follow())
            await stream.end()

        if streams:
            return StreamedResponse(write)

        async def wait() -> None:
            async for _ in _lines(fetching):
                pass

        await while_connected(request.receive, wait())
        if (error := fetching.error) is not None:
            raise RequestError(error.message, error.hint, status=502, code="fetch_failed")
        return JSONResponse({"status": "success"})

    async def _named(self, request: Request) -> str:
        body = await read_json(request, self._service.security)
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise RequestError("model is missing.", "Name one that GET /models lists.", param="model")
        return name

    def _fetched(self, name: str) -> _Fetch:
        """The fetching of a model, which begins unless it is under way."""
        if not self._fetches:
            message, hint = "Clients cannot have models fetched here.", "Fetch it on the machine itself: edgeinfer pull"
            raise CapabilityError(message, f"{hint} NAME, or serve with --downloads on.")
        match = _NAME.fullmatch(name)
        if match is None:
            hint = "Name one of the catalog (edgeinfer models), or ORG/NAME or ORG/NAME:TYPE of the hub."
            raise RequestError(f"model={name[:80]!r} is no name of a model.", hint, param="model")
        name = match[1]
        fetching = self._fetching.get(name)
        if fetching is None:
            fetching = self._fetching[name] = _Fetch(name)
            self._begin(self._run(fetching))
        return fetching

    async def _run(self, fetching: _Fetch) -> None:
        loop, name = asyncio.get_running_loop(), fetching.name

        def progress(stage: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(show, stage, done, total)

        def show(stage: str, done: int, total: int) -> None:
            fetching.note(stage, done, total)
            self._publish(name, "download_progress", {"progress": {stage: {"done": done, "total": total}}})

        try:
            switch = self._service.switch
            memory = None if switch is None else switch.memory
            work = partial(hub.resolve, name, memory=memory, progress=progress, cancelled=lambda: self._closed)
            await asyncio.to_thread(work)
            self._service.local.forget()
            self._publish(name, "download_finished", {})
        except EdgeInferError as error:
            fetching.error = error
            self._publish(name, "download_failed", {"error": str(error)})
        finally:
            del self._fetching[name]
            fetching.ended = True
            fetching.wake()

    async def _watch(self) -> None:
        """Publish the state of loading as it changes."""
        state = self._service.host.state
        while True:
            model = await asyncio.to_thread(self._service.local.of, state.model) if state.status == "ready" else None
            name = model.name if model is not None else state.model or "built-in"
            status = {"ready": "loaded", "empty": "unloaded"}.get(state.status, state.status)
            data: Event = {"status": status}
            if state.status == "loading":
                data["progress"] = {"stage": state.stage, "done": state.done, "total": state.total}
            if state.error is not None:
                data["error"] = str(state.error)
            self._publish(name, "status_change", data)
            state = await self._service.host.changed(state.number)

    def _publish(self, model: str, event: str, data: Event) -> None:
        self._feed.publish("", {"model": model, "event": event, "data": data}, event.partition("_")[0] + model)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _lines(fetching: _Fetch) -> AsyncIterator[Event]:
    """Ollama's lines about a model that is being fetched."""
    yield {"status": "pulling manifest"}
    while not fetching.ended:
        await fetching.changed.wait()
        if fetching.total and not fetching.ended:
            yield {"status": fetching.stage, "digest": "", "total": fetching.total, "completed": fetching.done}
    if fetching.error is None:
        yield {"status": "success"}
    else:
        yield {"error": str(fetching.error)}


async def _never() -> Message:
    """The messages of a client that does not leave."""
    await asyncio.Event().wait()
    raise AssertionError("nothing sets it")
