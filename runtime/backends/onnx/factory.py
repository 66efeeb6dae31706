"""The factories of backends that run ONNX graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import CapabilityError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.backends.contract import Backend, runs_apart
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder, counting_experts, thread_count
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.devices.providers import Device, Graphs
from edgeinfer.runtime.paging.layout import PageLayout
from edgeinfer.runtime.planning.facts import ModelMemory
from edgeinfer.runtime.system.memory import releases_pages
from edgeinfer.runtime.weights.disk_rate import DiskMeter
from edgeinfer.runtime.weights.layouts import choose_layout, kernel_of, weights_place

if TYPE_CHECKING:
    from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend


class OnnxFactory(BackendFactory):
    """Our own graphs."""

    tunes: ClassVar[tuple[str, ...]] = ("threads", "affinity", "weights", "prefill_chunk")
    graphs: ClassVar[Graphs] = "ordinary"
    adapts: ClassVar[bool] = True

    def engine(self) -> str:
        return _onnxruntime()

    def layout(self, bundle: Bundle, config: LoadOptions, device: Device) -> Layout:
        native = config.native if device.traits.custom_ops else False
        return choose_layout(bundle, native, config.kv)

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return bundle.kv_types(layout)

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Streamed, and experts left out, where pages can be released."""
        if layout != NATIVE:
            return ("packed",)
        if not releases_pages():
            return ("mapped",)
        apart = any(find_expert(t.name) and t.bits < 32 for t in bundle.manifest.tensors)
        return ("mapped", "experts", "streamed") if apart else ("mapped", "streamed")

    def head_apart(self, bundle: Bundle, layout: Layout) -> bool:
        return runs_apart(bundle.manifest, layout)

    def weights_place(self, bundle: Bundle, layout: Layout) -> Path | None:
        return weights_place(bundle, layout) if layout == NATIVE else None

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        return kernel_of(bundle, layout)

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        return memory_of(bundle, layout, threads=thread_count(config))

    def make(self, order: BackendOrder) -> Backend:
        bundle, plan, backend = order.bundle, order.configuration, _graph_backend(order)
        decoder = bundle.manifest.decoder
        if decoder is None or not (plan.expert_bytes or plan.window_layers):
            return counting_experts(bundle, backend)
        from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
        from edgeinfer.runtime.backends.onnx.windowed import CachedExperts, StreamedLayers
        from edgeinfer.runtime.weights.experts import RouterGuess

        assert isinstance(backend, PagedBackend) and backend.pages is not None, "it reads its weights in place"
        meter = DiskMeter(backend.pages.path, keeps=order.config.remember)
        if plan.expert_bytes:
            assert decoder.moe is not None, "there are experts"
            guess = RouterGuess.of(backend.pages, tensors_in(bundle.manifest, order.layout), decoder.moe.top_k)
            cached = CachedExperts(backend, decoder, plan.expert_bytes, meter, guess)
            backend.cut_into(cached)
            return counting_experts(bundle, backend, cached.expert_cache)
        kept, room = plan.kept_layers, order.room
        backend.cut_into(StreamedLayers(backend, plan.window_layers, meter, kept_layers=kept, room=room))
        return counting_experts(bundle, backend)


class OptimumFactory(BackendFactory):
    """Graphs of optimum."""

    def engine(self) -> str:
        return _onnxruntime()

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        return (FLOAT32,)

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        return "onnxruntime"

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        return memory_of(bundle, layout)

    def make(self, order: BackendOrder) -> Backend:
        from edgeinfer.runtime.backends.onnx.concat import ConcatBackend

        return ConcatBackend(order.bundle, order.configuration.context, threads=order.threads)


def _graph_backend(order: BackendOrder) -> GraphBackend:
    """The backend of the graph that reads the layout."""
    bundle, plan, config = order.bundle, order.configuration, order.config
    if order.layout == NATIVE:
        from edgeinfer.runtime.backends.onnx.adapters import pack_adapters
        from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend

        weighed = config.overflow == "cluster"  # whose rows stand for several tokens
        layout = PageLayout.of(bundle.manifest.geometry, plan.kv, weighed=weighed)
        return PagedBackend(
            bundle,
            plan.context,
            threads=order.threads,
            exact=config.exact,
            kv=plan.kv,
            pages=config.prefix_cache // layout.page_bytes,
            weighed=weighed,
            progress=order.progress,
            affinity=order.affinity,
            adapters=pack_adapters(bundle.manifest, config.adapters) if config.adapters else None,
        )
    if config.adapters:
        message = f"{bundle.manifest.name} runs without the native kernel, and adapters need it."
        raise CapabilityError(message, "Load a bundle of the native layout where the kernel works, or leave them out.")
    from edgeinfer.runtime.backends.onnx.backend import OnnxBackend

    return OnnxBackend(
        bundle,
        plan.context,
        threads=order.threads,
        exact=config.exact,
        progress=order.progress,
        device=order.device,
        affinity=order.affinity,
    )


def _onnxruntime() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"
