"""`edgeinfer serve` as a user meets it: what it says when it is ready, how it ends, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from edgeinfer.cli.main import main
from tests.apps.server.served import Served, served
from tests.cli import edgeinfer, refuses, start
from tests.speculation import BUILTIN, needs_builtin

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

KEY = "a-key-of-some-length"


@needs_builtin
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_line_when_it_is_ready_and_a_clean_end(number: int) -> None:
    process = start("serve", "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    url = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
    assert line.startswith("tales is served at ")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest == b""


@needs_builtin
def test_json_says_the_same() -> None:
    process = start("serve", "--port", "0", "--json", "-c", "256")
    assert process.stdout is not None
    data = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert set(data) == {"url", "model", "context", "planned_bytes", "pid"}
    assert (data["model"], data["context"], data["pid"]) == ("tales", 256, process.pid)


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refuses(2, f"Port {port} of 127.0.0.1 is in use.", edgeinfer("serve", "--port", str(port)))


@needs_builtin
def test_two_servers_on_one_port(server: Served) -> None:
    refuses(2, "is in use.", edgeinfer("serve", "--port", server.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--port", "65536"], 2, "port=65536"),
        (["--port", "-1"], 2, "port=-1"),
        (["--port", "web"], 2, "--port"),
        (["--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["--host", "http://localhost"], 2, "http://localhost"),
        (["--host", "0.0.0.0"], 2, "no API key"),
        (["--parallel", "0"], 2, "parallel"),
        (["--queue", "0"], 2, "queue"),
        (["--allow-origin", "*"], 2, "API key"),
        (["--allow-origin", "example.com"], 2, "no origin"),
        (["--allow-host", "http://x"], 2, "no host name"),
        (["--api-key-file", "missing"], 2, "missing"),
        (["--max-body", "none"], 2, "none"),
        (["--sse-ping-interval", "0"], 2, "comment_seconds"),
        (["-c", "1"], 2, "context=1"),
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
def test_a_budget_that_is_too_small() -> None:
    refuses(4, "20.0 MB", edgeinfer("serve", "--port", "0", "--memory", "20MB"))


@pytest.mark.parametrize("text", ["", "\n", "short", "two words here"])
def test_keys_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    refuses(2, "key", edgeinfer("serve", "--port", "0", "--api-key-file", file))


@needs_builtin
def test_a_key_from_a_file_lets_others_in(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with served("--host", "0.0.0.0", "--api-key-file", str(file)) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert server.get("/health", headers={"Host": "192.168.7.7"}).status_code == 200
        assert server.get("/health", headers={"Host": "evil.com"}).status_code == 403


@needs_builtin
def test_a_signal_while_the_model_loads() -> None:
    process = start("serve", "--port", "0", "--debug")
    assert process.stderr is not None
    port = _wait_for_port(process.pid)
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code in (200, 503)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def _wait_for_port(pid: int) -> int:
    """The port that a process listens on."""
    import psutil

    while True:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)


@needs_builtin
def test_nothing_that_was_said_is_logged() -> None:
    secret = "a very secret prompt"
    with served("--verbose") as server:
        body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
        assert server.post("/v1/chat/completions?secret=query", body).status_code == 200
        assert server.post("/v1/chat/completions", body | {"temperature": secret}).status_code == 400
        assert server.get("/v1/models?secret=query").status_code == 200
        log = server.logged()
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
    with served("-m", str(BUILTIN)) as server:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body | {"model": str(BUILTIN)}).status_code == 200
        assert server.post("/v1/chat/completions", body | {"model": "tales"}).status_code == 200
        # Where it lies on this machine is nobody's to read.
        assert str(BUILTIN) not in server.get("/v1/models").text + server.get("/props").text
