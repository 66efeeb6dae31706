"""The factory of the backend that runs static bundles."""

from __future__ import annotations

from typing import ClassVar

from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.backends.static.memory import StaticMemory
from edgeinfer.runtime.devices.providers import Device, Graphs
from edgeinfer.runtime.planning.facts import TOKENIZER, ModelMemory
from edgeinfer.runtime.text.tokenizer import file_has_pairs


class StaticFactory(BackendFactory):
    """Graphs of fixed shapes."""

    tunes: ClassVar[tuple[str, ...]] = ("threads", "affinity", "prefill_chunk")
    graphs: ClassVar[Graphs] = "static"

    def engine(self) -> str:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"

    def layout(self, bundle: Bundle, config: LoadOptions, device: Device) -> Layout:
        if bundle.manifest.static is None:
            message = f"{bundle.path} has no static graphs."
            raise BundleError(message, "Leave the backend out, or export the model with --static.")
        return bundle.manifest.layout

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return (FLOAT32,)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        from edgeinfer.runtime.backends.static.backend import kernel_of

        return kernel_of(bundle)

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        pairs = file_has_pairs(bundle.path / TOKENIZER)
        ordinary = OnnxMemory(bundle, layout, pairs)
        return StaticMemory(bundle, ordinary, config.exact, device.on_cpu)

    def make(self, order: BackendOrder) -> Backend:
        from edgeinfer.runtime.backends.static.backend import StaticBackend

        plan = order.configuration
        return StaticBackend(
            order.bundle,
            plan.context,
            threads=order.threads,
            device=order.device,
            affinity=order.affinity,
            exact=order.config.exact,
            rows=plan.draft_max + 1,
            chunk=plan.prefill_chunk,
        )
