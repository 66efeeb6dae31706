"""Contexts that were evaluated apart, put into a cache one behind the other: how they are placed, and their keys.

APE (Yang et al. 2025) lets all contexts begin at the position behind a prefix that they share, so that their keys need
not be touched, and divides the scores of their keys by a temperature. Placed in sequence, each begins where the one
before ends, by turning its keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.contexts import ContextUse
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.kv_cache.context_shift.policy import LayerRotations


class ContextRows(Protocol):
    """Rows of a text behind a prefix, wherever they are kept."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the rows are of."""

    @property
    def edits(self) -> int:
        """How often rows were made of an earlier version of the text by its edits."""

    @property
    def there(self) -> bool:
        """Whether the rows are still where they were kept."""

    def pieces(self) -> Iterator[CacheSnapshot]:
        """The rows, one run after the other."""


@dataclass(frozen=True, eq=False)
class RowsInMemory:
    """Implements `ContextRows` by rows in memory."""

    tokens: tuple[int, ...]
    rows: CopiedRows
    edits: int = 0
    there: ClassVar[bool] = True

    @classmethod
    def of(cls, tokens: tuple[int, ...], rows: CacheSnapshot, edits: int = 0) -> RowsInMemory:
        """A copy of these rows."""
        return cls(tokens, CopiedRows(rows.length, rows.keys, rows.values, rows.kv, rows.scales), edits)

    def pieces(self) -> Iterator[CacheSnapshot]:
        """All at once."""
        yield self.rows


def _parallel(lengths: Sequence[int]) -> list[int]:
    return [0] * len(lengths)


def _in_sequence(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]


# How far behind the prefix contexts of these lengths begin.
PLACEMENTS: dict[str, Callable[[Sequence[int]], list[int]]] = {"parallel": _parallel, "sequence": _in_sequence}


class JoinedContexts:
    """A prefix and contexts as a cache holds them before a prompt.

    Args:
        spec: of the model.
        prefix: that every context was evaluated behind.
        contexts: in their order.
        use: how they are placed, and the temperature of their scores.

    Attributes:
        use: what replies say of them.
        tokens: of prefix and contexts.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        prefix: ContextRows,
        contexts: Sequence[ContextRows],
        use: ContextUse,
    ) -> None:
        self._spec = spec
        self._rows = (prefix, *contexts)
        self.use = use
        self._prefix = len(prefix.tokens)
        lengths = [len(context.tokens) for context in contexts]
        self._starts = [0, *(self._prefix + start for start in PLACEMENTS[use.placement](lengths))]
        self._behind = max(start + size for start, size in zip(self._starts, [self._prefix, *lengths], strict=True))
        self.tokens = tuple(token for rows in self._rows for token in rows.tokens)

    @property
    def there(self) -> bool:
        """Whether the rows are still where they were kept."""
        return all(rows.there for rows in self._rows)

    def enter(self, cache: PagedCache) -> None:
        """Puts the rows in place of all in a cache, and has what follows be placed behind the last of them."""
        cache.trim(0)
        for rows, start in zip(self._rows, self._starts, strict=True):
            first = cache.length
            for piece in rows.pieces():
                cache.append(piece)
            if start > self._prefix:
                turn(cache, self._spec, first, self._prefix, start)
        if self.use.temperature != 1:
            self._temper(cache)
        cache.shift = len(self.tokens) - self._behind

    def _temper(self, cache: PagedCache) -> None:
        """Scores are products with keys, so these are divided in their place."""
        factor = np.float32(1 / self.use.temperature)
        for layer in range(self._spec.num_layers):
            cache.write_keys(layer, self._prefix, cache.read_keys(layer, self._prefix, cache.length) * factor)


def turn(cache: PagedCache, spec: DecoderSpec, first: int, old: int, new: int) -> None:
    """Turns the keys of the rows from `first` on as if the first of them had stood at position `new`, not `old`."""
    size = cache.length - first
    rotations = LayerRotations(spec, max(old, new) + size)
    moved = rotations.mover(np.arange(old, old + size), np.arange(new, new + size))
    for layer in range(spec.num_layers):
        cache.write_keys(layer, first, moved(layer, cache.read_keys(layer, first, cache.length)))
