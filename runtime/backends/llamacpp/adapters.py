"""Adapters of GGUF models, which llama.cpp adds to the passes of a context: files of its convert_lora_to_gguf.py.

One context has one adapter at a time, so a backend changes it between passes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.bundle.gguf.library import logged_error
from edgeinfer.bundle.writing import digest_of
from edgeinfer.errors import AdapterError, BackendError


class LlamaAdapters:
    """Adapters that are loaded beside a model of llama.cpp, which frees them with itself.

    Args:
        lib: llama.cpp.
        model: pointer of the model.
        paths: GGUF files, by name.

    Attributes:
        digests: of the files, by name.

    Raises:
        AdapterError: a file is missing, or llama.cpp does not take it for this model.
    """

    def __init__(self, lib: Any, model: Any, paths: Mapping[str, str]) -> None:
        self._lib = lib
        self._pointers: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        for name, path in paths.items():
            self.digests[name] = _digest(Path(path))
            pointer = lib.llama_adapter_lora_init(model, str(path).encode())
            if not pointer:
                message = f"llama.cpp does not take {path} as an adapter of this model: {logged_error()}."
                raise AdapterError(message, "Load the model that it was trained on, and convert it with llama.cpp.")
            self._pointers[name] = pointer

    def choose(self, context: Any, name: str | None) -> None:
        """Has the next passes of a context use one of them alone, or none."""
        chosen = [] if name is None else [self._pointers[name]]
        pointers = (self._lib.llama_adapter_lora_p_ctypes * max(1, len(chosen)))(*chosen)
        scales = (ctypes.c_float * 1)(1.0)
        if self._lib.llama_set_adapters_lora(context, pointers, len(chosen), scales) != 0:
            raise BackendError(f"llama.cpp does not use the adapter {name!r}: {logged_error()}.")


def _digest(path: Path) -> str:
    if path.suffix != ".gguf" or not path.is_file():
        message = f"{path} is no GGUF file, which adapters of GGUF models are."
        raise AdapterError(message, "Convert it with llama.cpp's convert_lora_to_gguf.py.")
    return digest_of(path)
