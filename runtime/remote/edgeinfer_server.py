"""Rounds that an edgeinfer server decides, by its /v1/verify."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.errors import CapabilityError, RemoteError
from edgeinfer.runtime.remote.contract import Decided
from edgeinfer.version import VERSION
from edgeinfer.wording import shown

try:
    import httpx
except ImportError as error:
    raise CapabilityError(
        "Replies that another machine decides need httpx.", "Install it: pip install 'edgeinfer[remote]'"
    ) from error

__all__ = ["EdgeInferReply", "EdgeInferServer"]

_PATH = "/v1/verify"
# Seconds until a connection is there, and until more of an answer comes: a long prompt takes its time, in which the
# server sends nothing.
_CONNECT_S, _READ_S = 5.0, 600.0
# Seconds between tries, each longer than the one before, and how many there are.
_FIRST_PAUSE_S, _LONGER, _TRIES = 0.05, 2.0, 7
# What another time may go better: the server is busy, loads its model, or was restarted.
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LOST = "session_lost"
_LONGEST_LINE = 1_000_000


class EdgeInferServer:
    """Implements `contract.RemoteServer` by requests to an edgeinfer server.

    Args:
        url: of the server, with or without /v1.
        key: that it asks for; None where it asks for none.
        digest: of the model that it must have; None is any.
        vocabulary: digest of the tokens that drafts are made of.
    """

    def __init__(self, url: str, key: str | None, digest: str | None, vocabulary: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"User-Agent": f"edgeinfer/{VERSION}"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._digest, self._vocabulary = digest, vocabulary

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> EdgeInferReply:
        """See `contract.RemoteServer.begin`."""
        opening = {"prompt": list(prompt), "vocabulary": self._vocabulary, **options}
        http = httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            trust_env=False,
        )
        return EdgeInferReply(http, opening, self._digest)


class EdgeInferReply:
    """Implements `contract.RemoteReply`.

    Args:
        http: to the server.
        opening: what opens a session, in which the reply so far is wanting.
        digest: of the model that decides; None is whichever decides the first round.
    """

    def __init__(self, http: httpx.Client, opening: Mapping[str, Any], digest: str | None) -> None:
        self._http = http
        self._opening = opening
        self._session: str | None = None
        self._closed = threading.Event()
        self.digest, self.model, self.retries = digest or "", "", 0

    def verify(self, reply: Sequence[int], draft: Sequence[int], further: int, tell: Callable[[Decided], bool]) -> None:
        """See `contract.RemoteReply.verify`."""
        reply = list(reply)
        tried, pause = 1, _FIRST_PAUSE_S
        while True:
            told = len(reply)
            try:
                for decided in self._round(reply, draft, further):
                    reply += decided.tokens
                    if not tell(decided):
                        break
                return
            except httpx.TransportError as error:
                failure: Exception = error
            except _BusyError as error:
                failure = error
            draft = draft if len(reply) == told else ()
            further = max(0, further - (len(reply) - told))
            if tried == _TRIES or self._closed.wait(pause):
                message = f"{self._http.base_url} cannot be reached: {shown(str(failure) or type(failure).__name__)}."
                raise RemoteError(message, "Look after the server and the network, then ask again.", lost=True)
            tried, pause = tried + 1, pause * _LONGER
            self.retries += 1

    def _round(self, reply: Sequence[int], draft: Sequence[int], further: int) -> Iterator[Decided]:
        """One round, by the session if the server knows it, else by a new one."""
        wanted = {"draft": list(draft), "further": further, "stream": further > 0}
        if self._session is not None:
            base = len(self._opening["prompt"]) + len(reply)
            with self._sent({"session": self._session, "base": base, **wanted}) as answer:
                if answer.status_code != 409:
                    yield from self._read(answer)
                    return
                self._require_lost(answer)
            self._session = None
        with self._sent({**self._opening, "reply": list(reply), **wanted}) as answer:
            yield from self._read(answer)

    def _sent(self, body: Mapping[str, Any]) -> Any:
        return self._http.stream("POST", _PATH, json=body)

    def _require_lost(self, answer: httpx.Response) -> None:
        """Raises the error of an answer, unless it says that the session is not known any more."""
        told = _told(answer)
        if told.get("code") != _LOST:
            raise _refused(answer, told)

    def _read(self, answer: httpx.Response) -> Iterator[Decided]:
        """What an answer says."""
        if answer.status_code != 200:
            told = _told(answer)
            if answer.status_code in _AGAIN:
                raise _BusyError(str(told.get("message", f"status {answer.status_code}")))
            raise _refused(answer, told)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            yield self._decided(json.loads(answer.read()))
            return
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]" or len(line) > _LONGEST_LINE:
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _BusyError(str(event["error"].get("message", "")))
            yield self._decided(event)
            if "session" in event:
                return
        raise _BusyError("the answer was cut off")

    def _decided(self, event: Mapping[str, Any]) -> Decided:
        tokens = event.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise RemoteError(f"{self._http.base_url} answers with no tokens.", "Check that it is an edgeinfer server.")
        if "session" not in event:
            return Decided(tuple(tokens), last=False)
        self._session = str(event["session"])
        self._check_model(event)
        ending = event.get("finish_reason")
        return Decided(
            tuple(tokens),
            ending=ending if ending in ("stop", "length") else None,
            server_ms=float(event.get("server_ms", 0.0)),
        )

    def _check_model(self, event: Mapping[str, Any]) -> None:
        """Refuses another model than the one that was wanted, or that decided before."""
        digest = event.get("model_digest")
        if digest is None:
            return
        if self.digest not in ("", digest):
            message = f"The server runs {shown(event.get('model'))} with the digest {shown(digest)}, not {self.digest}."
            raise RemoteError(message, "Let it serve the model that was meant, or ask for the one that it has.")
        self.digest, self.model = str(digest), str(event.get("model", ""))

    def close(self) -> None:
        """See `contract.RemoteReply.close`."""
        self._closed.set()
        self._http.close()


class _BusyError(Exception):
    """The server could not answer now, and may another time."""


def _told(answer: httpx.Response) -> Mapping[str, Any]:
    """The error object of an answer; empty where it has none."""
    try:
        body = json.loads(answer.read())
    except ValueError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _refused(answer: httpx.Response, told: Mapping[str, Any]) -> RemoteError:
    if answer.status_code == 401:
        return RemoteError("The server asks for another API key.", "Give the key that it was started with.")
    if answer.status_code == 404 and told.get("code") != "model_not_found":
        return RemoteError(f"There is no {_PATH} on {answer.url.host}.", "Check that an edgeinfer server runs there.")
    message = str(told.get("message") or f"The server refuses with status {answer.status_code}.")
    return RemoteError(message[:500])
