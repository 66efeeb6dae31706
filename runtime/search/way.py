"""What the ways share: going on plainly, taking a continuation that was found elsewhere, leaving the cache in order.

Knows none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.search.contract import Passes, Reader, SearchParts, Tally
from edgeinfer.searching import SearchedText, SearchUse

__all__ = ["Way"]


class Way(ABC):
    """Implements `contract.Search` but for what is chosen.

    Attributes:
        lossless: as `SearchUse` has it.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, parts: SearchParts) -> None:
        self._parts, self._backend, self._config = parts, parts.backend, parts.config
        self._tally = Tally()
        self._passes = Passes(parts, self._tally)
        self._root = 0  # the reply's last token, which the cache does not hold
        self._settled: int | None = None  # rows of the cache that are the reply's, while others are behind them
        self._chosen = 0
        self._texts: tuple[SearchedText, ...] = ()

    @abstractmethod
    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """See `engine.Multistep`."""

    @abstractmethod
    def next(self, room: int, lost: int) -> Sequence[int]:
        """See `engine.Multistep`."""

    def leave(self) -> None:
        """Drops the rows of what was looked at."""
        if self._settled is not None:
            self._backend.cache.trim(min(self._settled, self._backend.cache.length))
            self._settled = None

    def use(self) -> SearchUse:
        """What was done so far."""
        tally = self._tally
        return SearchUse(
            search=self._config.search,
            lossless=self.lossless,
            passes=tally.passes,
            rows=tally.rows,
            branches=tally.branches,
            trials=tally.trials,
            chosen=self._chosen,
            texts=self._texts,
        )

    def _accept(self, token: int, logits: Floats) -> tuple[int]:  # (V,)
        """The token joins the reply."""
        self._parts.chooser.accept(token, logits)
        self._root = token
        return (token,)

    def _plain(self, lost: int = 0) -> tuple[int]:
        """One token as plain decoding makes it."""
        logits = self._passes.feed(self._root)
        return self._accept(self._parts.chooser.token(logits, self._backend.cache.length + lost), logits)

    def _take(self, tokens: Sequence[int], logits: Floats) -> Sequence[int]:  # (V,)
        """The tokens join the reply, and all but the last the cache, by passes of the reply's own text.

        Args:
            logits: of the first one's place; a copy.
        """
        for token in tokens[:1]:
            self._accept(token, logits)
        for token, row in zip(tokens[1:], self._passes.chain(tokens[:-1]), strict=True):
            self._accept(token, row)
        return tokens

    def _share(self, count: int, room: int) -> int:
        """Tokens that each of `count` replies side by side may have.

        Raises:
            UsageError: so many were asked for that they do not fit.
        """
        free = (self._backend.cache.capacity - self._backend.cache.length) // count
        if self._config.max_tokens is not None and free < room:
            message = f"{count} replies of {room} tokens do not fit the context, which has room for {free} of each."
            raise UsageError(message, "Ask for fewer or shorter ones, or load the model with a larger context (-c).")
        if free == 0:
            message = f"The context has no room for {count} replies side by side."
            raise UsageError(message, "Shorten the prompt, or load the model with a larger context (-c).")
        return min(free, room)

    @staticmethod
    def _told(reader: Reader, score: float) -> SearchedText:
        """A reply that was looked at to the end.

        Args:
            score: the sum of its tokens' log-probabilities.
        """
        reason = "stop" if reader.ended else "length"
        return SearchedText(reader.text(), tuple(reader.tokens), score / len(reader.tokens), reason)
