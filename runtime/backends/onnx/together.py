"""Several sequences in one pass: one input of all their rows, at their positions, and their pages side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BackendError
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.paged_cache import PagedCache

__all__ = ["joined", "placed", "tables_of"]


def placed(cache: PagedCache, batch: ForwardInput) -> ForwardInput:
    """An input with the positions that its rows have where contexts before them lie side by side."""
    return dataclasses.replace(batch, positions=batch.positions - cache.shift) if cache.shift else batch


def joined(batches: Sequence[ForwardInput]) -> ForwardInput:
    """One input of the rows of several, without what each row sees.

    Raises:
        BackendError: they are not to be evaluated in one way.
    """
    first = batches[0]
    if not all(first.goes_with(other) for other in batches[1:]):
        raise BackendError("The sequences of a pass must run through the same layers, planes and experts.")
    starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
    states = [batch.hidden for batch in batches if batch.hidden is not None]
    return dataclasses.replace(
        first,
        tokens=np.concatenate([batch.tokens for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        rows=np.concatenate([batch.rows + start for batch, start in zip(batches, starts[:-1], strict=True)]),
        tree=None,
        gains=None,
        hidden=np.concatenate(states) if states else None,
    )


def tables_of(caches: Sequence[PagedCache]) -> NDArray[np.int32]:  # (N, P)
    """The pages of several sequences, -1 behind the shorter ones' last."""
    tables = np.full((len(caches), max(len(cache.table) for cache in caches)), -1, np.int32)
    for row, cache in enumerate(caches):
        tables[row, : len(cache.table)] = cache.table
    return tables
