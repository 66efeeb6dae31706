"""The plan's terms of a GGUF model, in the process and on a graphics processor, and how many layers fit there."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import DeviceError, Setting
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.llamacpp.graphics import GraphicsProcessor
from edgeinfer.runtime.backends.llamacpp.memory import (
    CODE_BYTES,
    compute_bytes,
    copied_bytes,
    device_bytes,
    device_cache_bytes,
    kv_bytes,
    loading_bytes,
    mapped_bytes,
    packed_bytes,
    session_bytes,
    state_bytes,
    vocabulary_bytes,
)
from edgeinfer.runtime.backends.llamacpp.placement import Division
from edgeinfer.runtime.planning.configuration import Configuration, Footprint, TokenizerMode

# Of free memory of a graphics processor, what is left to its driver and other programs: an eighth, and no more than
# llama.cpp's own programs leave (`fit_params_target` of common/common.h).
_LEFT_SHARE, _LEFT_BYTES = 8, 1024**3


def layers_that_fit(gguf: GgufFile, processor: GraphicsProcessor, configuration: Configuration) -> int:
    """How many of the last layers fit into the free memory of a graphics processor."""
    if not processor.free:
        message = f"The device {processor.name} does not tell how much memory is free."
        raise DeviceError(message, "Give a number of layers with " + Setting("gpu_layers") + ".")
    room = processor.free - min(processor.free // _LEFT_SHARE, _LEFT_BYTES)
    most = Division.of(gguf, 0).blocks + 1
    fitting = (layers for layers in range(most, 0, -1) if _on_device(gguf, configuration, layers) <= room)
    return next(fitting, 0)


def _on_device(gguf: GgufFile, configuration: Configuration, layers: int) -> int:
    return device_bytes(gguf, layers) + sum(_running_there(gguf, configuration, layers).values())


def _running_there(gguf: GgufFile, configuration: Configuration, layers: int) -> dict[str, int]:
    """Bytes of cache and passes on a graphics processor."""
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
    """Implements `ModelMemory`.

    Attributes:
        shared: the memory of the graphics processor, where layers run on one, is the system's, and counts.
        keeps: other conversations, by a prefix cache.
        head_here: the norm and the matrix that give logits stay in the process, where layers lie elsewhere.
    """

    bundle: Bundle
    shared: bool = False
    keeps: bool = False
    head_here: bool = False

    def import_libraries(self) -> None:
        """Imports what loading will import."""
        from edgeinfer.bundle.gguf.library import llama_library

        llama_library()

    def weights(self, configuration: Configuration) -> Footprint:
        """Repacked copies, and pages of the file."""
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
        """What lies where; memory that a graphics processor shares is the process's own."""
        if self.shared:
            return Footprint(anonymous | {"graphics": sum(device.values())}, file)
        return Footprint(anonymous, file, device)

    def tokenizer(self, keeping: TokenizerMode, *, used: bool) -> Footprint:
        """The vocabulary, which llama.cpp loads with the model."""
        return Footprint({"tokenizer": vocabulary_bytes(self.bundle.gguf)}, {})

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """While the file is read: what stays of it, and what was read of it and is not let go of yet."""
        gguf = self.bundle.gguf
        parts = {name: running.anonymous[name] for name in ("session", "tokenizer", "weights_packed")}
        raw = loading_bytes(gguf, configuration.weights)
        yield outside + Footprint(parts, {"code": CODE_BYTES, "weights_mapped": raw})
