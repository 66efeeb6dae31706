"""/v1/verify: rounds of replies that other devices draft and this server's model verifies.

The first request of a reply carries its prompt and options; later ones carry the session's name, the number of tokens
they build on, and a draft. The outcome depends on these alone, so a request whose answer was lost can be sent again.
Devices name their sessions, so that a repeated request does not open a second one.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgeinfer import Model, VerificationStream
from edgeinfer.apps.server.completions import CompletionKind, NoFrame
from edgeinfer.core.options import LARGEST_COUNT
from edgeinfer.core.options.load import VERIFIED_OPTIONS
from edgeinfer.core.results import Chunk, Result
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.text import is_id

# Most tokens of a draft: more than any client drafts, and few enough not to delay others.
_MOST_DRAFTED = 64
# Limits of requests that are read on the event loop: fields (rounds have up to seven), and characters of each.
_FEW_FIELDS, _SHORT = 8, 64
# Most sessions, and tokens of all of them: some 40 MB.
_MOST_SESSIONS, _MOST_TOKENS = 256, 1_000_000
# The prior of the acceptance rate, its weight in tokens, and the tokens over which older ones fade.
_PRIOR, _PRIOR_TOKENS, _MEMORY = 0.7, 8.0, 64.0
# Seconds of silence after which a device counts as gone: more than between two rounds over a slow link.
_SILENT_S = 2.0
# Characters of a session's name, enough that it cannot be guessed.
_NAME = (20, 64)
_LOST = "session_lost"
_AGAIN = "Send the prompt and the reply so far again."


@dataclass
class _Session:
    """A reply that a device drafts."""

    model: str  # digest of the verifying model
    prompt: tuple[int, ...]  # token ids
    reply: list[int]  # verified tokens. Prompt and options determine the reply, so overlapping rounds do no harm.
    options: dict[str, Any]
    most: int | None = None  # tokens of the reply; None if the device has not said
    # `right`, `seen`: accepted and compared draft tokens; older ones count less.
    right: float = _PRIOR * _PRIOR_TOKENS
    seen: float = _PRIOR_TOKENS
    heard: float = 0.0  # time of the last request or answer
    over: bool = False  # whether the reply has ended
    checked: bool = False  # whether its options were checked
    # The latest round while it is in use: a stream holds its model.
    made: Callable[[], VerificationStream | None] = lambda: None

    @property
    def acceptance(self) -> float:
        """The expected share of accepted draft tokens."""
        return self.right / self.seen

    def judge(self, compared: int, right: int) -> None:
        """Update the acceptance after a round."""
        left = 1 - compared / _MEMORY
        self.right, self.seen = left * self.right + right, left * self.seen + compared

    def reaches(self, verified: int, tokens: Sequence[int]) -> None:
        """Append tokens verified after the first `verified` of the reply."""
        self.reply += tokens[len(self.reply) - verified :]


def _is_short(value: object) -> bool:
    """Whether a value is scalar and short."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _SHORT)


class VerifySessions:
    """The sessions by name. Beyond `most`, or `tokens` in all, the least recently used are forgotten; devices send them
    again."""

    def __init__(self, most: int = _MOST_SESSIONS, tokens: int = _MOST_TOKENS) -> None:
        self._most, self._tokens = most, tokens
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # Requests are read on several threads.
        self._lock = threading.Lock()

    def open(self, session: _Session, name: str | None = None, former: str | None = None) -> str:
        """Keep a session and return its name, which cannot be guessed."""
        name = name or secrets.token_urlsafe(18)
        with self._lock:
            for known in (former, name):
                if known is not None and (before := self._sessions.pop(known, None)) is not None:
                    session.right, session.seen, session.made = before.right, before.seen, before.made
            self._sessions[name] = session
            while len(self._sessions) > 1 and self._is_full:
                self._sessions.popitem(last=False)
        return name

    def going_on(self) -> int:
        """Count the replies in progress, without devices that went silent."""
        since = time.perf_counter() - _SILENT_S
        with self._lock:
            return sum(not session.over and session.heard > since for session in self._sessions.values())

    def goes_on(self, body: Mapping[str, Any]) -> bool:
        """Whether a request continues a checked reply and is small."""
        name, draft = body.get("session"), body.get("draft") or []
        if len(body) > _FEW_FIELDS or not isinstance(draft, list) or len(draft) > _MOST_DRAFTED:
            return False
        if not all(_is_short(value) for value in (*draft, *(body[field] for field in body if field != "draft"))):
            return False
        with self._lock:
            session = self._sessions.get(name) if isinstance(name, str) else None
        return session is not None and session.checked and body.get("prompt") is None

    @property
    def _is_full(self) -> bool:
        tokens = sum(len(session.prompt) + len(session.reply) for session in self._sessions.values())
        return len(self._sessions) > self._most or tokens > self._tokens

    def find(self, name: str, model: Model) -> _Session:
        with self._lock:
            session = self._sessions.get(name)
            if session is not None and session.model == model.digest:
                self._sessions.move_to_end(name)
                return session
        raise RequestError("This server does not know the session.", _AGAIN, param="session", code=_LOST, status=409)


def verify_kinds(sessions: VerifySessions) -> Mapping[str, CompletionKind]:
    return {"/verify": CompletionKind(partial(VerifyCompletion, sessions), is_brief=sessions.goes_on)}


class VerifyCompletion(NoFrame):
    """Implements `contract.Completion` for one round."""

    n = 1
    ignored = ()

    def __init__(self, sessions: VerifySessions, body: Mapping[str, Any], model: Model) -> None:
        self._came = time.perf_counter()
        fields = Fields(body)
        fields.ignore("model")
        self.stream = fields.flag("stream")
        self._draft = _ids(fields, "draft", _MOST_DRAFTED)
        self._further = fields.whole("further", 0, LARGEST_COUNT) or 0
        self._facts: dict[str, Any] = {}
        self._vocabulary: str | None = None
        name = fields.text("session")
        if name is None or body.get("prompt") is not None:
            self._session = _opened(fields, model)
            if name is not None and not _NAME[0] <= len(name) <= _NAME[1]:
                raise fields.wrong("session", f"{len(name)} characters", f"Draw {_NAME[0]} to {_NAME[1]} at random.")
            former = fields.text("replaces")
            self._vocabulary = fields.text("vocabulary")
            fields.end(strict=True)  # before the session is replaced: the request may be refused
            self._name, self._reply = sessions.open(self._session, name, former), tuple(self._session.reply)
            self._facts = {"model": model.info.name, "model_digest": model.digest, "context": model.context}
        else:
            self._session, self._name = sessions.find(name, model), name
            self._reply = _cut(self._session, fields)
            fields.end(strict=True)
        if (made := self._session.made()) is not None:
            made.give_up()  # the device has left its previous round
        self._sessions, self._session.heard = sessions, self._came
        self._made: VerificationStream | None = None
        self._sent = 0

    def check(self, model: ChatModel[Any]) -> None:
        if not self._session.checked:
            model.check(**self._session.options)
            self._session.checked = True

    def prepare(self, model: ChatModel[Any]) -> None:
        """Compare the vocabularies of both sides; prompts are tokens already."""
        if not self._facts:
            return
        assert isinstance(model, Model), "the server's"
        self._facts["vocabulary"] = model.vocabulary_digest
        if self._vocabulary not in (None, model.vocabulary_digest):
            message = f"The tokens of {model.info.name} are not those that the draft is made of."
            hint = "Draft with a model of the same family, or without one."
            raise RequestError(message, hint, param="vocabulary", code="vocabulary_differs", status=409)

    def start(self, model: Any, index: int, ended: Callable[[], bool] | None = None) -> Any:
        if self._facts and "vocabulary" not in self._facts:
            self.prepare(model)
        session, draft = self._session, self._draft
        wanted = {"further": self._further, "acceptance": session.acceptance}
        self._made = model.verify_draft(session.prompt, self._reply, draft, **wanted, **session.options)
        session.made = weakref.ref(self._made)
        return self._made

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        if not (self.stream and chunk.token_ids):
            return []
        facts = {} if self._sent else self._facts  # in the first event, as the client may not wait for the rest
        # A device that leaves a stream continues after what it has received.
        self._session.reaches(len(self._reply) + self._sent, chunk.token_ids)
        self._sent += len(chunk.token_ids)
        return [{**facts, **self._advice(), "tokens": list(chunk.token_ids)}]

    def finished(self, index: int, result: Result) -> list[Event]:
        made, session = self._made, self._session
        assert made is not None, "the round is over"
        session.reaches(len(self._reply), made.tokens)
        session.judge(made.compared, made.right)
        session.over = made.ending is not None or len(session.reply) >= (session.most or math.inf)
        return [self._answer(made, made.tokens[self._sent :])] if self.stream else []

    def whole(self) -> Event:
        made = self._made
        assert made is not None, "the round is over"
        return self._answer(made, made.tokens)

    def _answer(self, made: VerificationStream, tokens: Sequence[int]) -> Event:
        return {
            **self._facts,
            **self._advice(),
            "session": self._name,
            "base": len(self._session.prompt) + len(self._reply) + len(made.tokens),
            "tokens": list(tokens),
            "verified": made.verified,
            "finish_reason": made.ending,
            "server_ms": (time.perf_counter() - self._came) * 1e3,
        }

    def _advice(self) -> Event:
        """What suits the device best, given the other replies in progress."""
        self._session.heard = time.perf_counter()
        advice = None if self._made is None else self._made.advice(self._sessions.going_on())
        return {} if advice is None else {"stream_ms": advice.stream_ms, "draft_tokens": advice.draft_tokens}


def _opened(fields: Fields, model: Model) -> _Session:
    """Make a session from the prompt and options of a request."""
    prompt = _ids(fields, "prompt", LARGEST_COUNT)
    if not prompt:
        raise fields.missing("prompt", "Send the token ids of the prompt, or the name of a session.")
    reply = _ids(fields, "reply", LARGEST_COUNT)
    if len(prompt) + len(reply) > model.context:
        raise fields.wrong("prompt", f"{len(prompt)} tokens", f"The context holds {model.context}, the reply included.")
    options: dict[str, Any] = {}
    for name in VERIFIED_OPTIONS:
        options |= fields.option(name)
    if (bias := fields.any("logit_bias")) is not None:
        options |= fields.checked("logit_bias", "logit_bias", _bias(bias))
    if options.get("seed") is None:
        # All rounds share the seed.
        options["seed"] = secrets.randbits(63)
    return _Session(model.digest, prompt, list(reply), options, fields.whole("max_tokens", 1, LARGEST_COUNT))


def _cut(session: _Session, fields: Fields) -> tuple[int, ...]:
    """The part of the session's reply that the device has."""
    base = fields.whole("base", len(session.prompt), LARGEST_COUNT)
    if base is None:
        raise fields.missing("base", "Say how many tokens of prompt and reply the draft follows.")
    if base > len(session.prompt) + len(session.reply):
        message = f"The session has fewer than {base} tokens."
        raise RequestError(message, _AGAIN, param="base", code=_LOST, status=409)
    return tuple(session.reply[: base - len(session.prompt)])


def _bias(value: Any) -> Any:
    """Read values by token id, which JSON writes as strings; false forbids a token."""
    if not isinstance(value, dict) or not all(isinstance(token, str) and token.isdecimal() for token in value):
        return value
    return {int(token[:20]): -math.inf if bias is False else bias for token, bias in value.items()}


def _ids(fields: Fields, name: str, most: int) -> tuple[int, ...]:
    ids = fields.items(name)
    if not all(map(is_id, ids)):
        raise fields.wrong(name, "a list with something else", "Send token ids.")
    if len(ids) > most:
        raise fields.wrong(name, f"{len(ids)} tokens", f"The limit is {most}.")
    return tuple(ids)
