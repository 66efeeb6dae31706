"""`edgeinfer serve`: what it prints when it is ready, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from tests.tables import each_row

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from edgeinfer.apps.cli.main import main
from edgeinfer.apps.server import serving
from tests.apps.server.served import Client, served_process
from tests.cli import TIME_LIMIT, edgeinfer, handling, refuses, start
from tests.speculation import BUILTIN, needs_builtin
from tests.waiting import wait_until

KEY = "a-key-of-some-length"
# A model that is there at once.
SMALL = ["-c", "256", "-t", "1", "--speculation", "off"]


class Lines:
    """A fake stream that queues what is written."""

    def __init__(self) -> None:
        self.said: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> None:
        self.said.put(text)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def serve(*arguments: str | Path) -> Iterator[tuple[str, Client]]:
    """Run the command in a thread; give the line it prints when it is ready, and a client."""
    out, servers, codes = Lines(), list[serving.Server](), list[int]()

    class Noted(serving.Server):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            servers.append(self)

    def run() -> None:
        codes.append(main(["serve", "--port", "0", *SMALL, *map(str, arguments)]))
        out.write("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "Server", Noted)
        patch.setattr("edgeinfer.apps.cli.serve.sys", SimpleNamespace(stdout=out, stderr=Lines()))
        thread = threading.Thread(target=run)
        thread.start()
        try:
            line = out.said.get(timeout=TIME_LIMIT)
            assert line, "it did not come to serve"
            with httpx.Client(timeout=TIME_LIMIT) as http:
                yield line, Client(servers[0].url, http)
        finally:
            for server in servers:
                server.stop()
            thread.join(timeout=TIME_LIMIT)
    assert codes == [0]
    assert out.said.get(timeout=TIME_LIMIT) == ""


@needs_builtin
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_one_line_when_it_is_ready_and_a_clean_end(number: int) -> None:
    with start("serve", "--port", "0", *SMALL) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        url = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        assert line.startswith("tales is served at ")
        assert httpx.get(f"{url}/health", timeout=TIME_LIMIT).json() == {"status": "ok"}
        process.send_signal(number)
        rest, _ = process.communicate(timeout=TIME_LIMIT)
        assert (process.returncode, rest) == (0, b"")


@needs_builtin
def test_one_line_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "tom.txt").write_text("Tom had a red ball.")
    with serve("--context-file", tmp_path / "tom.txt") as (line, client):
        assert line.startswith(f"tales is served at {client.url} (context 256, ") and line.endswith(" planned)\n")
        assert client.get("/health").json() == {"status": "ok"}
        assert [each["id"] for each in client.get("/v1/contexts").json()["data"]] == ["tom.txt"]


@needs_builtin
def test_json_says_the_same() -> None:
    with serve("--json") as (line, client):
        data = json.loads(line)
    assert set(data) == {"url", "model", "context", "planned_bytes", "pid"}
    assert (data["url"], data["model"], data["context"]) == (client.url, "tales", 256)
    assert data["pid"] == os.getpid() and data["planned_bytes"] > 0


def test_a_port_that_is_in_use() -> None:
    # Another server's is bound before it listens.
    for take in (socket.create_server, lambda place: serving._bind(*place)):
        with take(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refuses(2, f"Port {port} of 127.0.0.1 is in use.", edgeinfer("serve", "--port", str(port)))


@each_row(
    ("arguments", "code", "says"),
    [
        (["--port", "65536"], 2, "--port 65536 is out of range"),
        (["--port", "-1"], 2, "--port -1 is out of range"),
        (["--port", "web"], 2, "--port"),
        (["--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["--host", "http://localhost"], 2, "http://localhost"),
        (["--host", "0.0.0.0"], 2, "no API key"),
        (["--parallel", "0"], 2, "--parallel 0"),
        (["--queue", "0"], 2, "--queue 0"),
        (["--allow-origin", "*"], 2, "API key"),
        (["--allow-origin", "example.com"], 2, "not an origin"),
        (["--allow-host", "http://x"], 2, "not a host name"),
        (["--api-key-file", "missing"], 2, "missing"),
        (["--max-body", "none"], 2, "none"),
        (["--sse-ping-interval", "0"], 2, "--sse-ping-interval 0.0 is out of range"),
        (["-c", "1"], 2, "--context 1"),
        (["--unknown"], 2, "--unknown"),
        (["-m", "missing/bundle/of/mine"], 3, "missing/bundle/of/mine"),
    ],
)
def test_what_is_refused(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGEINFER_API_KEY", raising=False)
    assert main(["serve", "--port", "0", *arguments]) == code
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert says in line


@needs_builtin
def test_a_key_from_a_file_lets_others_in(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with serve("--host", "0.0.0.0", "--api-key-file", file) as (_, server):
        assert server.url.startswith("http://127.0.0.1:")
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert server.get("/health", headers={"Host": "192.168.7.7"}).status_code == 200
        assert server.get("/health", headers={"Host": "evil.com"}).status_code == 403


@needs_builtin
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_model_is_away(number: int) -> None:
    with handling(signal.SIGHUP), served_process("--idle-unload", "0.5") as server:

        def sleeps() -> bool:
            return bool(server.get("/props").json()["is_sleeping"])

        wait_until(sleeps, "the model's leave")
        assert server.get("/health").json() == {"status": "ok"}
        answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        wait_until(sleeps, "the model's leave")
        assert server.stop(number) == 0, server.logged()


@needs_builtin
@pytest.mark.slow
def test_a_server_of_nohup_stays_when_its_terminal_goes() -> None:
    with handling(signal.SIGHUP, signal.SIG_IGN), served_process() as server:
        server.process.send_signal(signal.SIGHUP)
        answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200


@needs_builtin
@pytest.mark.slow
def test_a_signal_while_the_model_loads() -> None:
    process = start("serve", "--port", "0", "--debug")
    with process:
        wait_until(lambda: listening(process.pid), "the port")
        (port,) = listening(process.pid)
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=TIME_LIMIT).status_code in (200, 503)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, errors


def listening(pid: int) -> list[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return [int(each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN]


@needs_builtin
def test_nothing_that_was_said_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edgeinfer.server")  # and back to what it was, after the command's own
    secret = "a very secret prompt"
    with serve("--verbose") as (_, server):
        caplog.handler.setLevel(logging.DEBUG)
        body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
        assert server.post("/v1/chat/completions?secret=query", body).status_code == 200
        assert server.post("/v1/chat/completions", body | {"temperature": secret}).status_code == 400
        assert server.get("/v1/models?secret=query").status_code == 200
    log = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("edgeinfer"))
    assert "POST '/v1/chat/completions' 200" in log
    assert "secret" not in log


@needs_builtin
@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_ports_of_the_system() -> None:
    if os.geteuid() == 0:
        pytest.skip("root may use all ports")
    refuses(2, "not yours", edgeinfer("serve", "--port", "80"))


@needs_builtin
def test_a_model_answers_to_what_it_was_asked_for_as() -> None:
    with serve("-m", BUILTIN) as (_, server):
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body | {"model": str(BUILTIN)}).status_code == 200
        assert server.post("/v1/chat/completions", body | {"model": "tales"}).status_code == 200
        # Its place on this machine is private.
        assert str(BUILTIN) not in server.get("/v1/models").text + server.get("/props").text
