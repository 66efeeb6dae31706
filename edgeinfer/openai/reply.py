"""One reply of a request as it comes in: its text, its calls and its log-probabilities so far; knows no wire format."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.openai.pieces import ArgumentsPiece, CallPiece, Piece, PlainReader, Reader, TextPiece
from edgeinfer.results import Chunk, Result, TokenLogprob

__all__ = ["Call", "Reply"]


@dataclass
class Call:
    """A call of a function, its arguments as far as they are written."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A reply that is being made.

    Attributes:
        reader: takes it apart.
        text: so far, without calls.
        calls: so far.
        logprobs: of all tokens so far.
        untold: of those that nothing was sent with yet.
        result: once finished.
    """

    reader: Reader = field(default_factory=PlainReader)
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    untold: list[TokenLogprob] = field(default_factory=list)
    result: Result | None = None

    def push(self, chunk: Chunk) -> list[Piece]:
        """What became certain with a chunk."""
        self.logprobs += chunk.logprobs
        self.untold += chunk.logprobs
        return self._gathered(self.reader.push(chunk))

    def finish(self, result: Result) -> list[Piece]:
        """What was held back, at the end."""
        self.result = result
        return self._gathered(self.reader.finish())

    def tell(self) -> list[TokenLogprob]:
        """Log-probabilities that go with what is sent now."""
        told, self.untold = self.untold, []
        return told

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended. It has none for cancelled: what was cut short ran out of length."""
        assert self.result is not None, "the reply is not finished"
        if self.result.finish_reason != "stop":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _gathered(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    self.text += text
                case CallPiece(_, id_, name):
                    self.calls.append(Call(id_, name))
                case ArgumentsPiece(place, text):
                    self.calls[place].arguments += text
        return pieces
