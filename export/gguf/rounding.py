"""What llama.cpp's quantizer makes of rows in memory, as floats again; knows no models and no files."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.types import ggml_type
from edgeinfer.errors import UsageError

__all__ = ["RowQuantizer"]

Floats = NDArray[np.float32]


class RowQuantizer:
    """llama.cpp's quantizer of rows.

    Raises:
        UsageError: llama-cpp-python or the gguf package is not installed.
    """

    def __init__(self) -> None:
        try:
            self._package = import_module("gguf")
        except ModuleNotFoundError as error:
            raise UsageError(
                "The gguf package is not installed.", "Install the gguf extra: edgeinfer[gguf]."
            ) from error
        self._quantize = _function(llama_library())

    def approximate(self, rows: Floats, kind: str, importance: Floats | None = None) -> Floats:  # (N, K) -> (N, K)
        """The rows as a type of tensors holds them; whole blocks of it.

        Args:
            kind: none that needs importance data.
            importance: of columns, (K,).
        """
        into = ggml_type(kind)
        rows = np.ascontiguousarray(rows, np.float32)
        count, width = rows.shape
        packed = np.empty((count, into.row_bytes(width)), np.uint8)
        weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pointer = None if weights is None else weights.ctypes.data
        self._quantize(into.number, rows.ctypes.data, packed.ctypes.data, 0, count, width, pointer)
        if kind == "F16":
            return packed.view(np.float16).astype(np.float32)
        values: Floats = self._package.dequantize(packed, self._package.GGMLQuantizationType[kind])
        return values.reshape(count, width)


def _function(lib: Any) -> Any:
    """ggml's quantizer of rows, which the bindings do not list."""
    found = lib._lib.ggml_quantize_chunk
    found.restype = ctypes.c_size_t
    found.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return found
