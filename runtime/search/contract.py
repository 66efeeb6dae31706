"""What ways of searching are made of and what they promise; knows none of them.

A way decodes one reply as `engine.Multistep` says. Between two of its answers the rows of the cache are those of the
reply alone, each computed in a pass of the reply's own text, so that the next turn rests on the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgeinfer.config import GenerationConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, PassCancelledError
from edgeinfer.runtime.sampling import Sampler, TokenChooser
from edgeinfer.runtime.text import StopMatcher, StreamDecoder, TokenizerLike
from edgeinfer.searching import SearchUse

__all__ = ["MOST_ROWS", "Passes", "Reader", "Search", "SearchParts", "Tally"]

# Rows of logits that a pass gives at most, as many as drafts of the usual length take.
MOST_ROWS = 16
_SEEDS = 2**64


class Search(Protocol):
    """One way, decoding one reply; see `engine.Multistep`."""

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """What follows a prompt."""

    def next(self, room: int, lost: int) -> Sequence[int]:
        """What follows that."""

    def leave(self) -> None:
        """The generation ends."""

    def use(self) -> SearchUse:
        """What was done so far."""


@dataclass
class Tally:
    """What searching took."""

    passes: int = 0
    rows: int = 0
    branches: int = 0
    trials: int = 0


@dataclass(frozen=True)
class SearchParts:
    """What a way is made of.

    Attributes:
        chooser: of the reply's tokens.
        stop_ids: that end the reply.
        cancelled: whether the reply was cancelled.
        continues: the reply goes on with the prompt's text, as `generation.TokenStream` has it.
    """

    backend: Backend
    chooser: TokenChooser
    config: GenerationConfig
    stop_ids: frozenset[int]
    tokenizer: TokenizerLike
    cancelled: Callable[[], bool]
    continues: bool

    def another_chooser(self, prompt: Sequence[int], index: int) -> TokenChooser:
        """Chooses for one of several replies, by the seed that follows the reply's own by its index."""
        sampler = Sampler(self.config, self.backend.geometry.vocab_size, (self.chooser.seed + index) % _SEEDS)
        return TokenChooser(sampler, prompt)

    def reader(self, prompt: Sequence[int]) -> Reader:
        """Reads one of several replies."""
        return Reader(self, prompt)


class Reader:
    """Turns the tokens of a reply into its text and tells when it ends by itself.

    Attributes:
        ended: by a stop token or a stop string.
        tokens: so far, a stop token included.
    """

    def __init__(self, parts: SearchParts, prompt: Sequence[int]) -> None:
        self._stop_ids = parts.stop_ids
        self._decoder = StreamDecoder(parts.tokenizer, context_ids=prompt if parts.continues else ())
        self._stops = StopMatcher(parts.config.stop)
        self._text = ""
        self.tokens: list[int] = []
        self.ended = False

    def push(self, token: int) -> None:
        """The reply's next token."""
        self.tokens.append(token)
        if token in self._stop_ids:
            self.ended = True
            return
        text, matched = self._stops.push(self._decoder.push(token))
        self._text += text
        self.ended = matched

    def text(self) -> str:
        """The whole text; nothing is pushed afterwards."""
        text, matched = self._stops.push(self._decoder.flush())
        self._text += text if matched else text + self._stops.flush()
        return self._text


class Passes:
    """Passes over one text at a time, counted.

    Args:
        parts: of the way.
        tally: counts them.
    """

    def __init__(self, parts: SearchParts, tally: Tally) -> None:
        self._backend, self._cancelled, self._tally = parts.backend, parts.cancelled, tally

    def feed(self, token: int) -> Floats:  # (V,)
        """The logits behind one more token; a view that the next pass overwrites."""
        return next(self.chain([token]))

    def chain(self, tokens: Sequence[int]) -> Iterator[Floats]:  # of (V,)
        """The logits behind each of these tokens; views that the next pass overwrites.

        They are fed a few at a time, as they are asked for.
        """
        for begin in range(0, len(tokens), MOST_ROWS):
            self.check()
            part, start = tokens[begin : begin + MOST_ROWS], self._backend.cache.length
            rows = np.arange(len(part))
            output = self._backend.forward(ForwardInput(np.array(part, np.int64), rows + start, rows))
            self._tally.passes += 1
            self._tally.rows += len(part)
            yield from output.logits

    def check(self) -> None:
        """Ends the reply where it was cancelled between two passes.

        Raises:
            PassCancelledError: it was.
        """
        if self._cancelled():
            raise PassCancelledError("The reply was cancelled between two passes.")
