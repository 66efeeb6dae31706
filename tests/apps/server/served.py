"""Servers of the built-in model, in a thread of this process or as `edgeinfer serve`."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.embeddings import Embedders
from edgeinfer.apps.server.host import HostReply, ModelHost
from edgeinfer.apps.server.responses import ResponseStore
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.serving import Server
from edgeinfer.apps.server.switching import ModelSwitch
from edgeinfer.core.results import Chunk
from edgeinfer.generation import TokenStream
from edgeinfer.model_thread import Job, ModelThread
from tests.cli import Logged, command, environment
from tests.waiting import TIME_LIMIT, wait_until

MESSAGES = [{"role": "user", "content": "Tell me about a little dog."}]


@dataclass
class Client:
    """A client of a running server."""

    url: str
    http: httpx.Client

    @property
    def api(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"edgeinfer:{name} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a figure of /metrics has a value."""
        wait_until(lambda: self.metric(name) == value, f"{name} {value}")


@dataclass
class Local(Client):
    """A server in a thread of this process."""

    host: ModelHost
    stop: Callable[[], None]


@dataclass
class Served(Client, Logged):
    """A server in a process of its own."""


@contextlib.contextmanager
def served(
    *aliases: str,
    parallel: int = 8,
    queued: int = 64,
    security: Security | None = None,
    models: bool = False,
    contexts: Sequence[Path] = (),
    embedding: Sequence[Path] = (),
    store: ResponseStore | None = None,
    downloads: bool = False,
    **options: Any,
) -> Iterator[Local]:
    """Serve the built-in model on a free port for the block, with options of LoadOptions; `models` lets requests name
    other models of this machine, and they may name the files of `contexts`; responses are kept in `store`, and
    clients may have models fetched where `downloads` says so, and `embedding` are encoders to
    serve next to it."""
    host, ready = ModelHost(parallel=parallel, queue=queued), queue.Queue[str | Exception]()
    urls: list[str] = []
    switch = ModelSwitch(host, None, {"threads": 1} | options, queue=queued) if models else None

    embedders = Embedders([str(path) for path in embedding], {"threads": 1})

    async def load() -> None:
        try:
            embedders.load()
            await host.load(None, {"threads": 1} | options)
            if switch is not None:
                switch.opened = True
        except Exception as error:
            ready.put(error)
            raise
        ready.put(urls[0])

    kept: dict[str, Any] = {"contexts": contexts, "store": store, "downloads": downloads, "embedders": embedders}
    app = make_app(host, security or Security(), aliases=aliases, switch=switch, **kept)
    server = Server(app, "127.0.0.1", 0, ready=urls.append, alongside=load, stopping=host.unload)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        url = ready.get(timeout=TIME_LIMIT)
        if isinstance(url, Exception):
            raise url
        with httpx.Client(timeout=TIME_LIMIT) as http:
            yield Local(url, http, host, server.stop)
    finally:
        server.stop()
        thread.join(timeout=TIME_LIMIT)
        assert not thread.is_alive()


@contextlib.contextmanager
def served_process(*arguments: str, key: str | None = None) -> Iterator[Served]:
    """Run `edgeinfer serve` of the built-in model on a free port; check its exit code unless it was stopped."""
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        words = command("serve", "--port", "0", "--json", "-c", "256", "-t", "1", *arguments)
        given = environment() | ({} if key is None else {"EDGEINFER_API_KEY": key})
        process = stack.enter_context(subprocess.Popen(words, env=given, stdout=subprocess.PIPE, stderr=log))
        stack.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        server = Served(process, log, "", stack.enter_context(httpx.Client(timeout=TIME_LIMIT)))
        assert line, server.logged()
        server.url = json.loads(line)["url"]
        yield server
        if process.poll() is None:
            assert server.stop(signal.SIGTERM) == 0, server.logged()


@contextlib.contextmanager
def held(host: ModelHost) -> Iterator[None]:
    """Hold all replies of a host during the block."""
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        over.wait(timeout=TIME_LIMIT)

    host._worker.do(hold)
    try:
        assert holding.wait(timeout=TIME_LIMIT)
        yield
    finally:
        over.set()


class Turns:
    """The stream of each token, in order."""

    def __init__(self) -> None:
        self.streams: list[TokenStream | None] = []

    def of(self, reply: HostReply) -> list[int]:
        """Positions of a reply's tokens among all."""
        return [place for place, stream in enumerate(self.streams) if stream is reply._job.stream]


@contextlib.contextmanager
def measured_turns() -> Iterator[Turns]:
    """Let the clock of turns advance by 0.01 s per call: a turn is a token or two."""
    turns, tell = Turns(), ModelThread._tell

    def noted(thread: ModelThread, job: Job, chunk: Chunk) -> None:
        turns.streams.append(job.stream)
        tell(thread, job, chunk)

    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelThread, "_tell", noted)
        patch.setattr("edgeinfer.model_thread.time", SimpleNamespace(perf_counter=lambda: next(clock) / 100))
        yield turns


def chat_body(text: str = MESSAGES[0]["content"], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | fields
