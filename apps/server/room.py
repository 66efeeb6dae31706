"""Options by which replies have room side by side, and loading by them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.errors import CapabilityError

if TYPE_CHECKING:
    from edgeinfer.results import Progress


_log = logging.getLogger("edgeinfer")

# Of the contexts of replies side by side, for what there must be room, and for so many tokens at most; where it is
# short, some are evaluated again.
_LEAST_SHARE, _LEAST_TOKENS = 0.25, 512


def with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, alone: edgeinfer.MemoryPlan | None = None
) -> dict[str, Any]:
    """Returns options by which up to `parallel` replies have room side by side.

    Where the budget has no room for that many, there is room for half as many, and so on; without any the options are
    those given.

    Args:
        alone: the plan by these options, where it was made already.
    """
    given = dict(options)
    alone = alone or edgeinfer.plan(model, **given)
    mine = alone.configuration
    fixed = given | {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
    if alone.budget_bytes is not None and _follows_grammars():
        # Once the cache has what is left, there is no room for them.
        fixed["structured"] = edgeinfer.plan(model, **(fixed | {"structured": True})).fits
    sized = given.get("prefix_cache") is None and given.get("overflow", "stop") == "stop"
    while parallel >= 1:
        roomy = fixed | {"parallel": parallel}
        if parallel == 1 and sized:  # beside the reply that runs, the one before is kept
            roomy["prefix_cache"] = alone.terms.get("kv", 0)
        plan = edgeinfer.plan(model, **roomy)
        share = min(_LEAST_SHARE, _LEAST_TOKENS / plan.context) if sized else 0
        least = share * (parallel - 1) * plan.terms.get("kv", 0)
        if plan.fits and plan.prefix_cache >= least:
            return roomy
        parallel //= 2
    return given


def _follows_grammars() -> bool:
    """Whether replies by a schema, an expression or a grammar can be made here."""
    return importlib.util.find_spec("llguidance") is not None


def load_with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, progress: Progress | None
) -> edgeinfer.Model:
    """Loads a model by `with_room`, or without it if its cache cannot be copied: replies then run one at a time."""
    roomy = with_room(model, options, parallel)
    try:
        return edgeinfer.load(model, progress=progress, **roomy)
    except CapabilityError as error:
        if roomy == dict(options):
            raise
        _log.warning("Replies run one after the other. %s", error.message)
    return edgeinfer.load(model, progress=progress, **options)
