"""Graphics processors that the installed llama.cpp runs layers on: which there are, and which one is meant."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from edgeinfer.bundle.gguf.library import SUPPORTED, device_fault, functions, is_installed, llama_library, logged_error
from edgeinfer.errors import DeviceError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.devices.contract import CPU_MEMORY, Device, Traits
from edgeinfer.runtime.devices.providers import device_error

# ggml_backend_dev_type.
_DISCRETE, _INTEGRATED = 1, 2
# Apple's processors report a type of their own memory, and have the system's.
_METAL = "MTL"
_SPELLED = {"metal": _METAL.lower()}
_TRAITS = Traits(
    dynamic_shapes=True, in_place_kv=True, quantized_kv=True, branches=False, tree_bias=True, custom_ops=False
)


@dataclass(frozen=True)
class GraphicsProcessor:
    """A device of llama.cpp.

    Attributes:
        name: llama.cpp's, such as Vulkan0.
        description: of the hardware, in words.
        free, total: bytes of its memory.
        shared: its memory is the system's.
        pointers: llama.cpp's own, of all devices that are taken for one.
        servers: addresses of the machines that it is made of; none where it is this machine's.
    """

    name: str
    description: str
    free: int
    total: int
    shared: bool
    pointers: tuple[int, ...]
    servers: tuple[str, ...] = ()

    @property
    def keeps_head(self) -> bool:
        """Whether the norm and the matrix that give logits lie there, where any layers do: logits are too long to be
        sent."""
        return not self.servers


@dataclass(frozen=True)
class Offload:
    """The last layers of a model on a graphics processor.

    Attributes:
        layers: how many; the norm and the matrix that give logits count as one.
    """

    processor: GraphicsProcessor
    layers: int


def graphics_processors() -> tuple[GraphicsProcessor, ...]:
    """All that llama.cpp finds, those with memory of their own first."""
    lib = llama_library()
    if not lib.llama_supports_gpu_offload():
        return ()
    ggml = functions(lib._lib._name)
    devices = (ggml.ggml_backend_dev_get(ctypes.c_size_t(index)) for index in range(ggml.ggml_backend_dev_count()))
    found = [_described(ggml, device) for device in devices if _type(ggml, device) in (_DISCRETE, _INTEGRATED)]
    return tuple(sorted(found, key=lambda each: each.shared))


def listed_processors() -> tuple[GraphicsProcessor, ...]:
    """As `graphics_processors`; none where llama.cpp is not installed or not usable, as loading a GGUF file tells."""
    if not is_installed():
        return ()
    try:
        return graphics_processors()
    except UsageError:
        return ()


def check_processor(processor: GraphicsProcessor) -> None:
    """Runs a model of one layer on it."""
    logged_error()
    fault = device_fault(llama_library(), processor.pointers[0])
    if fault:
        reason = logged_error()
        raise device_error(graphics_device(processor), f"{fault}: {reason}" if reason else fault)


def _type(ggml: Any, device: int) -> int:
    return int(ggml.ggml_backend_dev_type(ctypes.c_void_p(device)))


def _described(ggml: Any, device: int) -> GraphicsProcessor:
    pointer = ctypes.c_void_p(device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    name = ggml.ggml_backend_dev_name(pointer).decode("utf-8", "replace")
    description = ggml.ggml_backend_dev_description(pointer).decode("utf-8", "replace")
    shared = _type(ggml, device) == _INTEGRATED or name.startswith(_METAL)
    return GraphicsProcessor(name, description, free.value, total.value, shared, (device,))


def find_processor(name: str) -> GraphicsProcessor:
    """The one of this name in any case; the first of an interface such as vulkan; of all for "auto"."""
    found = graphics_processors()
    if not found:
        first, end = SUPPORTED
        install = f'pip install --force-reinstall --no-cache-dir "llama-cpp-python>={first},<{end}"'
        hint = f'Build one: CMAKE_ARGS="-DGGML_VULKAN=on" {install}; or with GGML_CUDA, GGML_METAL or GGML_HIP.'
        raise DeviceError("The installed llama.cpp runs on the CPU alone, or finds no graphics processor.", hint)
    wanted = _SPELLED.get(name.lower(), name.lower())
    for each in found:
        if wanted in ("auto", each.name.lower(), re.sub(r"\d+$", "", each.name).lower()):
            return each
    there = ", ".join(each.name for each in found)
    raise DeviceError(f"llama.cpp finds no device {name} here.", f"It finds {there}: use one of these.")


def graphics_device(processor: GraphicsProcessor) -> Device:
    """It as the device of a model."""
    return Device(processor.name, "llama.cpp", {}, _TRAITS, CPU_MEMORY, servers=processor.servers)
