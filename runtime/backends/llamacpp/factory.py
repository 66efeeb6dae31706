"""The factory of the backend that runs GGUF files on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from edgeinfer.bundle.geometry import FLOAT16, FLOAT32, LLAMA_KV
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.drafting import MOST_DRAFTED
from edgeinfer.errors import BackendError, BundleError
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder
from edgeinfer.runtime.backends.llamacpp.footprint import GgufMemory, layers_that_fit
from edgeinfer.runtime.backends.llamacpp.graphics import GraphicsProcessor, Offload, find_processor, graphics_device
from edgeinfer.runtime.backends.llamacpp.memory import (
    drafted_at_once,
    fits_blocks,
    is_recurrent,
    packed_bytes,
)
from edgeinfer.runtime.backends.llamacpp.placement import Division
from edgeinfer.runtime.backends.llamacpp.rpc import rpc_processor
from edgeinfer.runtime.devices.contract import Device
from edgeinfer.runtime.devices.providers import device_error
from edgeinfer.runtime.planning.configuration import Configuration, ModelMemory, TokenizerMode
from edgeinfer.runtime.planning.plan_input import BackendChoice
from edgeinfer.runtime.text.contract import TokenizerLike


class LlamaCppFactory(BackendFactory):
    """GGUF files, in a bundle's directory or on their own."""

    modes_differ: ClassVar[bool] = True
    loads_experts: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    tunes: ClassVar[tuple[str, ...]] = ("threads", "weights", "prefill_chunk")

    def engine(self) -> str:
        """llama-cpp-python, by whose version llama.cpp's is known."""
        from edgeinfer.bundle.gguf.library import installed_version

        return f"llama-cpp-python {installed_version()}"

    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """float16 is the usual one; those in blocks where heads are whole blocks."""
        blocks = [name for name, kind in LLAMA_KV.items() if kind.blocks and fits_blocks(bundle.gguf)]
        return (FLOAT16, *blocks, FLOAT32)

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Packed where llama.cpp packs anything of these types on this processor, and where nothing can be mapped."""
        gguf = bundle.gguf
        if not gguf.mappable:
            return ("packed",)
        # Where nothing is packed, nothing is gained by asking for it.
        if not packed_bytes(gguf, "packed"):
            return ("mapped",)
        apart = 0 < packed_bytes(gguf, "experts") < packed_bytes(gguf, "packed")
        return ("packed", "experts", "mapped") if apart else ("packed", "mapped")

    def most_drafted(self, bundle: Bundle) -> int | None:
        """As many rows as recurrent layers can go back by; of some architectures none."""
        return drafted_at_once(bundle.gguf, MOST_DRAFTED) if is_recurrent(bundle.gguf) else None

    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """llama.cpp with the instruction sets it was compiled for."""
        from edgeinfer.bundle.gguf.library import llama_library
        from edgeinfer.runtime.backends.llamacpp.model import features

        return " ".join(("llama.cpp", *features(llama_library())))

    def device(self, config: LoadConfig) -> Device:
        """A graphics processor where one is asked for, or servers that hold layers."""
        if config.rpc_servers:
            return graphics_device(rpc_processor(config.rpc_servers))
        if config.wants_graphics:
            return graphics_device(find_processor(config.device))
        return super().device(config)

    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        """Of a context."""
        keeps = bool(config.prefix_cache)
        if choice.device.on_cpu:
            return GgufMemory(choice.bundle, keeps=keeps)
        processor = _processor(choice.device)
        return GgufMemory(choice.bundle, processor.shared, keeps=keeps, head_here=not processor.keeps_head)

    def offload(self, choice: BackendChoice, config: LoadConfig) -> Callable[[Configuration], int] | None:
        """As many layers as are asked for, or as fit into the memory that is free now."""
        if choice.device.on_cpu:
            return None
        gguf, processor = choice.bundle.gguf, _processor(choice.device)
        if isinstance(config.gpu_layers, int):
            asked = Division.of(gguf, config.gpu_layers).gpu_layers
            return lambda configuration: asked
        return lambda configuration: layers_that_fit(gguf, processor, configuration)

    def tokenizer_mode(self, bundle: Bundle) -> TokenizerMode:
        """llama.cpp has the vocabulary in memory whether it is used or not."""
        return "model"

    def tokenizer(self, backend: Backend) -> TokenizerLike:
        """That vocabulary."""
        from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
        from edgeinfer.runtime.backends.llamacpp.tokenizer import LlamaTokenizer

        assert isinstance(backend, LlamaCppBackend), "made by this kind"
        return LlamaTokenizer(backend.vocabulary)

    def make(self, order: BackendOrder) -> Backend:
        """A context."""
        if order.device.on_cpu:
            return self._make(order, None)
        layers = order.configuration.gpu_layers
        try:
            return self._make(order, Offload(_processor(order.device), layers) if layers else None)
        except (BundleError, BackendError) as error:
            if order.device.servers:
                raise
            raise device_error(order.device, error.message) from error

    def _make(self, order: BackendOrder, offload: Offload | None) -> Backend:
        from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend

        plan = order.configuration
        return LlamaCppBackend(
            order.bundle,
            plan.context,
            threads=order.threads,
            adaptive_threads=order.config.threads is None,
            kv=plan.kv,
            weights=plan.weights,
            chunk=plan.prefill_chunk,
            draft_rows=plan.draft_max + 1,
            # As many paths as a tree can have.
            sequences=plan.draft_max + 1,
            expert_count=plan.expert_count,
            offload=offload,
            progress=order.progress,
            adapters=order.config.adapters,
        )


def _processor(device: Device) -> GraphicsProcessor:
    """The graphics processor, or the servers, that a device names."""
    if device.servers:
        return rpc_processor(device.servers)
    return find_processor(device.name)
