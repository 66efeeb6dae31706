"""A response from its request to its last event; knows nothing of fields or of what items look like."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from edgeinfer.openai.contract import Event
from edgeinfer.openai.figures import responses_usage, timings
from edgeinfer.openai.pieces import ArgumentsPiece, CallPiece, Piece, TextPiece
from edgeinfer.openai.reply import Reply
from edgeinfer.openai.responses.output import CallItem, Item, MessageItem
from edgeinfer.openai.responses.request import read_request
from edgeinfer.results import Chunk, Result, TokenLogprob

if TYPE_CHECKING:
    from edgeinfer.api import Model
    from edgeinfer.generation import TokenStream

__all__ = ["ResponseCompletion"]


class ResponseCompletion:
    """Implements `contract.Completion` for a response.

    Args:
        body: of the request.
        model: that answers.

    Raises:
        RequestError: a field is unknown, malformed or asks for what cannot be.
    """

    n = 1

    def __init__(self, body: Mapping[str, Any], model: Model) -> None:
        self._request = read_request(body, model)
        self.stream = self._request.stream
        self._reply = Reply()
        self._items: list[Item] = []
        self._written: list[Event] = []  # items that are complete
        self._numbers = count()
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.info.name,
        }

    def check(self, model: Model) -> None:
        """Refuses a form of the reply that cannot be had."""
        self._request.prompt.check(model)

    def prepare(self, model: Model) -> None:
        """Makes tokens of the input."""
        self._request = replace(self._request, prompt=self._request.prompt.prepared(model))

    def start(self, model: Model, index: int) -> TokenStream:
        """Begins the reply."""
        stream, reader = self._request.prompt.start(model, index)
        self._reply = Reply(reader)
        return stream

    def opening(self) -> list[Event]:
        """That there is a response."""
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response("in_progress")} for kind in kinds])

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        """What became certain with a chunk."""
        return self._numbered(self._events(self._reply.push(chunk)))

    def finished(self, index: int, result: Result) -> list[Event]:
        """What was held back, and the end of the last item."""
        events = self._events(self._reply.finish(result))
        left = self._told()
        if not self._items or left:
            events += self._text("", left)
        return self._numbered(events + self._close(self._status))

    def closing(self) -> list[Event]:
        """The whole response once more."""
        return self._numbered([{"type": f"response.{self._status}", "response": self.whole()}])

    def whole(self) -> Event:
        """The answer."""
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    def _events(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    events += self._text(text, self._told())
                case CallPiece(_, id_, name):
                    events += self._open(CallItem(len(self._items), id_, name))
                case ArgumentsPiece(_, text):
                    item = self._items[-1]
                    assert isinstance(item, CallItem), "arguments belong to the call before them"
                    events += item.delta(text)
        return events

    def _text(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        events: list[Event] = []
        if not self._items or not isinstance(self._items[-1], MessageItem):
            if not text and self._items:
                return []  # log-probabilities of a call, which have no place
            events += self._open(MessageItem(len(self._items)))
        item = self._items[-1]
        assert isinstance(item, MessageItem), "a message was just opened"
        return events + (item.delta(text, logprobs) if text or logprobs else [])

    def _told(self) -> list[TokenLogprob]:
        told = self._reply.tell()
        return told if self._request.logprobs else []

    def _open(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        return events + item.opening()

    def _close(self, status: str) -> list[Event]:
        """Ends the item that is being written, if any."""
        if len(self._written) == len(self._items):
            return []
        item = self._items[-1]
        self._written.append(item.whole(status))
        return item.closing(status)

    def _numbered(self, events: list[Event]) -> list[Event]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]

    def _response(self, status: str) -> Event:
        response = {
            **self._head,
            **self._request.told,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._written),
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None,
        }
        result = self._reply.result
        if result is None:
            return response
        return response | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": responses_usage([result]),
            "timings": timings([result]),
        }
