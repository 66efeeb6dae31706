"""Models that benchmarks load in the test's process run on one thread unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import edgeinfer


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Another worker has the other cores, and threads that wait for each other take the time of both."""
    load, plan = edgeinfer.load, edgeinfer.plan

    def load_on_one(model: Any = None, **options: Any) -> edgeinfer.Model:
        return load(model, **options | {"threads": options.get("threads") or 1})

    def plan_for_one(model: Any = None, **options: Any) -> edgeinfer.MemoryPlan:
        return plan(model, **options | {"threads": options.get("threads") or 1})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edgeinfer, "load", load_on_one)
        patch.setattr(edgeinfer, "plan", plan_for_one)
        yield
