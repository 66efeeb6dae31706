"""What drafting and other options take beside a model, and what drafters promise, as plans count them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgeinfer.bundle.additions import MOST_HEADS, heads_bytes
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import HEAD_ROWS
from edgeinfer.runtime.kv_cache import prefix_cache
from edgeinfer.runtime.kv_cache.context_shift import registry as context_shift
from edgeinfer.runtime.planning.plan_input import Configuration, OptionBytes
from edgeinfer.runtime.sampling.grammar_tokens import grammar_bytes
from edgeinfer.runtime.speculation.prospects import priors_of
from edgeinfer.runtime.speculation.registry import KINDS

# The governor's and the drafters' own objects, besides their tables; and those of a further text.
_BOOKKEEPING_BYTES, _BOOKKEEPING_BESIDE_BYTES = 1_000_000, 100_000
_FLOAT_BYTES = 4


def drafting_bytes(
    drafters: Sequence[str],
    geometry: Geometry,
    context: int,
    draft_max: int,
    heads: Mapping[str, int] | None = None,
    *,
    apart: bool = False,
) -> int:
    """Bytes of these drafters' tables and of what the largest verification pass gives out."""
    taken = heads or {}
    tables = sum(KINDS[name].table_bytes(geometry, context) + taken.get(name, 0) for name in drafters)
    rows = 1 + draft_max
    # Rows with probes behind them have all their logits at once.
    few = apart and "prompt" not in taken
    states, logits = (3 if few else 2) * rows * geometry.hidden_size, min(rows, HEAD_ROWS) if few else rows
    return _BOOKKEEPING_BYTES + tables + (states + logits * geometry.vocab_size) * _FLOAT_BYTES


def heads_taken(bundle: Bundle) -> dict[str, int]:
    """Bytes that drafters with heads in a bundle take, by their names: the heads, and what they work with."""
    geometry, taken = bundle.manifest.geometry, dict[str, int]()
    for name in ("medusa", "hydra", "prompt"):
        if stored := heads_bytes(bundle, name):
            taken[name] = stored + 2 * _FLOAT_BYTES * geometry.vocab_size
    if "medusa" in taken:
        from edgeinfer.runtime.speculation.drafters.medusa import MedusaDrafter

        # Of a head, as half floats, of which `heads_bytes` counts three times as many.
        least = 3 * 2 * geometry.hidden_size * (geometry.hidden_size + 1)
        count = min(MOST_HEADS, heads_bytes(bundle, "medusa") // least)
        taken["medusa"] += MedusaDrafter.logits_bytes(geometry.vocab_size, count)
    if "prompt" in taken:
        from edgeinfer.runtime.speculation.drafters.prompt_tokens import PromptDrafter

        # Prompt tokens are also probe rows of passes, each with a row of logits.
        probes = heads_bytes(bundle, "prompt") // (_FLOAT_BYTES * geometry.hidden_size)
        taken["prompt"] += PromptDrafter.kept_bytes(geometry.vocab_size, geometry.hidden_size, probes)
    return taken


def _beside_bytes(configuration: Configuration) -> int:
    own = sum(KINDS[name].beside_bytes(configuration.context) for name in configuration.drafters)
    return own + _BOOKKEEPING_BESIDE_BYTES


def _configured_bytes(bundle: Bundle, configuration: Configuration, apart: bool) -> int:
    # What a draft model needs beside it counts where it is loaded.
    drafters = [name for name in configuration.drafters if configuration.draft_model or not KINDS[name].model]
    sizes = bundle.manifest.geometry, configuration.context, configuration.draft_max
    return drafting_bytes(drafters, *sizes, heads_taken(bundle), apart=apart)


OPTION_BYTES = OptionBytes(
    _configured_bytes,
    _beside_bytes,
    prefix_cache.planned_bytes,
    context_shift.planned_bytes,
    priors_of,
    grammar_bytes,
)
