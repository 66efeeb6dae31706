"""The factories of backends that run ONNX graphs."""

from __future__ import annotations

from typing import ClassVar

from edgeinfer.bundle import NATIVE, Bundle, Layout
from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.kv_types import FLOAT32
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import (
    BackendFactory,
    BackendOrder,
    counting_experts,
    kv_types_with_scales,
    scales_for,
)
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.backends.wrapped import ExpertCountingBackend
from edgeinfer.runtime.devices.contract import Device, Graphs
from edgeinfer.runtime.planning.configuration import ModelMemory
from edgeinfer.runtime.planning.plan_input import BackendChoice
from edgeinfer.runtime.system.memory import releases_pages
from edgeinfer.runtime.weights.layouts import choose_layout, kernel_of

__all__ = ["OnnxFactory", "OptimumFactory"]


class OnnxFactory(BackendFactory):
    """Our own graphs."""

    tunes: ClassVar[tuple[str, ...]] = ("threads", "affinity", "weights", "prefill_chunk")
    graphs: ClassVar[Graphs] = "ordinary"

    def engine(self) -> str:
        """onnxruntime."""
        return _onnxruntime()

    def layout(self, bundle: Bundle, config: LoadConfig, device: Device) -> Layout:
        """The stored one where it can run; errors as `choose_layout`."""
        native = config.native if device.traits.custom_ops else False
        return choose_layout(bundle, native)

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Those that the bundle has graphs and scales for."""
        return kv_types_with_scales(bundle, layout)

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Streamed, and experts left out, where pages can be released."""
        modes = ("mapped",) if layout == NATIVE else ("packed", "mapped")
        if not releases_pages():
            return modes
        # In the other layout the experts of a layer are one matrix, and onnxruntime packs it.
        apart = layout == NATIVE and any(find_expert(t.name) and t.bits < 32 for t in bundle.manifest.tensors)
        return (*modes, "experts", "streamed") if apart else (*modes, "streamed")

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """An instruction set of the native kernel, or an operator."""
        return kernel_of(bundle, layout)

    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        """Of a session."""
        return memory_of(choice.bundle, choice.layout)

    def make(self, order: BackendOrder) -> Backend:
        """A session, with whatever keeps its weights or experts out of memory."""
        from edgeinfer.runtime.backends.onnx.backend import OnnxBackend

        bundle, plan = order.bundle, order.configuration
        backend = OnnxBackend(
            bundle,
            plan.context,
            threads=order.threads,
            exact=order.config.exact,
            layout=order.layout,
            kv=plan.kv,
            kv_scales=scales_for(bundle, plan),
            weights="packed" if plan.weights == "packed" else "mapped",
            progress=order.progress,
            device=order.device,
            affinity=order.affinity,
        )
        decoder = bundle.manifest.decoder
        if decoder is not None and plan.expert_bytes:
            from edgeinfer.runtime.backends.onnx.cached_experts import CachedExpertsBackend

            cached = CachedExpertsBackend(backend, decoder, plan.expert_bytes)
            return ExpertCountingBackend(cached, backend.cache, decoder, cached.expert_cache)
        if plan.window_layers:
            from edgeinfer.runtime.backends.onnx.windowed import StreamedBackend

            return counting_experts(bundle, StreamedBackend(backend, plan.window_layers), backend.cache)
        return counting_experts(bundle, backend, backend.cache)


class OptimumFactory(BackendFactory):
    """Graphs of optimum."""

    def engine(self) -> str:
        """onnxruntime."""
        return _onnxruntime()

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Floats."""
        return (FLOAT32,)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """The library."""
        return "onnxruntime"

    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        """Of a session with opaque weights."""
        return memory_of(choice.bundle, choice.layout)

    def make(self, order: BackendOrder) -> Backend:
        """A session whose cache grows by concatenation."""
        from edgeinfer.runtime.backends.onnx.concat import ConcatBackend

        return ConcatBackend(order.bundle, order.configuration.context, threads=order.threads)


def _onnxruntime() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"
