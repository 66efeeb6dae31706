"""Graphics processors, and machines reached by llama.cpp's RPC, that hold layers of a GGUF model."""

from __future__ import annotations

import ctypes
import logging
import re
import socket
from functools import cache
from typing import Any

from edgeinfer.bundle.gguf.library import SUPPORTED, device_fault, functions, is_installed, llama_library, logged_error
from edgeinfer.core.errors import CapabilityError, DeviceError, RemoteError, UsageError, shown
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.devices.providers import CPU_MEMORY, Device, Traits, device_error

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
    name: str  # llama.cpp's, such as Vulkan0
    description: str
    # `free`, `total`: bytes of its memory.
    free: int
    total: int
    shared: bool  # its memory is the system's
    pointers: tuple[int, ...]  # llama.cpp's own, of all devices that are taken for one
    servers: tuple[str, ...] = ()  # addresses of the machines that it is made of; none where it is this machine's

    @property
    def keeps_head(self) -> bool:
        """Whether the norm and the matrix that give logits lie there, where any layers do: logits are too long to be
        sent."""
        return not self.servers


@dataclass(frozen=True)
class Offload:
    """The last layers of a model on a graphics processor."""

    processor: GraphicsProcessor
    layers: int  # number of layers; the norm and the matrix that give logits count as one


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
    """Describe a graphics processor as the device of a model."""
    return Device(processor.name, "llama.cpp", {}, _TRAITS, CPU_MEMORY, servers=processor.servers)


# llama.cpp ends the process where an RPC server is missing, speaks another version or breaks off, so each is asked in
# Python first. Its makers call it "fragile and insecure": it has no keys and no encryption, and anyone who reaches a
# server, or runs one, may be able to run code on the other side (https://github.com/ggml-org/llama.cpp, tools/rpc).
_ADD_SERVER = b"ggml_backend_rpc_add_server"
# Seconds that a server has to answer.
_ANSWER_S = 5.0
# The first message, RPC_CMD_HELLO with no capabilities, and the major version that the answer must have
# (ggml/src/ggml-rpc/ggml-rpc.cpp and ggml/include/ggml-rpc.h of llama-cpp-python 0.3.36).
_CAPABILITIES = 24
_HELLO = bytes([14]) + _CAPABILITIES.to_bytes(8, "little") + bytes(_CAPABILITIES)
_ANSWERED, _VERSION = 4 + _CAPABILITIES, (7, 0)

_DESCRIPTION = "llama.cpp's RPC"
# As tools/rpc/README.md has it.
_WARNING = "llama.cpp's makers call its RPC fragile and insecure: never use it on an open network."

_log = logging.getLogger("edgeinfer")


def rpc_processor(servers: tuple[str, ...]) -> GraphicsProcessor:
    """The devices of these servers as one with the memory of all; llama.cpp divides layers by free memory."""
    ggml = functions(llama_library()._lib._name)
    pointers = tuple(pointer for server in servers for pointer in _devices(server))
    if not pointers:
        raise RemoteError("The RPC servers have no devices.", "Start each as: ggml-rpc-server --host ADDRESS")
    free = total = 0
    for pointer in pointers:
        memory = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(ctypes.c_void_p(pointer), *map(ctypes.byref, memory))
        free, total = free + memory[0].value, total + memory[1].value
    return GraphicsProcessor("RPC " + ", ".join(servers), _DESCRIPTION, free, total, False, pointers, servers)


@cache
def _devices(server: str) -> tuple[int, ...]:
    """llama.cpp's devices of a server, to which it stays connected; a server may serve one connection at a time."""
    lib = llama_library()
    add = _adding(lib)
    _check(server)
    ggml = functions(lib._lib._name)
    registry = ctypes.c_void_p(add(server.encode()))
    count = ggml.ggml_backend_reg_dev_count(registry) if registry else 0
    _log.warning("%s gets the text's activations unencrypted. %s", server, _WARNING)
    return tuple(ggml.ggml_backend_reg_dev_get(registry, ctypes.c_size_t(index)) for index in range(count))


def _adding(lib: Any) -> Any:
    ggml = functions(lib._lib._name)
    registry = ggml.ggml_backend_reg_by_name(b"RPC") if lib.llama_supports_rpc() else None
    address = ggml.ggml_backend_reg_get_proc_address(ctypes.c_void_p(registry), _ADD_SERVER) if registry else None
    if not address:
        first, end = SUPPORTED
        install = f'pip install --force-reinstall --no-cache-dir "llama-cpp-python>={first},<{end}"'
        hint = f'Build one with it: CMAKE_ARGS="-DGGML_RPC=on" {install}'
        raise CapabilityError("The installed llama.cpp was built without RPC.", hint)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)


def _check(server: str) -> None:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(_HELLO)
            answer = b""
            while len(answer) < 8 + _ANSWERED and (part := connection.recv(8 + _ANSWERED - len(answer))):
                answer += part
    except OSError as error:
        message = f"The RPC server {server} cannot be reached: {shown(str(error))}."
        raise RemoteError(message, "Start it there with: ggml-rpc-server --host ADDRESS", lost=True) from error
    version = tuple(answer[8:10])
    if len(answer) < 8 + _ANSWERED or int.from_bytes(answer[:8], "little") != _ANSWERED:
        raise RemoteError(f"{server} answers as no RPC server of llama.cpp.", "Look which port it listens on.")
    if version[0] != _VERSION[0] or version[1] > _VERSION[1]:
        theirs, ours = (".".join(map(str, each)) for each in (version, _VERSION))
        message = f"The RPC server {server} speaks version {theirs}, and llama.cpp here {ours}."
        raise RemoteError(message, "Build both of the same version of llama.cpp.")
