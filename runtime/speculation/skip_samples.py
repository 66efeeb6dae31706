"""Texts that sets of skipped blocks are scored by: a model's own replies, read with any of its blocks left out.

Knows nothing of scores. The committed part of a text has the whole model's cache, as it has while skipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, ForwardInput

__all__ = ["Sample", "SampleTexts"]

# Tokens of a prompt per pass.
_CHUNK = 64


@dataclass(frozen=True)
class Sample:
    """A text to score by: what the model was given and what it answered, or any two parts of a text; neither empty."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


class SampleTexts:
    """Texts, each with a copy of the cache before its reply.

    Args:
        backend: must skip layers; its cache is emptied.
        window: most tokens of each reply that are read, all in one pass.

    Raises:
        CapabilityError: the backend cannot skip layers.
        UsageError: there is no text.
        BackendError: a text does not fit the cache.
    """

    def __init__(self, backend: Backend, samples: Sequence[Sample], window: int) -> None:
        if not backend.capabilities.layer_skip:
            message = f"The {backend.name} backend cannot skip layers."
            raise CapabilityError(message, "Use a natively exported bundle.")
        if not samples or not all(sample.prompt and sample.reply for sample in samples):
            raise UsageError("There is no text to score by.", "Give samples with a prompt and a reply each.")
        self._backend = backend
        self._texts: list[tuple[CacheSnapshot, Ints]] = []  # cache before, tokens fed (S,)
        for sample in samples:
            self._take_in(sample.prompt[:-1])
            fed = np.array([sample.prompt[-1], *sample.reply[: window - 1]], np.int64)
            self._texts.append((backend.cache.snapshot(), fed))

    @property
    def positions(self) -> int:
        """N, tokens that are read."""
        return sum(len(fed) for _, fed in self._texts)

    def read(self, layer_mask: NDArray[np.bool_]) -> Iterator[Floats]:  # (2 L,)
        """Logits of the blocks that run, after each token of each text in turn; a view that the next overwrites.
        (S, V)"""
        for before, fed in self._texts:
            self._backend.cache.restore(before)
            rows = np.arange(len(fed))
            yield self._backend.forward(
                ForwardInput(fed, rows + self._backend.cache.length, rows, layer_mask=layer_mask)
            ).logits

    def _take_in(self, tokens: Sequence[int]) -> None:
        self._backend.cache.trim(0)
        for start in range(0, len(tokens), _CHUNK):
            ids = np.array(tokens[start : start + _CHUNK], np.int64)
            self._backend.forward(ForwardInput(ids, np.arange(start, start + len(ids)), np.zeros(0, np.int64)))
