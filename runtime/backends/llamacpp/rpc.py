"""Machines that hold layers of a GGUF model, by llama.cpp's RPC: whether they answer, and what memory they have.

llama.cpp ends the process where such a server is not there, speaks another version or breaks off, so each is asked in
Python before. Its makers call it "fragile and insecure": it has no keys and no encryption, and anyone who reaches a
server, or runs one, may be able to run code on the other side (https://github.com/ggml-org/llama.cpp, tools/rpc).
"""

from __future__ import annotations

import ctypes
import logging
import socket
from functools import cache
from typing import Any

from edgeinfer.bundle.gguf.library import SUPPORTED, functions, llama_library
from edgeinfer.errors import CapabilityError, RemoteError, shown
from edgeinfer.runtime.backends.llamacpp.graphics import GraphicsProcessor

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
    """The devices of these servers, as one that has the memory of all; llama.cpp divides layers by what is free."""
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
    """llama.cpp's function that adds a server."""
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
    """Says hello to a server."""
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
