"""The factory of the plain numpy backend."""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder, counting_experts
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.planning.configuration import ModelMemory
from edgeinfer.runtime.planning.plan_input import BackendChoice


class ReferenceFactory(BackendFactory):
    """Slow and obvious, on bundles of our own graphs."""

    def engine(self) -> str:
        """numpy."""
        return f"numpy {np.__version__}"

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Those of the graphs."""
        return bundle.kv_types(layout)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """The library."""
        return "numpy"

    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        """With every weight multiplied out."""
        return memory_of(choice.bundle, choice.layout, floats=True)

    def make(self, order: BackendOrder) -> Backend:
        """The arrays and a cache."""
        from edgeinfer.runtime.backends.reference.backend import ReferenceBackend

        bundle, plan = order.bundle, order.configuration
        backend = ReferenceBackend(bundle, plan.context, kv=plan.kv)
        return counting_experts(bundle, backend, backend.cache)
