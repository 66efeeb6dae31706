"""Requests to a server that decides replies: what is sent again, how much of an answer is read, and what is refused."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpcore

from edgeinfer.core.errors import CapabilityError, RemoteError, shown
from edgeinfer.core.version import VERSION
from edgeinfer.runtime.remote.contract import Decided, RemoteAccess

# Seconds for which an unused connection is kept: no longer than servers keep theirs.
_KEPT_S = 5.0


def connection_pool(trusted: ssl.SSLContext | None) -> httpcore.ConnectionPool:
    """Connections by HTTP/1.1 that send a request when its answer is awaited, with TLS if `trusted`; no proxy sees
    texts."""
    return httpcore.ConnectionPool(ssl_context=trusted, keepalive_expiry=_KEPT_S, network_backend=_JoiningBackend())


class _JoiningBackend(httpcore.SyncBackend):
    """Opens connections that join what is written."""

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        return _JoiningStream(super().connect_tcp(*args, **options))


class _JoiningStream(httpcore.NetworkStream):
    """A connection that keeps what is written until something is read."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream, self._kept = stream, b""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._kept = self._kept + buffer if self._kept else buffer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        kept, self._kept = self._kept, b""
        if kept:
            # Who refuses a request may answer before all of it was sent.
            with contextlib.suppress(httpcore.WriteError):
                self._stream.write(kept, timeout)
        return self._stream.read(max_bytes, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        return _JoiningStream(self._stream.start_tls(*args, **options))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


try:
    import httpcore

    from edgeinfer.runtime.remote.http import connection_pool
except ImportError as error:
    raise CapabilityError(
        "Replies that another machine decides need httpcore.", "Install it: pip install 'edgeinfer[remote]'"
    ) from error


# Seconds until a connection is there, and until more of an answer comes: a long prompt takes its time, in which the
# server sends nothing.
_CONNECT_S, _READ_S = 5.0, 600.0
# Seconds between tries, each longer than the one before, and how many there are.
_FIRST_PAUSE_S, _LONGER, _TRIES = 0.05, 2.0, 7
# What another time may go better: the server is busy, loads its model, or was restarted.
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
# Bytes of an answer, and of one event of a stream. Log-probabilities of a long prompt are the largest.
_LARGEST, _LARGEST_EVENT = 32_000_000, 1_000_000
# Ports that a request does not name, and what stays of a path as it is written.
_PORTS, _WRITTEN = {"http": 80, "https": 443}, "/%:@!$&'()*+,;="
_TLS = "Look at the address, or trust the server's certificate: SSL_CERT_FILE names a file that has it."
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


class UnansweredError(Exception):
    """The server could not answer now, and may another time."""


class RemoteRefusalError(Exception):
    """The server refused a request; `details` is the error object of its answer, or empty."""

    def __init__(self, status: int, details: Mapping[str, Any]) -> None:
        super().__init__(f"status {status}")
        self.status, self.details = status, details


# What a request ends with that tells nothing of the server.
_BROKEN = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)
UNANSWERED = (UnansweredError, RemoteRefusalError, *_BROKEN)


class Connection:
    """JSON to a server and back. It follows no redirections, so that keys and texts go nowhere else."""

    def __init__(self, access: RemoteAccess) -> None:
        base = urlsplit(access.url.rstrip("/"))
        self._scheme, self._port, self._path = base.scheme.encode(), base.port, quote(base.path, safe=_WRITTEN)
        self._host = (base.hostname or "").encode("ascii")
        host = b"[%b]" % self._host if b":" in self._host else self._host
        # What unpacks to more than was counted is not asked for.
        self._headers = [
            (b"Host", host if self._port in (None, _PORTS[base.scheme]) else b"%b:%d" % (host, self._port)),
            (b"User-Agent", f"edgeinfer/{VERSION}".encode()),
            (b"Accept", b"*/*"),
            (b"Accept-Encoding", b"identity"),
        ]
        if base.username:
            named = f"{unquote(base.username)}:{unquote(base.password or '')}"
            self._headers.append((b"Authorization", b"Basic " + b64encode(named.encode())))
        elif access.key is not None:
            self._headers.append((b"Authorization", f"Bearer {access.key}".encode()))
        self._limits = {"timeout": {"connect": _CONNECT_S, "read": _READ_S, "write": _READ_S, "pool": _READ_S}}
        # Certificates of the system, or of SSL_CERT_FILE.
        trusted = ssl.create_default_context() if base.scheme == "https" else None
        self._pool = connection_pool(trusted)

    def get(self, path: str) -> Any:
        with self._answer("GET", path, None) as answer:
            return _accepted(answer)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._answer("POST", path, body) as answer:
            return _accepted(answer)

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events of a stream; raises if it breaks off."""
        with self._answer("POST", path, body) as answer:
            if not _header(answer, b"content-type").startswith(b"text/event-stream"):
                yield _accepted(answer)
                return
            _require_plain(answer)
            for line in _lines(answer):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    event = json.loads(line.removeprefix(b"data:"))
                    if isinstance(event, dict) and event.get("error") is not None:
                        raise UnansweredError(str(_message(event["error"])))
                    yield event

    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> contextlib.AbstractContextManager[httpcore.Response]:
        """Send a request; the response stays open while it is read."""
        url = httpcore.URL(
            scheme=self._scheme, host=self._host, port=self._port, target=(self._path + path).encode("ascii")
        )
        headers = self._headers
        content = None
        if body is not None:
            content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            sizes = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(content))]
            headers = [*headers, *sizes]
        return self._pool.stream(method, url, headers=headers, content=content, extensions=self._limits)

    def close(self) -> None:
        self._pool.close()


class RetriedReply:
    """Implements `contract.RemoteReply` by rounds that are sent again where the way fails."""

    verifies = True

    def __init__(self, access: RemoteAccess, connection: Connection) -> None:
        self._access = access
        self._connection = connection
        self._closed = threading.Event()
        self.digest, self.model, self.retries = "", "", 0

    def verify(self, reply: Sequence[int], draft: Sequence[int], further: int, tell: Callable[[Decided], bool]) -> None:
        reply, tried, pause = list(reply), 1, _FIRST_PAUSE_S
        # A round that waited for a thread is of no use once the reply was left.
        while not self._closed.is_set():
            known = len(reply)
            try:
                for decided in self._round(reply, draft, further):
                    reply += decided.tokens
                    if len(reply) - known > len(draft) + 1 + further:
                        raise self._malformed("more tokens than were asked for")
                    if not tell(decided) or decided.last:
                        return
                raise UnansweredError("the answer was cut off")
            except httpcore.ReadTimeout:
                message = f"{self._access.url} has sent nothing for {_READ_S:g} seconds."
                raise RemoteError(
                    message, "Look whether the server is overloaded, then ask again.", lost=True
                ) from None
            except (UnansweredError, *_BROKEN) as error:
                failure: Exception = error
                if reason := _distrust(error):
                    raise RemoteError(f"The TLS of {self._access.url} cannot be trusted: {reason}.", _TLS) from None
            except RemoteRefusalError as error:
                raise self._refused(error) from None
            except _MALFORMED as error:
                raise self._malformed("what is no answer") from error
            # Nothing is asked again for who has left.
            if not tell(Decided((), last=False)):
                return
            if len(reply) > known:
                draft, further = (), max(0, further - (len(reply) - known))
                tried, pause = 1, _FIRST_PAUSE_S
            if tried == _TRIES or self._closed.wait(pause):
                message = f"{self._access.url} cannot be reached: {shown(str(failure) or type(failure).__name__)}."
                raise RemoteError(message, "Look after the server and the network, then ask again.", lost=True)
            tried, pause = tried + 1, pause * _LONGER
            self.retries += 1

    def _round(self, reply: Sequence[int], draft: Sequence[int], further: int) -> Iterator[Decided]:
        """One round, sent once: what is decided, in order, the last part marked so."""
        raise NotImplementedError

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def _malformed(self, what: str) -> RemoteError:
        hint = "Check which server runs there, and name it with remote_api."
        return RemoteError(f"{self._access.url} answers with {what}.", hint)

    def _refused(self, error: RemoteRefusalError) -> RemoteError:
        """Turn a refusal into the user's error."""
        if error.status in (401, 403):
            return RemoteError("The server asks for another API key.", "Give the key that it was started with.")
        message = str(error.details.get("message") or f"The server refuses with status {error.status}.")
        return RemoteError(shown(message[:500]))


def _distrust(error: BaseException) -> str:
    """Why a connection has no trustworthy TLS; empty where it failed for another reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return (
        ""
        if cause is None
        else str(getattr(cause, "verify_message", "") or cause.reason or "the connection broke").lower()
    )


def tokens_in(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("no token ids")
    return tuple(value)


def _accepted(answer: httpcore.Response) -> Any:
    """Parse an answer; raise if it is a refusal."""
    _require_plain(answer)
    if answer.status == 200:
        return json.loads(_body(answer))
    try:
        details = json.loads(_body(answer))
    except ValueError:
        details = {}
    error = details.get("error", details) if isinstance(details, dict) else {}
    if answer.status in _AGAIN:
        raise UnansweredError(str(_message(error) or f"status {answer.status}"))
    raise RemoteRefusalError(answer.status, error if isinstance(error, dict) else {"message": str(error)})


def _message(error: Any) -> Any:
    return error.get("message") if isinstance(error, dict) else error


def _require_plain(answer: httpcore.Response) -> None:
    if _header(answer, b"content-encoding") not in (b"", b"identity"):
        raise ValueError("packed")


def _header(answer: httpcore.Response, name: bytes) -> bytes:
    """A header of an answer; empty where it has none of the name."""
    return next((value for known, value in answer.headers if known.lower() == name), b"")


def _body(answer: httpcore.Response) -> bytes:
    parts, size = [], 0
    for part in answer.iter_stream():
        parts.append(part)
        size += len(part)
        if size > _LARGEST:
            raise ValueError("too long")
    return b"".join(parts)


def _lines(answer: httpcore.Response) -> Iterator[bytes]:
    """Lines of a stream, as they come."""
    rest = b""
    for part in answer.iter_stream():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
        if len(rest) > _LARGEST_EVENT:
            raise ValueError("too long")
    raise UnansweredError("the answer was cut off")
