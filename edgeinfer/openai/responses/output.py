"""What a response puts out, item by item: messages and calls of functions, and the events of each; knows no request."""

from __future__ import annotations

import secrets
from typing import Any

from edgeinfer.openai.contract import Event
from edgeinfer.openai.logprobs import entries
from edgeinfer.results import TokenLogprob

__all__ = ["CallItem", "Item", "MessageItem"]


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
        begun = status != "in_progress"
        content = [self._part()] if begun else []
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
