"""The factory of the backend that runs GGUF files on llama.cpp, and its terms of a memory plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from edgeinfer.bundle.geometry import FLOAT16, FLOAT32, LLAMA_KV
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, BundleError, DeviceError, Setting
from edgeinfer.core.options.decoding import MOST_DRAFTED
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder
from edgeinfer.runtime.backends.llamacpp.graphics import (
    GraphicsProcessor,
    Offload,
    find_processor,
    graphics_device,
    rpc_processor,
)
from edgeinfer.runtime.backends.llamacpp.memory import (
    CODE_BYTES,
    Division,
    compute_bytes,
    copied_bytes,
    device_bytes,
    device_cache_bytes,
    drafted_at_once,
    fits_blocks,
    is_recurrent,
    kv_bytes,
    loading_bytes,
    mapped_bytes,
    packed_bytes,
    session_bytes,
    state_bytes,
    vocabulary_bytes,
)
from edgeinfer.runtime.devices.providers import Device, device_error
from edgeinfer.runtime.planning.facts import Configuration, Footprint, ModelMemory, TokenizerMode
from edgeinfer.runtime.text.contract import TokenizerLike

# Of free memory of a graphics processor, what is left to its driver and other programs: an eighth, and no more than
# llama.cpp's own programs leave (`fit_params_target` of common/common.h).
_LEFT_SHARE, _LEFT_BYTES = 8, 1024**3


def layers_that_fit(gguf: GgufFile, processor: GraphicsProcessor, configuration: Configuration) -> int:
    """Number of last layers that fit into the free memory of a graphics processor."""
    if not processor.free:
        message = f"The device {processor.name} does not tell how much memory is free."
        raise DeviceError(message, "Give a number of layers with " + Setting("gpu_layers") + ".")
    room = processor.free - min(processor.free // _LEFT_SHARE, _LEFT_BYTES)
    most = Division.of(gguf, 0).blocks + 1
    for layers in range(most, 0, -1):
        if device_bytes(gguf, layers) + sum(_running_there(gguf, configuration, layers).values()) <= room:
            return layers
    return 0


def _running_there(gguf: GgufFile, configuration: Configuration, layers: int) -> dict[str, int]:
    if not layers:
        return {}
    kv, context = configuration.kv, configuration.context
    cache = device_cache_bytes(gguf, kv, context, configuration.draft_max, layers)
    return {"kv": cache, "activations": _activations(gguf, configuration)}


def _activations(gguf: GgufFile, configuration: Configuration) -> int:
    outputs = configuration.draft_max + 1
    batch = max(configuration.prefill_chunk, outputs)
    return compute_bytes(gguf, configuration.kv, configuration.context, batch, outputs)


@dataclass(frozen=True)
class GgufMemory:
    """Implements `ModelMemory`."""

    bundle: Bundle
    shared: bool = False  # the memory of the graphics processor, where layers run on one, is the system's, and counts
    keeps: bool = False  # other conversations, by a prefix cache
    head_here: bool = False  # the norm and the matrix that give logits stay in the process, where layers lie elsewhere

    def import_libraries(self) -> None:
        from edgeinfer.bundle.gguf.library import llama_library

        llama_library()

    def weights(self, configuration: Configuration) -> Footprint:
        gguf, mode, layers = self.bundle.gguf, configuration.weights, configuration.gpu_layers
        head = device_bytes(gguf, 1) if layers and self.head_here else 0
        copied, read = packed_bytes(gguf, mode, layers), mapped_bytes(gguf, mode, layers)
        if not gguf.mappable:
            copied, read = copied + read, 0
        there = {"weights": device_bytes(gguf, layers) - head} if layers else {}
        copied, read = (copied, read + head) if mode == "mapped" else (copied + head, read)
        return self._placed({"weights_packed": copied}, {"weights_mapped": read}, there)

    def running(self, configuration: Configuration) -> Footprint:
        """Context, cache and passes; all of them are taken when the model is loaded."""
        gguf, there = self.bundle.gguf, _running_there(self.bundle.gguf, configuration, configuration.gpu_layers)
        cache = kv_bytes(gguf, configuration.kv, configuration.context) + state_bytes(gguf, configuration.draft_max)
        copied = copied_bytes(gguf, configuration.kv, configuration.context, keeps=self.keeps)
        here = {"session": session_bytes(gguf), "kv": cache - there.get("kv", 0) + copied}
        return self._placed(here | {"activations": _activations(gguf, configuration)}, {"code": CODE_BYTES}, there)

    def _placed(self, anonymous: dict[str, int], file: dict[str, int], device: dict[str, int]) -> Footprint:
        """The footprint; memory that a graphics processor shares is the process's own."""
        if self.shared:
            return Footprint(anonymous | {"graphics": sum(device.values())}, file)
        return Footprint(anonymous, file, device)

    def tokenizer(self, keeping: TokenizerMode, *, used: bool) -> Footprint:
        return Footprint({"tokenizer": vocabulary_bytes(self.bundle.gguf)}, {})

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """Memory while the file is read: what stays, and parts that are read and not yet released."""
        gguf = self.bundle.gguf
        parts = {name: running.anonymous[name] for name in ("session", "tokenizer", "weights_packed")}
        raw = loading_bytes(gguf, configuration.weights)
        yield outside + Footprint(parts, {"code": CODE_BYTES, "weights_mapped": raw})


class LlamaCppFactory(BackendFactory):
    """GGUF files, in a bundle's directory or on their own."""

    modes_differ: ClassVar[bool] = True
    loads_experts: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    tunes: ClassVar[tuple[str, ...]] = ("threads", "weights", "prefill_chunk")

    def engine(self) -> str:
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
        from edgeinfer.bundle.gguf.library import llama_library
        from edgeinfer.runtime.backends.llamacpp.model import features

        return " ".join(("llama.cpp", *features(llama_library())))

    def device(self, config: LoadOptions) -> Device:
        """A graphics processor where one is asked for, or servers that hold layers."""
        if config.rpc_servers:
            return graphics_device(rpc_processor(config.rpc_servers))
        if config.wants_graphics:
            return graphics_device(find_processor(config.device))
        return super().device(config)

    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        keeps = bool(config.prefix_cache)
        if device.on_cpu:
            return GgufMemory(bundle, keeps=keeps)
        processor = _processor(device)
        return GgufMemory(bundle, processor.shared, keeps=keeps, head_here=not processor.keeps_head)

    def offload(self, bundle: Bundle, device: Device, config: LoadOptions) -> Callable[[Configuration], int] | None:
        """As many layers as are asked for, or as fit into the memory that is free now."""
        if device.on_cpu:
            return None
        gguf, processor = bundle.gguf, _processor(device)
        if isinstance(config.gpu_layers, int):
            asked = Division.of(gguf, config.gpu_layers).gpu_layers
            return lambda configuration: asked
        return lambda configuration: layers_that_fit(gguf, processor, configuration)

    def tokenizer_mode(self, bundle: Bundle) -> TokenizerMode:
        """llama.cpp has the vocabulary in memory whether it is used or not."""
        return "model"

    def tokenizer(self, backend: Backend) -> TokenizerLike:
        from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
        from edgeinfer.runtime.backends.llamacpp.tokenizer import LlamaTokenizer

        assert isinstance(backend, LlamaCppBackend), "made by this kind"
        return LlamaTokenizer(backend.vocabulary)

    def make(self, order: BackendOrder) -> Backend:
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
    if device.servers:
        return rpc_processor(device.servers)
    return find_processor(device.name)
