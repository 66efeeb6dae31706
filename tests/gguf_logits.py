"""Logits of a GGUF file through llama.cpp's low-level calls, token ids in; knows nothing of texts or measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.errors import BackendError

_ROWS = 128


class GgufModel:
    """A GGUF file in llama.cpp, on the CPU with a float32 cache and without flash attention.

    Raises:
        BackendError: llama.cpp cannot load it.
    """

    def __init__(self, path: Path, context: int, threads: int = 1) -> None:
        self._lib = lib = llama_library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, _ROWS, _ROWS
        options.n_threads = options.n_threads_batch = threads
        # The cache must not blur what the weights do.
        options.type_k = options.type_v = lib.GGML_TYPE_F32
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(self._model, options) if self._model else None
        if not self._context:
            raise BackendError(f"llama.cpp cannot load {path}.", "Write the file again.")
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._batch = lib.llama_batch_init(_ROWS, 0, 1)

    def logits(self, tokens: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
        """The logits after each token of a text, (R, V) at a time, which the next overwrite; empties the cache.

        Raises:
            BackendError: the text does not fit the context.
        """
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        for start in range(0, len(tokens), _ROWS):
            yield self._forward(tokens[start : start + _ROWS], start)

    def _forward(self, tokens: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        if self._lib.llama_decode(self._context, batch) != 0:
            raise BackendError("llama.cpp cannot evaluate the text.", "Give a larger context.")
        pointer = self._lib.llama_get_logits(self._context)
        rows: npt.NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(len(tokens), self._vocab_size))
        return rows

    def close(self) -> None:
        """Frees the model."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
