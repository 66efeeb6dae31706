"""Loads a model with room for replies that take turns: a prefix cache as large as they need and memory allows.

Knows plans, no threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import psutil

import edgeinfer
from edgeinfer.errors import CapabilityError

__all__ = ["load_with_room"]

_log = logging.getLogger("edgeinfer")

# Of the memory that is free.
_MOST_SHARE = 0.25


def load_with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, progress: Callable[[str, int, int], None]
) -> edgeinfer.Model:
    """Loads a model so that up to `parallel` replies can be paused at once.

    Where the budget has no room for that many, there is room for half as many, and so on; without any, and where the
    backend cannot copy its cache, replies run one after the other.

    Args:
        options: fields of LoadConfig; a `prefix_cache` among them is kept to.
        progress: as `edgeinfer.load` takes it.

    Raises:
        EdgeInferError: as `edgeinfer.load`.
    """
    if options.get("prefix_cache") is not None or options.get("overflow", "stop") != "stop":
        return edgeinfer.load(model, progress=progress, **options)
    plan = edgeinfer.plan(model, **options)
    most = int(psutil.virtual_memory().available * _MOST_SHARE)
    while plan.fits and parallel >= 1:
        room = min(parallel * plan.terms["kv"], most)
        # What a reply alone would have is not given up for others.
        mine = plan.configuration
        fixed = dict(options) | {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
        if edgeinfer.plan(model, **fixed | {"prefix_cache": room}).fits:
            try:
                return edgeinfer.load(model, progress=progress, **fixed | {"prefix_cache": room})
            except CapabilityError as error:
                _log.warning("Replies run one after the other. %s", error.message)
                break
        parallel //= 2
    return edgeinfer.load(model, progress=progress, **options)
