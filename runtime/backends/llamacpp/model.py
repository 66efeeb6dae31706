"""A GGUF file loaded by llama.cpp: which of its weights are copied and which stay in the file."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from edgeinfer.bundle.gguf.library import llama_library, logged_error
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.core.errors import BundleError, TokenizerError
from edgeinfer.runtime.backends.llamacpp.graphics import Offload
from edgeinfer.runtime.backends.llamacpp.memory import looks_up, packed_overrides
from edgeinfer.runtime.system.memory import MappedFile, release_freed
from edgeinfer.runtime.weights.weight_pages import LookedUp

# Pages of the file that loading may leave behind before they are let go.
_LOADED_BYTES = 32 * 1024**2
_EMBEDDING = "token_embd.weight"
_Progress = Callable[[str, int, int], None]


class LlamaModel:
    """A model file in memory, with its vocabulary, until `close`: "packed" into copies in the order the kernels like
    best, "mapped" from the file, or with the "experts" of mixtures mapped and the rest packed."""

    def __init__(
        self,
        gguf: GgufFile,
        *,
        weights: str = "packed",
        expert_count: int | None = None,
        offload: Offload | None = None,
        progress: _Progress | None = None,
    ) -> None:
        self.lib = llama_library()
        self.gguf = gguf
        self._paths = [split.path for split in gguf.splits]
        self._lock = Lock()
        pointers = () if offload is None else offload.processor.pointers
        self._devices = (ctypes.c_void_p * (len(pointers) + 1))(*pointers)
        self._head_here = offload is not None and not offload.processor.keeps_head
        self._gpu_layers = 0 if offload is None else offload.layers
        self.pointer = self._load(gguf, weights, expert_count, progress)
        self._vocabulary = self.lib.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(self.lib.llama_vocab_n_tokens(self._vocabulary))
        self._files = [MappedFile(path) for path in self._paths]
        if weights != "mapped":
            self.drop_pages()
        release_freed()
        self._looked_up = self._watch_embedding(gguf, weights)
        try:
            self._check_memory(gguf.path)
        except BundleError:
            self.close()
            raise

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window see; 0 where there are none."""
        return int(self.lib.llama_model_n_swa(self.pointer))

    @property
    def recurrent(self) -> bool:
        """Whether some layers, or all, keep a state instead of keys and values."""
        asked = (self.lib.llama_model_is_recurrent, self.lib.llama_model_is_hybrid)
        return any(bool(is_so(self.pointer)) for is_so in asked)

    @contextmanager
    def vocabulary(self) -> Iterator[Any]:
        """llama.cpp's vocabulary, which stays while this is open."""
        with self._lock:
            if self._vocabulary is None:
                raise TokenizerError("The model of this tokenizer was closed.", "Load it again.")
            yield self._vocabulary

    def _load(self, gguf: GgufFile, weights: str, expert_count: int | None, progress: _Progress | None) -> Any:
        lib = self.lib
        params = lib.llama_model_default_params()
        # Without a list llama.cpp takes all graphics processors, and memory on each.
        params.devices = ctypes.addressof(self._devices)
        params.n_gpu_layers = self._gpu_layers
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if gguf.mappable else lib.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = weights == "packed"
        kept: list[Any] = []
        overrides = packed_overrides(lib, gguf, head=self._head_here, rest=weights == "experts")
        if overrides is not None:
            kept.append(overrides)
            params.tensor_buft_overrides = ctypes.cast(kept[-1], ctypes.c_void_p)
        if expert_count is not None:
            kept.append(_overridden(lib, gguf, expert_count))
            params.kv_overrides = kept[-1]
        kept.append(lib.llama_progress_callback(self._follow(weights, gguf, progress)))
        params.progress_callback = kept[-1]
        logged_error()
        pointer = lib.llama_model_load_from_file(os.fsencode(gguf.path), params)
        if not pointer:
            reason = logged_error() or "no reason given"
            hint = "Download the file again, or take one that this version of llama.cpp knows."
            raise BundleError(f"llama.cpp cannot load {gguf.path}: {reason}.", hint)
        return pointer

    def _follow(self, weights: str, gguf: GgufFile, progress: _Progress | None) -> Callable[[float, Any], bool]:
        """Reports progress, and lets go of the pages that were copied from, which would else all stay to the end."""
        total, released = gguf.tensor_bytes, 0

        def follow(share: float, _: Any) -> bool:
            nonlocal released
            done = int(share * total)
            # Mapping the file has read all of it; the first call comes before anything is copied.
            if weights != "mapped" and (done == 0 or done - released >= _LOADED_BYTES):
                released = done
                for path in self._paths:
                    MappedFile(path).release()
            if progress is not None:
                progress("Loading", done, total)
            return True

        return follow

    def _watch_embedding(self, gguf: GgufFile, weights: str) -> LookedUp | None:
        """The embedding's pages where rows of it are only looked up."""
        if not looks_up(gguf, weights, self._gpu_layers):
            return None
        table = gguf.by_name[_EMBEDDING]
        return LookedUp(self._files[table.split].part([(table.offset, table.nbytes)]))

    def rows(self, count: int) -> None:
        if self._looked_up is not None:
            self._looked_up.rows(count)

    def _check_memory(self, path: Path) -> None:
        lib = self.lib
        kinds = {
            "Models that write by diffusion are not supported": lib.llama_model_is_diffusion,
            "Models with an encoder are not supported": lib.llama_model_has_encoder,
        }
        for what, is_so in kinds.items():
            if is_so(self.pointer):
                raise BundleError(f"{what}: {path}.", "Choose another, such as those of: edgeinfer models --catalog")

    def drop_pages(self) -> None:
        """Lets go of the file's pages, which come back when they are read."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Frees it; contexts must be gone before."""
        with self._lock:
            if self.pointer:
                self.lib.llama_model_free(self.pointer)
                for path in self._paths:
                    MappedFile.forget(path)
            self.pointer = self._vocabulary = None
            self._files = []


def _overridden(lib: Any, gguf: GgufFile, expert_count: int) -> Any:
    """The list of one other value for the metadata, and the empty entry that ends it."""
    architecture = gguf.metadata.get("general.architecture")
    entries = (lib.llama_model_kv_override * 2)()
    entries[0].tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
    entries[0].key = f"{architecture}.expert_used_count".encode()
    entries[0].value.val_i64 = expert_count
    return entries


def features(lib: Any) -> tuple[str, ...]:
    text = lib.llama_print_system_info().decode("ascii", "replace")
    return tuple(name for name, value in re.findall(r"(\w+) = (\d+)", text) if value != "0")
