"""What speculation takes in memory besides a draft model, before any of it is made; knows nothing of other terms."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.bundle import Geometry
from edgeinfer.runtime.speculation.registry import KINDS

__all__ = ["drafting_bytes"]

# The governor's and the drafters' own objects, besides their tables.
_BOOKKEEPING_BYTES = 1_000_000
_FLOAT_BYTES = 4


def drafting_bytes(drafters: Sequence[str], geometry: Geometry, context: int, draft_max: int) -> int:
    """Bytes of these drafters' tables and of what the largest verification pass gives out."""
    tables = sum(KINDS[name].table_bytes(geometry, context) for name in drafters)
    rows = (1 + draft_max) * (geometry.vocab_size + 2 * geometry.hidden_size) * _FLOAT_BYTES
    return _BOOKKEEPING_BYTES + tables + rows
