"""What speculation takes in memory besides a draft model, before any of it is made; knows nothing of other terms."""

from __future__ import annotations

from edgeinfer.bundle import Geometry
from edgeinfer.config import MOST_DRAFTED, LoadConfig, drafters_in
from edgeinfer.runtime.speculation.registry import KINDS

__all__ = ["draft_lengths", "drafting_bytes"]

# The governor's and the drafters' own objects, besides their tables.
_BOOKKEEPING_BYTES = 1_000_000
_FLOAT_BYTES = 4


def draft_lengths(config: LoadConfig) -> tuple[int, ...]:
    """Longest drafts to plan for, the most wanted first: what was asked for is not shortened."""
    if not drafters_in(config.speculation):
        return (0,)
    if config.speculation != "auto" or config.draft_max is not None:
        return (config.draft_max or MOST_DRAFTED,)
    return (MOST_DRAFTED, 7, 3, 1, 0)


def drafting_bytes(config: LoadConfig, geometry: Geometry, context: int, draft_max: int) -> int:
    """Bytes of the drafters' tables and of what the largest verification pass gives out."""
    tables = sum(KINDS[name].table_bytes(geometry, context) for name in drafters_in(config.speculation))
    rows = (1 + draft_max) * (geometry.vocab_size + 2 * geometry.hidden_size) * _FLOAT_BYTES
    return _BOOKKEEPING_BYTES + tables + rows
