"""The app on a port of this machine, for tests that use its API as its page does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgeinfer.apps.desktop.app import Access, make_desktop
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.desktop.settings import DataFolder
from edgeinfer.apps.desktop.transfer import MOST_BYTES
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import ApiKey, Security
from edgeinfer.apps.server.serving import Server
from edgeinfer.core.results import Chunk
from edgeinfer.generation import TokenStream
from tests.waiting import TIME_LIMIT


class Window:
    """A client of the app's API, with the page's cookie."""

    def __init__(self, http: httpx.Client, services: Services, key: str, folder: DataFolder) -> None:
        self.http = http
        self.services = services
        self.key = key
        self.folder = folder

    @property
    def address(self) -> str:
        """The page's address with the key that signs a window in."""
        return f"{self.http.base_url}?key={self.key}"

    @property
    def port(self) -> int:
        assert self.http.base_url.port is not None
        return self.http.base_url.port

    def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Call the API and check the status."""
        options = {} if body is None else {"json": body}
        answer = self.http.request(method, f"/app/api{path}", **options)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def refused(self, method: str, path: str, body: Any = None, *, status: int, code: str) -> str:
        """Call the API, which must refuse; return its message and hint."""
        error = self.call(method, path, body, status=status)["error"]
        assert error["code"] == code, error
        assert set(error) <= {"message", "hint", "code", "minimum_bytes"}
        return f"{error['message']} {error['hint']}"

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the kinds and data of a stream's events."""
        with self.http.stream("GET", f"/app/api{path}", timeout=TIME_LIMIT) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))

    def new(self, **body: Any) -> str:
        """Create a conversation and return its id."""
        id: str = self.call("POST", "/conversations", body, status=201)["id"]
        return id

    def wait(self, kind: str, **wanted: Any) -> Any:
        """Return the first event of a kind whose data has these values."""
        for found, data in self.events("/events"):
            if found == kind and all(data[name] == value for name, value in wanted.items()):
                return data
        raise AssertionError("the events ended")

    def ask(self, id: str, content: str, parent: str | None = None) -> Any:
        """Ask a question and return the finished reply."""
        self.call("POST", f"/conversations/{id}/messages", {"parent": parent, "content": content}, status=202)
        return self.end(id)

    def grown(self, id: str, than: int = 0) -> str:
        """Return the text of a growing reply once it is longer than `than` characters."""
        for kind, data in self.events(f"/conversations/{id}/reply"):
            if len(data["content"]) > than:
                return str(data["content"])
            assert kind == "text", data
        raise AssertionError("the reply did not grow")

    def end(self, id: str) -> Any:
        """Return the reply of a conversation once it is finished."""
        return list(self.events(f"/conversations/{id}/reply"))[-1][1]


@contextlib.contextmanager
def served(folder: Path, *, port: int = 0, **options: Any) -> Iterator[Window]:
    """Run the app with its data in a folder for the block, on a free port if it is 0, with options of Services."""
    access, data = Access(), DataFolder(folder)
    security = Security(max_body=MOST_BYTES, api_keys=(ApiKey(access.key),))
    services = Services(data, security, ModelHost(parallel=2), **options)
    begun, urls = threading.Event(), list[str]()

    def ready(url: str) -> None:
        urls.append(url)
        begun.set()

    server = Server(make_desktop(services, access), "127.0.0.1", port, ready=ready, stopping=services.stop)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert begun.wait(TIME_LIMIT)
        with httpx.Client(base_url=urls[0], timeout=TIME_LIMIT) as http:
            assert http.get("/", params={"key": access.key}).status_code == 303
            yield Window(http, services, access.key, data)
    finally:
        server.stop()
        thread.join(TIME_LIMIT)
    assert not thread.is_alive(), "the app did not end"


class Gate:
    """Lets replies generate a number of tokens, until it is opened."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens = 0
        self._open = False

    def let(self, tokens: int) -> None:
        """Allow further tokens."""
        with self._changed:
            self._tokens += tokens
            self._changed.notify_all()

    def open(self) -> None:
        """Allow all tokens."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def pass_one(self, stream: TokenStream) -> None:
        """Wait for permission, unless the reply is cancelled."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._open or self._tokens or stream._cancelled, TIME_LIMIT)
            assert came, "nobody let the reply go on"
            if not (self._open or stream._cancelled):
                self._tokens -= 1

    def cancelled(self) -> None:
        """Wake waiting replies after one was cancelled."""
        with self._changed:
            self._changed.notify_all()


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    """Send the tokens of all models through a gate."""
    gate, step, cancel = Gate(), TokenStream.__next__, TokenStream.cancel

    def gated_step(stream: TokenStream) -> Chunk:
        gate.pass_one(stream)
        return step(stream)

    def gated_cancel(stream: TokenStream) -> None:
        cancel(stream)
        gate.cancelled()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenStream, "__next__", gated_step)
        patch.setattr(TokenStream, "cancel", gated_cancel)
        try:
            yield gate
        finally:
            gate.open()
