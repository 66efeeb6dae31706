"""The kinds of backends that run ONNX graphs; knows nothing of how they run them."""

from __future__ import annotations

from typing import ClassVar

from edgeinfer.bundle import NATIVE, Bundle, KVScales, Layout
from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendKind, Order
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.backends.onnx.watched_backend import WatchedBackend
from edgeinfer.runtime.devices.contract import Graphs
from edgeinfer.runtime.planning.configuration import TOKENIZER, Configuration, ModelMemory
from edgeinfer.runtime.profile.kv_scales import kv_scales
from edgeinfer.runtime.system.memory import releases_pages
from edgeinfer.runtime.text.transient import tokenizer_facts
from edgeinfer.runtime.weights.layouts import choose_layout, kernel_of

__all__ = ["OnnxKind", "OptimumKind", "kv_types_with_scales", "memory_of", "scales_for", "watched"]


class OnnxKind(BackendKind):
    """Our own graphs."""

    tunes: ClassVar[tuple[str, ...]] = ("threads", "affinity", "weights", "prefill_chunk")
    graphs: ClassVar[Graphs] = "ordinary"

    def engine(self) -> str:
        """onnxruntime."""
        return _onnxruntime()

    def layout(self, bundle: Bundle, config: LoadConfig) -> Layout:
        """The stored one where it can run; errors as `choose_device` and `choose_layout`."""
        native = config.native if self.device(config).traits.custom_ops else False
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

    def memory(self, bundle: Bundle, layout: Layout, config: LoadConfig) -> ModelMemory:
        """Of a session."""
        return memory_of(bundle, layout)

    def make(self, order: Order) -> Backend:
        """A session, with whatever keeps its weights or experts out of memory."""
        from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
        from edgeinfer.runtime.backends.onnx.resident_backend import ResidentBackend
        from edgeinfer.runtime.backends.onnx.streamed import StreamedBackend

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
            resident = ResidentBackend(backend, decoder, plan.expert_bytes)
            return WatchedBackend(resident, decoder, resident.residency)
        if plan.window_layers:
            return watched(bundle, StreamedBackend(backend, plan.window_layers))
        return watched(bundle, backend)


class OptimumKind(BackendKind):
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

    def memory(self, bundle: Bundle, layout: Layout, config: LoadConfig) -> ModelMemory:
        """Of a session with opaque weights."""
        return memory_of(bundle, layout)

    def make(self, order: Order) -> Backend:
        """A session whose cache grows by concatenation."""
        from edgeinfer.runtime.backends.onnx.concat import ConcatBackend

        return ConcatBackend(order.bundle, order.configuration.context, threads=order.threads)


def _onnxruntime() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def kv_types_with_scales(bundle: Bundle, layout: Layout) -> tuple[str, ...]:
    """Kinds of cache that a bundle has graphs for, and scales where they need them."""
    kinds = bundle.kv_types(layout)
    return kinds if len(kinds) == 1 or kv_scales(bundle) is not None else (FLOAT32,)


def scales_for(bundle: Bundle, configuration: Configuration) -> KVScales | None:
    """The scales of the cache that was planned, where it needs any."""
    return kv_scales(bundle) if find_kv_type(configuration.kv).quantized else None


def memory_of(bundle: Bundle, layout: Layout, *, floats: bool = False) -> ModelMemory:
    """What a bundle takes, with all weights multiplied out to floats if so."""
    from edgeinfer.runtime.backends.onnx.packed_cache import is_packed

    pairs = tokenizer_facts(bundle.path / TOKENIZER).merge_pairs
    return OnnxMemory(bundle, layout, pairs, layout != NATIVE and is_packed(bundle), floats)


def watched(bundle: Bundle, backend: Backend) -> Backend:
    """With its experts counted, where it has any."""
    decoder = bundle.manifest.decoder
    return backend if decoder is None or decoder.moe is None else WatchedBackend(backend, decoder)
