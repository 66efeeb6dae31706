"""Room for replies that take turns: a prefix cache as large as they need and memory allows; knows plans, no threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import psutil

import edgeinfer
from edgeinfer.errors import CapabilityError

__all__ = ["load_with_room", "with_room"]

_log = logging.getLogger("edgeinfer")

# Of the memory that is free.
_MOST_SHARE = 0.25


def with_room(model: str | None, options: Mapping[str, Any], parallel: int) -> dict[str, Any]:
    """Options by which up to `parallel` replies can be paused at once, and each runs as it would alone.

    Where the budget has no room for that many, there is room for half as many, and so on; without any the options are
    those given.

    Args:
        options: fields of LoadConfig; a `prefix_cache` among them is kept to.

    Raises:
        EdgeInferError: as `edgeinfer.plan`.
    """
    given = dict(options)
    if given.get("prefix_cache") is not None or given.get("overflow", "stop") != "stop":
        return given
    plan = edgeinfer.plan(model, **given)
    mine = plan.configuration
    fixed = given | {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
    most = int(psutil.virtual_memory().available * _MOST_SHARE)
    while plan.fits and parallel >= 1:
        roomy = fixed | {"prefix_cache": min(parallel * plan.terms["kv"], most)}
        if edgeinfer.plan(model, **roomy).fits:
            return roomy
        parallel //= 2
    return given


def load_with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, progress: Callable[[str, int, int], None]
) -> edgeinfer.Model:
    """Loads a model by `with_room`; one whose cache cannot be copied without, its replies run one after the other.

    Args:
        progress: as `edgeinfer.load` takes it.

    Raises:
        EdgeInferError: as `edgeinfer.load`.
    """
    roomy = with_room(model, options, parallel)
    try:
        return edgeinfer.load(model, progress=progress, **roomy)
    except CapabilityError as error:
        if roomy == dict(options):
            raise
        _log.warning("Replies run one after the other. %s", error.message)
    return edgeinfer.load(model, progress=progress, **options)
