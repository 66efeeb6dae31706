"""The kind of the plain numpy backend; knows nothing of its arithmetic."""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendKind, Order
from edgeinfer.runtime.backends.onnx.factory import kv_types_with_scales, memory_of, scales_for, watched
from edgeinfer.runtime.planning.configuration import ModelMemory

__all__ = ["ReferenceKind"]


class ReferenceKind(BackendKind):
    """Slow and obvious, on bundles of our own graphs."""

    def engine(self) -> str:
        """numpy."""
        return f"numpy {np.__version__}"

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Those of the graphs."""
        return kv_types_with_scales(bundle, layout)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """The library."""
        return "numpy"

    def memory(self, bundle: Bundle, layout: Layout, config: LoadConfig) -> ModelMemory:
        """With every weight multiplied out."""
        return memory_of(bundle, layout, floats=True)

    def make(self, order: Order) -> Backend:
        """The arrays and a cache."""
        from edgeinfer.runtime.backends.reference.backend import ReferenceBackend

        bundle, plan = order.bundle, order.configuration
        backend = ReferenceBackend(bundle, plan.context, kv=plan.kv, kv_scales=scales_for(bundle, plan))
        return watched(bundle, backend)
