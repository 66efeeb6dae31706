"""What a reply is made of for a client: text, and calls of functions; knows nothing of how models write those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgeinfer.results import Chunk

__all__ = ["ArgumentsPiece", "CallPiece", "Piece", "PlainReader", "Reader", "TextPiece"]


@dataclass(frozen=True)
class TextPiece:
    """Some text."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A call begins.

    Attributes:
        place: in the reply, from 0.
        id: that the answer to it names.
        name: of the function.
    """

    place: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Some of a call's arguments, which together are a JSON object."""

    place: int
    text: str


Piece = TextPiece | CallPiece | ArgumentsPiece


class Reader(Protocol):
    """Takes the chunks of one reply apart."""

    def push(self, chunk: Chunk) -> list[Piece]:
        """What became certain with a chunk."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the reply."""


class PlainReader:
    """Of replies that are text."""

    def push(self, chunk: Chunk) -> list[Piece]:
        """The chunk's text."""
        return [TextPiece(chunk.text)] if chunk.text else []

    def finish(self) -> list[Piece]:
        """Nothing."""
        return []
