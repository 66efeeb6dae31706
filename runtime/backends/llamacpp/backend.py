"""The backend of GGUF files: llama.cpp's passes and cache behind the contract. Rows of passes of different sizes agree
to rounding, not bit for bit: which kernel multiplies depends on the size of the pass."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.bundle.geometry import FLOAT16
from edgeinfer.bundle.gguf.library import logged_error
from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import digest_of
from edgeinfer.core.errors import AdapterError, BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassCancelledError, PassResult
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.llamacpp.cache import LlamaCache, RecurrentCache, TreePaths
from edgeinfer.runtime.backends.llamacpp.context import ABORTED, ContextOptions, LlamaContext, RowSteps
from edgeinfer.runtime.backends.llamacpp.graphics import Offload
from edgeinfer.runtime.backends.llamacpp.memory import PADDING, SEQUENCES, drafted_at_once, kv_bytes
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel, features

# Of a copied token besides its rows: position and sequence, and a share of what each copy begins with.
_CELL_BYTES = 64


class LlamaAdapters:
    """Adapters of a model of llama.cpp, which frees them together with the model."""

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
        """Use one adapter, or none, in the next passes of a context."""
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


class LlamaCppBackend(OneSequenceBackend):
    """Implements `contract.Backend` for GGUF bundles. Longer passes than `chunk` are run in parts, and of more than
    `draft_rows` rows logits are computed in parts; `sequences` limits the paths of a draft tree. It holds one text:
    which kernel multiplies depends on the size of a pass, so a row that shared one would not be what it is alone."""

    name = "llamacpp"

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        adaptive_threads: bool = False,
        kv: str = FLOAT16,
        weights: str = "packed",
        chunk: int = 64,
        draft_rows: int = 16,
        sequences: int = SEQUENCES,
        expert_count: int | None = None,
        offload: Offload | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.geometry, self._capacity = bundle.manifest.geometry, capacity
        self.vocabulary = LlamaModel(
            bundle.gguf, weights=weights, expert_count=expert_count, offload=offload, progress=progress
        )
        recurrent = self.vocabulary.recurrent
        self.capabilities = _within(bundle.manifest.capabilities, recurrent, sequences)
        options = ContextOptions(
            cells=capacity,
            kv=kv,
            threads=threads,
            adaptive_threads=adaptive_threads,
            # What padding adds to the rows of a draft has a place too.
            batch=min(max(chunk, draft_rows + PADDING), capacity),
            outputs=min(draft_rows + PADDING, capacity),
            # Of states each sequence takes its own; nothing is in passing there.
            sequences=0 if recurrent else sequences,
            rollback=drafted_at_once(bundle.gguf, draft_rows - 1) if recurrent else 0,
            offloaded=offload is not None,
        )
        try:
            self._context = LlamaContext(self.vocabulary.lib, self.vocabulary.pointer, options)
        except BackendError:
            self.vocabulary.close()
            raise
        self.kernel = " ".join(("llama.cpp", *features(self.vocabulary.lib)))
        try:
            self._adapters = LlamaAdapters(self.vocabulary.lib, self.vocabulary.pointer, adapters or {})
        except AdapterError:
            self.close()
            raise
        self.adapters = self._adapters.digests
        self._adapter: str | None = None  # that passes have now
        # Rows that only fill a pass up would have a state too, and save nothing on a graphics processor.
        self._row_steps = RowSteps(0.0, 0.0) if recurrent or offload else RowSteps.of(bundle.gguf, weights)
        self._cells = self._context.cells
        whole = kv_bytes(bundle.gguf, kv, capacity)
        form = f"{self.kernel}, {whole} bytes of {bundle.gguf.metadata.text('general.architecture')}, {kv}"
        self._kind = kv, form, whole // self._cells + _CELL_BYTES  # see `LlamaCache`
        self._gathered = np.zeros((0, self.geometry.vocab_size), np.float32)

    def _new_cache(self, capacity: int) -> LlamaCache:
        self._context.clear()
        kind = RecurrentCache if self.vocabulary.recurrent else LlamaCache
        return kind(self._context, self._kind, capacity, self.vocabulary.window)

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, LlamaCache), "sequences are made here"
        if cache.adapter != self._adapter:
            self._adapters.choose(self._context.pointer, cache.adapter)
            self._adapter = cache.adapter
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        cache.check_kept()
        start, size = cache.length, len(tokens)
        tree = None if batch.tree is None else TreePaths.of(batch.tree, start)
        wanted = range(start, start + size) if tree is None else [start + depth for depth in tree.depths]
        if positions.tolist() != list(wanted):
            raise BackendError(f"llama.cpp counts positions itself: {positions.tolist()} do not follow row {start}.")
        try:
            logits = (
                self._chain(cache, tokens, rows) if tree is None else self._tree(cache, tokens, positions, rows, tree)
            )
        except BaseException:
            cache.drop_pass(start, tree)
            raise
        self.vocabulary.rows(size)
        return PassResult(logits, None)

    def _chain(self, cache: LlamaCache, tokens: Ints, rows: Ints) -> Floats:  # (S,), (R,) -> (R, V)
        """Runs a chain, in as many parts as the batch and the outputs ask for."""
        options, size = self._context.options, len(tokens)
        ordered = len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())
        start = cache.length
        if cache.begin(start, size) == size <= options.batch and len(rows) <= options.outputs and ordered:
            self._context.batch.fill(tokens, start, rows)
            self._decode(size, start, len(rows))
            cache.passed(start, size)
            return self._context.logits(len(rows))
        picked, places = np.unique(rows, return_inverse=True)
        if len(picked) > len(self._gathered):
            self._gathered = np.zeros((len(picked), self.geometry.vocab_size), np.float32)
        self._run_in_parts(cache, tokens, picked)
        gathered = self._gathered[: len(picked)]
        return gathered if ordered else gathered[places]

    def _run_in_parts(self, cache: LlamaCache, tokens: Ints, picked: Ints) -> None:
        """Runs a chain part by part; the logits of these ascending rows go to `_gathered`."""
        options, first, start, done = self._context.options, cache.length, 0, 0
        while start < len(tokens):
            size = min(options.batch, cache.begin(first + start, len(tokens) - start))
            if done + options.outputs < len(picked):
                # Ends before the first row that would be one too many.
                size = min(size, int(picked[done + options.outputs]) - start)
            last = done + int(np.searchsorted(picked[done:], start + size))
            self._context.batch.fill(tokens[start : start + size], first + start, picked[done:last] - start)
            self._decode(size, first + start, last - done)
            cache.passed(first + start, size)
            self._gathered[done:last] = self._context.logits(last - done)
            start, done = start + size, last

    def _tree(self, cache: LlamaCache, tokens: Ints, positions: Ints, rows: Ints, tree: TreePaths) -> Floats:
        options, context = self._context.options, self._context
        if len(tree.paths) > options.sequences:
            message = f"A draft tree has {len(tree.paths)} paths, {options.sequences} were planned."
            raise BackendError(message, "Draft trees with fewer leaves, or load with more sequences.")
        if len(tokens) > options.batch or len(set(rows.tolist())) > options.outputs:
            message = f"A draft tree of {len(tokens)} rows is larger than {min(options.batch, options.outputs)}."
            raise BackendError(message, "Draft less, or load with more draft rows.")
        cache.branch(tree)
        picked, places = np.unique(rows, return_inverse=True)
        context.batch.fill_tree(tokens, positions, picked, tree.members)
        self._decode(len(tokens), tree.start, len(picked))
        cache.passed(tree.start, len(tokens))
        cache.pending = tree
        logits = context.logits(len(picked))
        return logits if np.array_equal(picked, rows) else logits[places]

    def _decode(self, size: int, start: int, rows: int) -> None:
        """Evaluates what the batch was filled with, so many rows that follow `start` tokens, for these logits."""
        options = self._context.options
        padding, outputs = self._row_steps.padding(size, rows)
        if size + padding > options.batch or start + size + padding > self._cells:
            padding = outputs = 0
        answer = self._context.run(size, padding, outputs if rows + outputs <= options.outputs else 0)
        if answer == 0:
            return
        if answer == ABORTED:
            raise PassCancelledError("The pass was cancelled.")
        if answer == 1:
            raise BackendError(f"A pass of {size} tokens finds no room in llama.cpp's cache.")
        reason = logged_error() or f"answer {answer}"
        raise BackendError(f"llama.cpp failed in a pass of {size} tokens: {reason}.")

    def cancel(self) -> None:
        self._context.cancel()

    def nbytes(self) -> dict[str, int]:
        kv = max(self._context.kv_bytes, self._kv_bytes)
        return {"kv": kv, "buffers": self._context.buffer_bytes + self._gathered.nbytes}

    def close(self) -> None:
        """Frees the context and the model; views of logits are invalid from then on."""
        self._context.close()
        self.vocabulary.close()


def _within(able: Capabilities, recurrent: bool, sequences: int) -> Capabilities:
    """A model's capabilities in a context of so many sequences; each path of a tree takes one."""
    if recurrent:
        return dataclasses.replace(able, tree=False, copies=False)
    return dataclasses.replace(able, tree=able.tree and sequences > 1)
