"""The memory that options take beside the models: drafting, cached prefixes and context shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgeinfer.bundle import Bundle, Geometry
from edgeinfer.bundle.heads import heads_bytes
from edgeinfer.runtime.kv_cache import prefix_cache
from edgeinfer.runtime.kv_cache.context_shift import registry as context_shift
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.plan_input import OptionBytes
from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter
from edgeinfer.runtime.speculation.registry import KINDS

__all__ = ["OPTION_BYTES", "drafting_bytes", "heads_taken"]

# The governor's and the drafters' own objects, besides their tables.
_BOOKKEEPING_BYTES = 1_000_000
_FLOAT_BYTES = 4


def drafting_bytes(
    drafters: Sequence[str], geometry: Geometry, context: int, draft_max: int, heads: Mapping[str, int] | None = None
) -> int:
    """Bytes of these drafters' tables and of what the largest verification pass gives out.

    Args:
        heads: what drafters with heads take, as `heads_taken`.
    """
    tables = sum(KINDS[name].table_bytes(geometry, context) + (heads or {}).get(name, 0) for name in drafters)
    rows = (1 + draft_max) * (geometry.vocab_size + 2 * geometry.hidden_size) * _FLOAT_BYTES
    return _BOOKKEEPING_BYTES + tables + rows


def heads_taken(bundle: Bundle) -> dict[str, int]:
    """Bytes that drafters with heads in a bundle take, by their names: the heads, and what they work with."""
    geometry, taken = bundle.manifest.geometry, dict[str, int]()
    for name in ("medusa", "hydra", "prompt"):
        if stored := heads_bytes(bundle, name):
            taken[name] = stored + 2 * _FLOAT_BYTES * geometry.vocab_size
    if "prompt" in taken:
        # Prompt tokens are also probe rows of passes, each with a row of logits.
        probes = heads_bytes(bundle, "prompt") // (_FLOAT_BYTES * geometry.hidden_size)
        taken["prompt"] += PromptDrafter.kept_bytes(geometry.vocab_size, geometry.hidden_size, 2 * probes)
    return taken


def _configured_bytes(bundle: Bundle, configuration: Configuration) -> int:
    drafters, most = configuration.drafters, configuration.draft_max
    return drafting_bytes(drafters, bundle.manifest.geometry, configuration.context, most, heads_taken(bundle))


OPTION_BYTES = OptionBytes(_configured_bytes, prefix_cache.planned_bytes, context_shift.planned_bytes)
