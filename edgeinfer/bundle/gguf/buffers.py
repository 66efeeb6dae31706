"""The orders in which llama.cpp may keep weights in memory: which there are and which not to use; knows no file.

llama.cpp compiled by GCC for a processor with AMX stops the whole program at the first pass over several tokens: GCC
drops most of the tile configuration, which it takes for stores that nobody reads (seen with GCC 12). Nothing else
uses these units, so weights are kept in the order of the other vector instructions instead.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["cpu_device", "extra_buffer_types", "functions", "without_amx"]

_CPU = 0  # ggml_backend_dev_type
_AMX = b"AMX"
_RESULTS: dict[str, Any] = {
    "ggml_backend_buft_alloc_buffer": ctypes.c_void_p,
    "ggml_backend_buft_name": ctypes.c_char_p,
    "ggml_backend_dev_backend_reg": ctypes.c_void_p,
    "ggml_backend_dev_by_type": ctypes.c_void_p,
    "ggml_backend_dev_supports_op": ctypes.c_bool,
    "ggml_backend_reg_get_proc_address": ctypes.c_void_p,
    "ggml_init": ctypes.c_void_p,
    "ggml_mul_mat": ctypes.c_void_p,
    "ggml_new_tensor_2d": ctypes.c_void_p,
}


@cache
def functions(name: str) -> Any:
    """ggml's functions in the library of this name, whose pointers go in as `c_void_p` and come out as numbers.

    Raises:
        OSError, AttributeError: it has not all of them.
    """
    ggml = ctypes.CDLL(name)
    for function, result in _RESULTS.items():
        getattr(ggml, function).restype = result
    return ggml


def cpu_device(ggml: Any) -> ctypes.c_void_p:
    """The processor."""
    return ctypes.c_void_p(ggml.ggml_backend_dev_by_type(_CPU))


def extra_buffer_types(ggml: Any) -> Any:
    """llama.cpp's own array of what it tries before plain memory, ended by a null pointer; None where there is none."""
    registry = ctypes.c_void_p(ggml.ggml_backend_dev_backend_reg(cpu_device(ggml)))
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    ask = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    return ask(cpu_device(ggml)) or None


def without_amx(ggml: Any) -> bool:
    """Takes AMX's order off the list, for all models that this process loads from now on; whether it was there."""
    kinds = extra_buffer_types(ggml)
    source = target = 0
    while kinds is not None and kinds[source]:
        if ggml.ggml_backend_buft_name(ctypes.c_void_p(kinds[source])) != _AMX:
            kinds[target] = kinds[source]
            target += 1
        source += 1
    for index in range(target, source):
        kinds[index] = None
    return target != source
