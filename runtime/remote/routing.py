"""Decoding of one reply that two models write: this one where it is sure, the server's where it is not.

The text is neither model's own, and results say so. Who writes is chosen as for `compute="entropy"` on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.adaptive import ComputeUse
from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.divergence import entropy_bits
from edgeinfer.runtime.layer_skip.entropy import EntropyPolicy
from edgeinfer.runtime.remote.decoding import RemoteDecoding


class RoutedDecoding(RemoteDecoding):
    """Writes what is easy to predict here, and has the rest decided in rounds, drafts included.

    Args:
        policy: who writes the next token; the others are those of `RemoteDecoding`.
    """

    def __init__(self, *args: Any, policy: EntropyPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = policy
        self._own = self._tokens = self._switches = 0
        self._wrote_here = False

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """See `RemoteDecoding.first`."""
        tokens = super().first(prompt, logits, room)
        if self._reply is not None and not self._reply.verifies:
            message = "The server decides such a reply in one piece, so no other model can write parts of it."
            raise CapabilityError(message, "Ask for greedy text, or for an edgeinfer server.")
        return tokens

    def next(self, room: int, lost: int) -> Sequence[int]:
        """One token of this model's, or those that a round decides."""
        if self._local:
            return super().next(room, lost)
        self._drafts = []
        logits = self._logits()
        self._policy.seen(entropy_bits(logits))
        here = not self._policy.large()
        self._switches += here != self._wrote_here
        self._wrote_here = here
        if here:
            token = self._sampler.sample(logits, len(self._text))
            self._text.append(token)
            tokens: Sequence[int] = self._accept(token, logits)
            self._own += 1
        else:
            tokens = super().next(room, lost)
            self._policy.large_made(len(tokens) - 1)
        self._tokens += len(tokens)
        return tokens

    def _length(self) -> int | None:
        """Streams would write what this model is sure of, too."""
        return super()._length() or 0

    def compute_use(self) -> ComputeUse:
        """How much of the text each model wrote."""
        return ComputeUse(
            compute="entropy",
            lossless=self._own == 0,
            tokens=self._tokens,
            reduced=self._own,
            large_share=1 - self._own / self._tokens if self._tokens else None,
            switches=self._switches,
        )
