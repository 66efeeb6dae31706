"""What models need, as if nothing were loaded yet; knows nothing of loading them.

A plan counts the process it is made in. While a model is loaded, that process is larger than the one that would load
another after it, by what the model takes; plans are corrected by as much.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import psutil

import edgeinfer
from edgeinfer.apps.server.rooms import with_room

__all__ = ["Planner"]

# The terms of the process around a model.
_PROCESS = ("interpreter", "libraries")
# What a model leaves in the heap when it is freed: 5 MB, measured over loads of the built-in one.
_LEFT_BYTES = 6_000_000


class Planner:
    """Makes plans; may be called from any thread.

    Args:
        options: fields of LoadConfig that hold for every model.
        parallel: replies that take turns.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, parallel: int = 1) -> None:
        self._parallel = parallel
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._empty: dict[str, int] | None = None

    def measure(self) -> None:
        """Measures the process; to be called before a model is loaded."""
        with self._lock:
            if self._empty is None:
                terms = edgeinfer.plan(None).terms
                self._empty = {name: terms.get(name, 0) for name in _PROCESS}

    def loaded(self, plan: edgeinfer.MemoryPlan) -> None:
        """Takes over what the process was when a model was loaded into it, and what it will be when that is gone."""
        with self._lock:
            self._empty = {name: plan.terms.get(name, 0) for name in _PROCESS}
            self._empty["interpreter"] += _LEFT_BYTES

    def plan(self, model: str | None, memory: int | None = None, **options: Any) -> dict[str, Any]:
        """The JSON object of a plan.

        Args:
            memory: budget in bytes.
            options: fields of LoadConfig; those that are None are left open.

        Raises:
            EdgeInferError: as `edgeinfer.plan`.
        """
        given = self._options | {name: value for name, value in options.items() if value is not None}
        with self._lock:
            if memory is not None:
                _, counted = self._excess(edgeinfer.plan(model, **given))
                # No more than the machine has, which a plan refuses.
                given["memory"] = max(memory, min(memory + counted, psutil.virtual_memory().total))
            alone = edgeinfer.plan(model, **given)
            # As the host would load it; where memory is short it makes do without what others need.
            roomy = edgeinfer.plan(model, **with_room(model, given, self._parallel))
            data = roomy.to_dict() | {"alternatives": alone.to_dict()["alternatives"]}
            data["minimum_bytes"] = alone.minimum_bytes
            return _corrected(data, *self._excess(roomy), memory)

    def _excess(self, plan: edgeinfer.MemoryPlan) -> tuple[dict[str, int], int]:
        """Bytes by which the process is larger than without a model, by term; and those of them that count."""
        empty = self._empty or {}
        excess = {name: max(0, plan.terms.get(name, 0) - empty.get(name, plan.terms.get(name, 0))) for name in _PROCESS}
        return excess, sum(size for name, size in excess.items() if name in _counted(plan.counted))


def _counted(kind: str) -> tuple[str, ...]:
    return _PROCESS if kind == "resident" else ("interpreter",)


def _corrected(data: dict[str, Any], excess: Mapping[str, int], counted: int, memory: int | None) -> dict[str, Any]:
    data["terms"] = {name: size - excess.get(name, 0) for name, size in data["terms"].items()}
    data["anonymous_bytes"] -= excess["interpreter"]
    data["budget_bytes"] = memory
    for part in (data, *data["alternatives"]):
        part["planned_bytes"] -= counted
        part["fits"] = memory is None or part["planned_bytes"] <= memory
    data["minimum_bytes"] -= counted
    return data
