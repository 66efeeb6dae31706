"""llama.cpp's own quantizer on GGUF files, with or without importance data; knows nothing of what they are worth."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.gguf_model import llama_library
from edgeinfer.errors import BackendError, UsageError

__all__ = ["FILE_TYPES", "NEEDS_IMPORTANCE", "quantize_gguf", "tensor_sizes"]

FILE_TYPES = (
    "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_S", "Q3_K_M",
    "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0",
)  # fmt: skip
# llama.cpp refuses these without importance data.
NEEDS_IMPORTANCE = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K_S", "IQ3_XXS"})


def quantize_gguf(
    source: Path, target: Path, kind: str, importance: Mapping[str, npt.NDArray[np.float32]] | None = None
) -> None:
    """Writes a float GGUF file again in one of llama.cpp's file types, as its command line would.

    Args:
        kind: one of FILE_TYPES.
        importance: mean squared input of every column, by llama.cpp's names of tensors: (K,), or (E * K,) of experts.

    Raises:
        UsageError: the type is unknown, or llama-cpp-python is not installed.
        BackendError: llama.cpp refuses.
    """
    lib = llama_library()
    code = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
    if code is None:
        raise UsageError(f"llama.cpp has no file type {kind!r}.", f"Choose of {', '.join(FILE_TYPES)}.")
    params = lib.llama_model_quantize_default_params()
    params.ftype = code
    params.nthread = 1
    entries = _entries(lib, importance or {})
    if importance:
        params.imatrix = entries
    status = lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise BackendError(f"llama.cpp cannot quantize {source} to {kind}.", "Choose another type.")


def _entries(lib: Any, importance: Mapping[str, npt.NDArray[np.float32]]) -> Any:
    """The array of llama.cpp's structs, which an entry without a name ends. It points into the arrays given."""
    entries = (lib.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    return entries


def tensor_sizes(path: Path) -> tuple[int, int, dict[str, int]]:
    """Weights of a GGUF file, the bytes of their tensors without any metadata, and the weights by type of tensor.

    Raises:
        UsageError: the gguf package is not installed.
    """
    try:
        gguf = import_module("gguf")
    except ModuleNotFoundError as error:
        raise UsageError("The gguf package is not installed.", "Install the gguf extra: edgeinfer[gguf].") from error
    weights, size = 0, 0
    kinds: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        count = math.prod(int(n) for n in tensor.shape)
        weights, size = weights + count, size + int(tensor.n_bytes)
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + count
    return weights, size, kinds
