"""/v1/responses: a response from its request to its last event, and the items it puts out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.figures import entries, responses_usage, timings
from edgeinfer.openai.prompt import OneReply
from edgeinfer.openai.replies import ArgumentsPiece, CallPiece, Piece, TextPiece
from edgeinfer.openai.reply_fields import warnings
from edgeinfer.openai.response_request import read_request
from edgeinfer.results import Chunk, Result, TokenLogprob


class Item:
    """An item that is being written.

    Args:
        place: among the response's items.
        prefix: of its id.
    """

    def __init__(self, place: int, prefix: str) -> None:
        self.id = f"{prefix}_{secrets.token_hex(24)}"
        self._at = {"output_index": place}
        self._place = {"item_id": self.id, **self._at}

    def opening(self) -> list[Event]:
        """Its first events."""
        return [{"type": "response.output_item.added", **self._at, "item": self.whole("in_progress")}]

    def closing(self, status: str) -> list[Event]:
        """Its last events."""
        return [{"type": "response.output_item.done", **self._at, "item": self.whole(status)}]

    def whole(self, status: str) -> Event:
        """The item."""
        raise NotImplementedError


class MessageItem(Item):
    """A text."""

    def __init__(self, place: int) -> None:
        super().__init__(place, "msg")
        self._content = {**self._place, "content_index": 0}
        self._text = ""
        self._logprobs: list[TokenLogprob] = []

    def opening(self) -> list[Event]:
        """Its first events."""
        added = {"type": "response.content_part.added", **self._content, "part": self._part()}
        return [*super().opening(), added]

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        """More of the text."""
        self._text += text
        self._logprobs += logprobs
        told = entries(logprobs)
        return [{"type": "response.output_text.delta", **self._content, "delta": text, "logprobs": told}]

    def closing(self, status: str) -> list[Event]:
        """Its last events."""
        told = entries(self._logprobs)
        done = {"type": "response.output_text.done", **self._content, "text": self._text, "logprobs": told}
        part = {"type": "response.content_part.done", **self._content, "part": self._part()}
        return [done, part, *super().closing(status)]

    def whole(self, status: str) -> Event:
        """The item; without its text as long as there is none."""
        started = status != "in_progress"
        content = [self._part()] if started else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": entries(self._logprobs)}


class CallItem(Item):
    """A call of a function."""

    def __init__(self, place: int, call_id: str, name: str) -> None:
        super().__init__(place, "fc")
        self._call = {"call_id": call_id, "name": name}
        self._arguments = ""

    def delta(self, text: str) -> list[Event]:
        """More of the arguments."""
        self._arguments += text
        return [{"type": "response.function_call_arguments.delta", **self._place, "delta": text}]

    def closing(self, status: str) -> list[Event]:
        """Its last events."""
        told = {"name": self._call["name"], "arguments": self._arguments}
        done = {"type": "response.function_call_arguments.done", **self._place, **told}
        return [done, *super().closing(status)]

    def whole(self, status: str) -> Event:
        """The item."""
        call = {**self._call, "arguments": self._arguments}
        return {"id": self.id, "type": "function_call", "status": status, **call}


class ResponseCompletion(OneReply):
    """Implements `contract.Completion` for a response.

    Args:
        body: of the request.
        model: that answers.

    Raises:
        RequestError: a field is unknown, malformed or asks for what cannot be.
    """

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        self._request = read_request(body, model)
        super().__init__(self._request.prompt, stream=self._request.stream, ignored=self._request.ignored)
        self._items: list[Item] = []
        self._written: list[Event] = []  # items that are complete
        self._numbers = count()
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.info.name,
        }

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
        response |= warnings(self.ignored)
        return response | {
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": responses_usage([result]),
            "timings": timings([result]),
        }
