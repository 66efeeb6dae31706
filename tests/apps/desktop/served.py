"""The app on a port of this machine, for tests that speak to it as its page does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgeinfer.apps.desktop.app import make_desktop
from edgeinfer.apps.desktop.folders import DataFolder
from edgeinfer.apps.desktop.page import Access
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.desktop.transfer import MOST_BYTES
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.serving import Server
from edgeinfer.generation import TokenStream
from edgeinfer.results import Chunk

__all__ = ["Gate", "Window", "gated", "served"]

PATIENCE_S = 60.0


class Window:
    """What a page does: calls the API with the cookie it was given.

    Attributes:
        http: with the cookie.
        services: of the app.
        key: of the run.
    """

    def __init__(self, http: httpx.Client, services: Services, key: str) -> None:
        self.http = http
        self.services = services
        self.key = key

    def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Calls the API and checks how it answers."""
        options = {} if body is None else {"json": body}
        answer = self.http.request(method, f"/app/api{path}", **options)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def refused(self, method: str, path: str, body: Any = None, *, status: int, code: str) -> str:
        """Calls the API, which must refuse it; what it says."""
        error = self.call(method, path, body, status=status)["error"]
        assert error["code"] == code, error
        assert set(error) <= {"message", "hint", "code", "minimum_bytes"}
        return f"{error['message']} {error['hint']}"

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Events of a stream, kind and data, to its end."""
        with self.http.stream("GET", f"/app/api{path}", timeout=PATIENCE_S) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))

    def wait(self, kind: str, **wanted: Any) -> Any:
        """The first event of a kind whose data has these values."""
        for found, data in self.events("/events"):
            if found == kind and all(data[name] == value for name, value in wanted.items()):
                return data
        raise AssertionError("the events ended")

    def ask(self, id: str, content: str, parent: str | None = None) -> Any:
        """A question and its finished reply."""
        self.call("POST", f"/conversations/{id}/messages", {"parent": parent, "content": content}, status=202)
        return self.end(id)

    def end(self, id: str) -> Any:
        """The reply of a conversation, once it is finished."""
        return list(self.events(f"/conversations/{id}/reply"))[-1][1]


@contextlib.contextmanager
def served(folder: Path, **options: Any) -> Iterator[Window]:
    """The app with its data in a folder; its model is loaded.

    Args:
        options: of Services.make.
    """
    access = Access()
    security = Security(max_body=MOST_BYTES, api_key=access.key)
    services = Services.make(DataFolder(folder), security, ModelHost(parallel=2), **options)
    begun, urls = threading.Event(), list[str]()

    def ready(url: str) -> None:
        urls.append(url)
        begun.set()

    server = Server(make_desktop(services, access), "127.0.0.1", 0, ready=ready, stopping=services.stop)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        with httpx.Client(base_url=urls[0], timeout=PATIENCE_S) as http:
            assert http.get("/", params={"key": access.key}).status_code == 303
            yield Window(http, services, access.key)
    finally:
        server.stop()
        thread.join()


class Gate:
    """Lets replies make so many tokens, and no more until it is opened further."""

    def __init__(self) -> None:
        self._tokens = threading.Semaphore(0)
        self._open = False

    def let(self, tokens: int) -> None:
        """So many more."""
        self._tokens.release(tokens)

    def open(self) -> None:
        """All that are to come."""
        self._open = True
        self._tokens.release(1)

    def pass_one(self, stream: TokenStream) -> None:
        """Waits for room; a reply that is cancelled needs none."""
        while not self._open and not self._tokens.acquire(timeout=0.02):
            if stream._parts.engine.cancelled:
                return


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    """Replies of every model go through the gate."""
    gate, step = Gate(), TokenStream.__next__

    def gated_step(stream: TokenStream) -> Chunk:
        gate.pass_one(stream)
        return step(stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenStream, "__next__", gated_step)
        try:
            yield gate
        finally:
            gate.open()
