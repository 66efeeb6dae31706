"""How tokens follow a prompt: the base of all decoding strategies, which itself decodes plainly, a row per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.adaptive import ComputeUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.searching import SearchUse

__all__ = ["DecodingStrategy"]

_ONE_ROW = np.zeros(1, np.int64)


class DecodingStrategy:
    """Decodes one reply: `first` follows the prompt, then `next` until the reply ends; this one is plain decoding.

    The rows of the backend's cache must be those that the whole model gives to the text's tokens. A strategy that
    leaves some out, or feeds them later, cuts the cache to those that are by the time its generation ends.

    Args:
        backend: the target.
        sampler: of the reply's tokens.

    Attributes:
        searches: the cache holds more than the reply while it is decoded, so that the reply cannot be paused.
    """

    searches = False

    def __init__(self, backend: Backend, sampler: Sampler) -> None:
        self._backend = backend
        self._sampler = sampler
        self._root = 0  # the reply's last token, which the cache does not hold yet
        self._plain_hidden: Floats | None = None  # of the last plain step; a view until the next pass
        self._tokens_fed, self._position = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """Starts after a prompt, all of which was fed: one to `room` tokens that follow it, accepted by the sampler.

        Called again where the reply was paused, with what it has by then as the prompt.

        Args:
            logits: after the prompt's last token; a view that the next pass overwrites.
        """
        return self._accept(self._sampler.sample(logits, len(prompt)), logits)

    def next(self, room: int, lost: int) -> Sequence[int]:
        """Makes one to `room` further tokens, accepted by the sampler; at least the last of them is not fed yet.

        Args:
            lost: tokens of the text less rows that the cache needs to hold it, the last token included.
        """
        return self._plain_step(lost)

    def leave(self) -> None:
        """Drops what was fed for the generation alone, which pauses or ends."""

    def finish(self) -> None:
        """Ends the reply: statistics are complete afterwards, and nothing of the request is referred to."""

    def compute_use(self) -> ComputeUse | None:
        """Tells what computing less did so far; None where everything is computed."""
        return None

    def search_use(self) -> SearchUse | None:
        """Tells what searching did so far; None where nothing is searched."""
        return None

    def _plain_step(self, lost: int = 0) -> tuple[int]:
        """Makes one token as plain decoding does: forward one row, sample, accept."""
        logits = self._forward(self._root)
        return self._accept(self._sampler.sample(logits, self._backend.cache.length + lost), logits)

    def _forward(self, token: int) -> Floats:  # (V,)
        """Feeds one more token of the text and gives its logits; a view that the next pass overwrites."""
        self._tokens_fed[0], self._position[0] = token, self._backend.cache.length
        output = self._backend.forward(ForwardInput(self._tokens_fed, self._position, _ONE_ROW))
        self._plain_hidden = output.hidden
        logits: Floats = output.logits[0]
        return logits

    def _accept(self, token: int, logits: Floats) -> tuple[int]:  # (V,)
        """Adds a token to the reply."""
        self._sampler.accept(token, logits)
        self._root = token
        return (token,)
