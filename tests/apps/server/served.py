"""Runs `edgeinfer serve` in a process of its own, for tests of what its clients meet."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import httpx

from tests.cli import command, environment

__all__ = ["MESSAGES", "Served", "chat_body", "served"]

MESSAGES = [{"role": "user", "content": "Tell me about a little dog."}]


@dataclass
class Served:
    """A server that takes requests."""

    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    client: httpx.Client

    @property
    def api(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """The answer to a JSON request."""
        return self.client.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """The answer to a GET."""
        return self.client.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"edgeinfer:{name} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def logged(self) -> str:
        """What the server has written on stderr."""
        self.log.seek(0)
        return self.log.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the server and gives its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def served(*arguments: str, key: str | None = None) -> Iterator[Served]:
    """A server of the built-in model on a free port, which must end well unless the test has ended it."""
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        words = command("serve", "--port", "0", "--json", *arguments)
        given = environment() | ({} if key is None else {"EDGEINFER_API_KEY": key})
        process = stack.enter_context(subprocess.Popen(words, env=given, stdout=subprocess.PIPE, stderr=log))
        stack.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        server = Served("", process, log, stack.enter_context(httpx.Client(timeout=60)))
        assert line, server.logged()
        server.url = json.loads(line)["url"]
        yield server
        if process.poll() is None:
            assert server.stop() == 0, server.logged()


def chat_body(text: str = MESSAGES[0]["content"], **fields: Any) -> dict[str, Any]:
    """A chat completion's request."""
    return {"messages": [{"role": "user", "content": text}]} | fields
