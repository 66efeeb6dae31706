"""Rounds that an edgeinfer server decides, by its /v1/verify: exact for greedy and seeded text, with all options."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.core.errors import RemoteError, shown
from edgeinfer.runtime.decoding.shares import DraftAdvice
from edgeinfer.runtime.remote.contract import Decided, RemoteAccess
from edgeinfer.runtime.remote.http import Connection, RemoteRefusalError, RetriedReply, UnansweredError, tokens_in
from edgeinfer.runtime.text.contract import vocabulary_digest

_PATH = "/v1/verify"
_LOST = "session_lost"
# A day: no round takes as many milliseconds.
_LONGEST = 86_400_000


class EdgeInferServer:
    """Implements `contract.RemoteServer` by requests to an edgeinfer server."""

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self.url = access.url
        self._vocabulary = vocabulary_digest(access.tokenizer)
        self._latest: EdgeInferReply | None = None

    def check(self, options: Mapping[str, Any]) -> None:
        """Check nothing: the server itself refuses what it cannot do."""

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> EdgeInferReply:
        named = {} if self._access.model is None else {"model": self._access.model}
        opening = {"prompt": list(prompt), "vocabulary": self._vocabulary, **named, **options}
        if self._latest is not None and self._latest.is_over:
            opening["replaces"] = self._latest.session
        self._latest = EdgeInferReply(self._access, opening)
        return self._latest


class EdgeInferReply(RetriedReply):
    """Implements `contract.RemoteReply` by sessions; `opening` opens one, without its name and the reply so far."""

    def __init__(self, access: RemoteAccess, opening: Mapping[str, Any]) -> None:
        super().__init__(access, Connection(access))
        self._opening = opening
        self.session = secrets.token_urlsafe(18)
        self._reached = -1  # tokens of the reply that the session has; -1 is none, nor a session
        self.digest = access.digest or ""

    @property
    def is_over(self) -> bool:
        return self._closed.is_set()

    def _round(self, reply: Sequence[int], draft: Sequence[int], further: int) -> Iterator[Decided]:
        """One round, by the session if the server knows it, else by a new one."""
        wanted = {"session": self.session, "draft": list(draft), "further": further, "stream": further > 0}
        # It does not know what was written elsewhere.
        if len(reply) <= self._reached:
            base = len(self._opening["prompt"]) + len(reply)
            try:
                yield from self._sent({"base": base, **wanted}, len(reply))
                return
            except RemoteRefusalError as error:
                if error.status != 409 or error.details.get("code") != _LOST:
                    raise
        yield from self._sent({**self._opening, "reply": list(reply), **wanted}, len(reply))

    def _sent(self, body: Mapping[str, Any], known: int) -> Iterator[Decided]:
        reached = known
        events = self._connection.events(_PATH, body) if body["stream"] else [self._connection.post(_PATH, body)]
        for event in events:
            decided = self._decided(event)
            reached += len(decided.tokens)
            if decided.last and decided.ending is None and reached == known:
                raise UnansweredError("the round was given up")
            # A stream that was left may still end on its thread.
            self._reached = max(self._reached, reached)
            yield decided

    def _decided(self, event: Mapping[str, Any]) -> Decided:
        tokens, advice, server_ms = tokens_in(event["tokens"]), _advice(event), _number(event.get("server_ms"))
        self._check_model(event)
        if "base" not in event:
            return Decided(tokens, last=False, advice=advice)
        ending = event.get("finish_reason")
        return Decided(
            tokens,
            ending=ending if ending in ("stop", "length") else None,
            server_ms=server_ms or 0.0,
            verified=None if (verified := _number(event.get("verified"))) is None else int(verified),
            advice=advice,
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

    def _refused(self, error: RemoteRefusalError) -> RemoteError:
        if error.status == 404 and error.details.get("code") != "model_not_found":
            message = f"There is no {_PATH} on {self._access.url}."
            return RemoteError(message, "Check that an edgeinfer server runs there.")
        return super()._refused(error)


def _advice(event: Mapping[str, Any]) -> DraftAdvice | None:
    """Advice about replies that share passes; None if there are none."""
    stream_ms, drafted = _number(event.get("stream_ms")), _number(event.get("draft_tokens"))
    return None if stream_ms is None or drafted is None else DraftAdvice(stream_ms, int(drafted))


def _number(value: Any) -> float | None:
    """A count or milliseconds of an answer; None if absent."""
    if value is not None and not (isinstance(value, int | float) and 0 <= value < _LONGEST):
        raise ValueError("no number")
    return value
