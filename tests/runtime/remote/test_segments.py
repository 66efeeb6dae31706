"""A request to a server that decides leaves as a whole, whatever the server does with it."""

from __future__ import annotations

from typing import Any

import httpcore
import pytest

from edgeinfer.core.errors import RemoteError
from edgeinfer.runtime.remote.contract import RemoteAccess
from edgeinfer.runtime.remote.http import Connection, RemoteRefusalError, RetriedReply
from tests.tables import each_row

_ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"says":1}'
_REFUSAL = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


class _Wire(httpcore.NetworkStream):
    """A connection to nowhere."""

    def __init__(self, answers: list[bytes], *, broken: bool = False) -> None:
        self.written: list[bytes] = []
        self._answers, self._broken = answers, broken

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.written.append(buffer)
        if self._broken:
            raise httpcore.WriteError("reset")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._answers.pop(0) if self._answers else b""

    def close(self) -> None:
        pass

    def get_extra_info(self, info: str) -> Any:
        return False if info == "is_readable" else None


def _connection(monkeypatch: pytest.MonkeyPatch, wire: _Wire, url: str = "http://nas:80/base/") -> Connection:
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", lambda *_, **__: wire)
    tokenizer: Any = None
    return Connection(RemoteAccess(url, "secret", None, None, tokenizer))


def test_head_and_body_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = _Wire([_ANSWER, _ANSWER, _ANSWER])
    connection = _connection(monkeypatch, wire)
    assert [connection.post("/ask", {"a": [1, 2]}) for _ in range(2)] == [{"says": 1}] * 2
    assert connection.get("/list") == {"says": 1}
    assert len(wire.written) == 3
    head, body = wire.written[0].split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/ask HTTP/1.1" and body == b'{"a":[1,2]}'
    assert {b"Host: nas", b"Authorization: Bearer secret", b"Content-Length: 11"} <= set(lines)
    assert wire.written[2].startswith(b"GET /base/list ") and wire.written[2].endswith(b"\r\n\r\n")


def test_a_refusal_is_read_though_not_all_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = _connection(monkeypatch, _Wire([_REFUSAL], broken=True))
    with pytest.raises(RemoteRefusalError) as refused:
        connection.post("/ask", {"a": 1})
    assert refused.value.status == 413


@each_row(
    ("url", "head"),
    [
        ("http://[::1]:8080", b"GET /list HTTP/1.1\r\nHost: [::1]:8080\r\n"),
        ("HTTP://NAS:80/a b%20c/", b"GET /a%20b%20c/list HTTP/1.1\r\nHost: nas\r\n"),
        ("http://nas/stra\u00dfe", b"GET /stra%C3%9Fe/list HTTP/1.1\r\nHost: nas\r\n"),
        # A name within an address is sent in place of the key, an empty one is not.
        ("http://tom:p%40ss@nas", b"\r\nAuthorization: Basic dG9tOnBAc3M=\r\n"),
        ("http://@nas", b"\r\nAuthorization: Bearer secret\r\n"),
    ],
)
def test_addresses_are_sent_as_the_protocol_has_them(monkeypatch: pytest.MonkeyPatch, url: str, head: bytes) -> None:
    wire = _Wire([_ANSWER])
    _connection(monkeypatch, wire, url).get("/list")
    assert head in wire.written[0]
    assert wire.written[0].count(b"Authorization") == 1


def test_a_broken_connection_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.remote.http._TRIES", 1)

    class Reply(RetriedReply):
        def _round(self, *_: Any) -> Any:
            self._connection.post("/ask", {})

    connection = _connection(monkeypatch, _Wire([]))
    reply = Reply(RemoteAccess("http://nas", None, None, None, None), connection)  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="cannot be reached") as lost:
        reply.verify((), (), 0, lambda _: True)
    assert lost.value.lost
