"""The backend of GGUF files: llama.cpp's passes and cache behind the contract; knows nothing of sampling or text.

Sequence 0 holds the text. A draft tree's other paths are sequences of their own, which share its cells, and so is what
is copied in and out; between calls only those of a tree that waits for `keep` are there. Rows of passes of different
sizes agree to rounding, not bit for bit: which kernel multiplies depends on the size of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgeinfer.bundle import Bundle
from edgeinfer.bundle.gguf.library import logged_error
from edgeinfer.bundle.kv_types import FLOAT16, LLAMA_KV
from edgeinfer.errors import BackendError, CapabilityError, UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import (
    CacheSnapshot,
    Edit,
    ForwardInput,
    ForwardOutput,
    PassCancelledError,
    check_pass,
    check_snapshot,
)
from edgeinfer.runtime.backends.llamacpp.context import ABORTED, ContextOptions, LlamaContext
from edgeinfer.runtime.backends.llamacpp.features import features
from edgeinfer.runtime.backends.llamacpp.memory import PADDING, SEQUENCES
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel
from edgeinfer.runtime.backends.llamacpp.stairs import Stairs
from edgeinfer.runtime.backends.llamacpp.state import StateCodec
from edgeinfer.runtime.backends.llamacpp.trees import Branches

__all__ = ["LlamaCppBackend"]

_TEXT = 0  # sequence
_BLOCK = 32


class LlamaCppBackend:
    """Implements `contracts.Backend` for GGUF bundles.

    Args:
        bundle: a GGUF file, or a directory with one.
        capacity: tokens the cache may hold.
        threads: of a pass.
        elastic: as of `ContextOptions`.
        kv: type of the cache, one of `kv_types.LLAMA_KV`.
        weights: "packed" into copies, "mapped" from the file, or "experts": those mapped, the rest packed.
        chunk: tokens evaluated at once; longer passes are run in parts.
        draft_rows: rows of a pass whose logits are computed at once; more are computed in parts.
        sequences: paths of a draft tree at most.
        expert_count: experts of a token in place of the model's own number.
        progress: told how much of the weights is loaded.

    Attributes:
        vocabulary: the loaded model, for `LlamaTokenizer`.

    Raises:
        BundleError: llama.cpp cannot load the file, or the model's cache cannot be cut.
        UsageError: llama.cpp is not installed, or cannot keep such a cache.
        BackendError: there is no memory for the context.
    """

    name = "llamacpp"

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        elastic: bool = False,
        kv: str = FLOAT16,
        weights: str = "packed",
        chunk: int = 64,
        draft_rows: int = 16,
        sequences: int = SEQUENCES,
        expert_count: int | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.geometry = bundle.manifest.geometry
        self.capacity = capacity
        _check_kv(kv, self.geometry.head_dim)
        self._length = 0
        self._branches: Branches | None = None
        self._codec = StateCodec(self.geometry, kv)
        self._kv = kv
        self._run_ns = 0
        self.vocabulary = LlamaModel(bundle.gguf, weights=weights, expert_count=expert_count, progress=progress)
        # Those of a sliding window lie in a cache of their own, whose copies are not read here.
        self.capabilities = replace(bundle.manifest.capabilities, copies=not self.vocabulary.windowed)
        options = ContextOptions(
            cells=capacity,
            kv=kv,
            threads=threads,
            elastic=elastic,
            # What padding adds to the rows of a draft has a place too.
            batch=min(max(chunk, draft_rows + PADDING), capacity),
            outputs=min(draft_rows + PADDING, capacity),
            sequences=sequences,
        )
        try:
            self._context = LlamaContext(self.vocabulary.lib, self.vocabulary.pointer, options)
        except BackendError:
            self.vocabulary.close()
            raise
        self._stairs = Stairs.of(bundle.gguf, weights)
        self._cells = self._context.cells
        self._gathered = np.zeros((0, self.geometry.vocab_size), np.float32)

    @property
    def kernel(self) -> str:
        """llama.cpp and the instruction sets it was compiled for."""
        return " ".join(("llama.cpp", *features(self.vocabulary.lib)))

    @property
    def length(self) -> int:
        """Tokens the cache holds, all rows of an unsettled tree counted."""
        return self._length

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside llama.cpp."""
        return self._run_ns

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`.

        Raises:
            BackendError: also where positions do not follow the rows, or a tree has more rows or paths than planned.
        """
        check_pass(self, batch)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        self._check_settled()
        start, size = self._length, len(tokens)
        branches = None if batch.tree is None else Branches.of(batch.tree, start)
        wanted = range(start, start + size) if branches is None else [start + depth for depth in branches.depths]
        if positions.tolist() != list(wanted):
            raise BackendError(f"llama.cpp counts positions itself: {positions.tolist()} do not follow row {start}.")
        try:
            logits = self._chain(tokens, rows) if branches is None else self._tree(tokens, positions, rows, branches)
        except BaseException:
            self._back_to(start, branches)
            raise
        self._length = start + size
        self.vocabulary.rows(size)
        return ForwardOutput(logits, None)

    def _chain(self, tokens: Ints, rows: Ints) -> Floats:  # (S,), (R,) -> (R, V)
        """Runs a chain, in as many parts as the batch and the outputs ask for."""
        options, size = self._context.options, len(tokens)
        ordered = len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())
        if size <= options.batch and len(rows) <= options.outputs and ordered:
            self._context.batch.fill(tokens, self._length, rows)
            self._run(size, self._length, len(rows))
            return self._context.logits(len(rows))
        picked, places = np.unique(rows, return_inverse=True)
        if len(picked) > len(self._gathered):
            self._gathered = np.zeros((len(picked), self.geometry.vocab_size), np.float32)
        self._run_in_parts(tokens, picked)
        gathered = self._gathered[: len(picked)]
        return gathered if ordered else gathered[places]

    def _run_in_parts(self, tokens: Ints, picked: Ints) -> None:
        """Runs a chain part by part; the logits of these ascending rows go to `_gathered`."""
        options, begun, done, spent = self._context.options, 0, 0, 0
        while begun < len(tokens):
            size = min(options.batch, len(tokens) - begun)
            if done + options.outputs < len(picked):
                # Ends before the first row that would be one too many.
                size = min(size, int(picked[done + options.outputs]) - begun)
            last = done + int(np.searchsorted(picked[done:], begun + size))
            self._context.batch.fill(tokens[begun : begun + size], self._length + begun, picked[done:last] - begun)
            self._run(size, self._length + begun, last - done)
            spent += self._run_ns
            self._gathered[done:last] = self._context.logits(last - done)
            begun, done = begun + size, last
        self._run_ns = spent

    def _tree(self, tokens: Ints, positions: Ints, rows: Ints, branches: Branches) -> Floats:
        options, context = self._context.options, self._context
        if len(branches.paths) > options.sequences:
            message = f"A draft tree has {len(branches.paths)} paths, {options.sequences} were planned."
            raise BackendError(message, "Draft trees with fewer leaves, or load with more sequences.")
        if len(tokens) > options.batch or len(set(rows.tolist())) > options.outputs:
            message = f"A draft tree of {len(tokens)} rows is larger than {min(options.batch, options.outputs)}."
            raise BackendError(message, "Draft less, or load with more draft rows.")
        for sequence in range(1, len(branches.paths)):
            context.copy(_TEXT, sequence, 0, branches.start)
        picked, places = np.unique(rows, return_inverse=True)
        context.batch.fill_tree(tokens, positions, picked, branches.members)
        self._run(len(tokens), branches.start, len(picked))
        self._branches = branches
        logits = context.logits(len(picked))
        return logits if np.array_equal(picked, rows) else logits[places]

    def _run(self, size: int, start: int, rows: int) -> None:
        """Evaluates what the batch was filled with, so many rows that follow `start` tokens, for these logits."""
        options = self._context.options
        padding, outputs = self._stairs.padding(size, rows)
        if size + padding > options.batch or start + size + padding > self._cells:
            padding = outputs = 0
        answer = self._context.run(size, padding, outputs if rows + outputs <= options.outputs else 0)
        self._run_ns = self._context.run_ns
        if answer == 0:
            return
        if answer == ABORTED:
            raise PassCancelledError("The pass was cancelled.")
        if answer == 1:
            raise BackendError(f"A pass of {size} tokens finds no room in llama.cpp's cache.")
        reason = logged_error() or f"answer {answer}"
        raise BackendError(f"llama.cpp failed in a pass of {size} tokens: {reason}.")

    def _back_to(self, start: int, branches: Branches | None) -> None:
        """Drops what a failed pass left behind."""
        for sequence in range(1, 1 if branches is None else min(len(branches.paths), self._context.options.sequences)):
            self._context.cut(sequence, 0)
        self._context.cut(_TEXT, start)
        self._branches = None

    def _check_settled(self) -> None:
        """A tree of one path is a chain; any other must have been kept or cut."""
        if self._branches is not None and len(self._branches.paths) == 1:
            self._branches = None
        if self._branches is not None:
            raise BackendError("Rows of a draft tree are neither kept nor dropped.")

    def truncate(self, length: int) -> None:
        """Drops all rows from `length` on; of an unsettled tree, the first rows can stay where they are a path.

        Raises:
            BackendError: there are fewer rows, or the rows of a tree that would stay are no path.
        """
        if not 0 <= length <= self._length:
            raise BackendError(f"Cannot truncate a cache of {self._length} tokens to {length}.")
        branches = self._branches
        if branches is not None:
            self.keep(branches.start, range(max(length - branches.start, 0)))
        if length < self._length:
            self._context.cut(_TEXT, length)
            self._length = length

    def clear(self) -> None:
        """Drops all rows; their memory was taken at the beginning."""
        self._context.clear()
        self._length, self._branches = 0, None

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps these rows, which follow each other, of the pass that began at `start`.

        Raises:
            BackendError: they do not follow each other.
        """
        branches = self._branches
        if branches is None:
            if list(rows) != list(range(len(rows))):
                raise BackendError(f"Rows {list(rows)} of a pass do not follow each other.")
            self.truncate(start + len(rows))
            return
        sequence = branches.sequence_of(rows)
        if sequence is None or start != branches.start:
            raise BackendError(f"Rows {list(rows)} of a draft tree are no path from token {branches.start} on.")
        stop = start + len(rows)
        if sequence != _TEXT:
            self._context.cut(_TEXT, start)
            self._context.copy(sequence, _TEXT, start, stop)
        else:
            self._context.cut(_TEXT, stop)
        for other in range(1, len(branches.paths)):
            self._context.cut(other, 0)
        self._branches, self._length = None, stop

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """Copies the cache, or its rows start..stop-1.

        Raises:
            CapabilityError: the model has another cache than one plain one.
        """
        self._check_settled()
        stop = self._length if stop is None else stop
        if not 0 <= start <= stop <= self._length:
            raise BackendError(f"Cannot copy rows {start} to {stop} of a cache of {self._length} tokens.")
        if start == stop:
            shape = (self.geometry.num_kv_heads, 0, LLAMA_KV[self._kv].width(self.geometry.head_dim))
            nothing = (np.empty(shape, LLAMA_KV[self._kv].dtype),) * self.geometry.num_layers
            return CacheSnapshot(0, nothing, nothing, self._kv)
        if not self.capabilities.copies:
            raise CapabilityError(
                "The cache of a model with sliding windows cannot be copied.",
                "Load it without a prefix cache, and do not save sessions of it.",
            )
        if (start, stop) == (0, self._length):
            return self._codec.decode(self._context.state(_TEXT), stop)
        spare = self._context.options.spare
        self._context.copy(_TEXT, spare, start, stop)
        try:
            return self._codec.decode(self._context.state(spare), stop - start)
        finally:
            self._context.cut(spare, 0)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copied cache back."""
        check_snapshot(snapshot, self.geometry, self.capacity, self._kv)
        self.truncate(0)
        self.append(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use."""
        self._check_settled()
        check_snapshot(snapshot, self.geometry, self.capacity - self._length, self._kv)
        if snapshot.length == 0:
            return
        stop, spare = self._length + snapshot.length, self._context.options.spare
        self._context.set_state(spare, self._codec.encode(snapshot, self._length, spare))
        self._context.copy(spare, _TEXT, self._length, stop)
        self._context.cut(spare, 0)
        self._length = stop

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use; see `contracts.Backend.rewrite`."""
        held = self.snapshot()
        self.truncate(0)
        keys, values, left = [], [], None
        for layer in range(self.geometry.num_layers):
            floats = (
                self._codec.load(held.keys[layer], keys=True),
                self._codec.load(held.values[layer], keys=False),
            )
            edited = edit(layer, *floats)
            left = edited[0].shape[1] if left is None else left
            shape = (self.geometry.num_kv_heads, left, self.geometry.head_dim)
            if any(a.shape != shape for a in edited) or left > held.length:
                raise BackendError(f"An edit of {held.length} rows returned {edited[0].shape} and {edited[1].shape}.")
            keys.append(self._codec.store(edited[0], keys=True))
            values.append(self._codec.store(edited[1], keys=False))
        self.append(CacheSnapshot(left or 0, tuple(keys), tuple(values), self._kv))

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        self._context.cancel()

    def drop_pages(self) -> None:
        """Lets go of pages of the weights' file."""
        self.vocabulary.drop_pages()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term, as llama.cpp says."""
        return {"kv": self._context.kv_bytes, "buffers": self._context.buffer_bytes + self._gathered.nbytes}

    def close(self) -> None:
        """Frees the context and the model; views of logits are invalid from then on."""
        self._context.close()
        self.vocabulary.close()


def _check_kv(kv: str, head_dim: int) -> None:
    if kv not in LLAMA_KV:
        raise UsageError(f"llama.cpp cannot cache in {kv}.", f"Choose one of {', '.join(LLAMA_KV)}.")
    if LLAMA_KV[kv].blocks and head_dim % _BLOCK:
        message = f"Heads of {head_dim} numbers cannot be cached as {kv}, whose blocks have {_BLOCK}."
        raise UsageError(message, "Choose float16.")
