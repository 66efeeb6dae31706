"""What drafting and other options take besides a model, and what is expected of drafters, as plans count them."""

from __future__ import annotations

from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import HEAD_ROWS
from edgeinfer.runtime.kv_cache import prefix_cache
from edgeinfer.runtime.kv_cache.context_shift import registry as context_shift
from edgeinfer.runtime.planning.plan_input import Configuration, OptionBytes
from edgeinfer.runtime.sampling.grammar_tokens import grammar_bytes
from edgeinfer.runtime.speculation.drafters.method import drafter_method, priors_of

# Objects of the controller and the drafters besides their tables, and those of a further sequence.
_BOOKKEEPING_BYTES, _SEQUENCE_BYTES = 1_000_000, 100_000
_FLOAT_BYTES = 4


def drafting_bytes(bundle: Bundle, configuration: Configuration, apart: bool) -> int:
    """Bytes of the drafters' tables and of what the largest verification pass gives out.

    Args:
        apart: logits are computed a few rows at a time.
    """
    geometry, rows = bundle.manifest.geometry, 1 + configuration.draft_max
    methods = [drafter_method(name) for name in configuration.drafters]
    # A draft model's memory counts where it is loaded.
    if not configuration.draft_model:
        methods = [method for method in methods if method.runs not in ("model", "module")]
    tables = sum(method.nbytes(bundle, configuration.context) for method in methods)
    states, logits = (3 if apart else 2) * rows * geometry.hidden_size, min(rows, HEAD_ROWS) if apart else rows
    return _BOOKKEEPING_BYTES + tables + (states + logits * geometry.vocab_size) * _FLOAT_BYTES


def _sequence_bytes(configuration: Configuration) -> int:
    own = sum(drafter_method(name).sequence_bytes(configuration.context) for name in configuration.drafters)
    return own + _SEQUENCE_BYTES


OPTION_BYTES = OptionBytes(
    drafting_bytes,
    _sequence_bytes,
    prefix_cache.planned_bytes,
    context_shift.planned_bytes,
    priors_of,
    grammar_bytes,
)
