"""One llama.cpp context: a batch that numpy fills, passes that can be ended, sequences of one cache, threads. Sequences
share the cells of one cache ("unified"), so that copying one into another copies no keys."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT16, FLOAT32, LLAMA_KV
from edgeinfer.bundle.gguf.library import listening, logged_error
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.core.errors import BackendError, CapabilityError, Setting
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.llamacpp.memory import EXPERTS, is_head_packed, looks_up, packed_bytes
from edgeinfer.runtime.system.machine import usable_processors

# Seconds between looks: the system counts in hundredths.
_INTERVAL = 0.1
_STAT = Path("/proc/stat")


class ProcessorTimes(NamedTuple):
    wall: float
    busy: float  # working time of all processors that this process may use, for any program
    own: float  # working time for this process
    processors: int


class SpareThreads:
    """As many threads as other programs leave processors for, at least one. llama.cpp's threads wait for each other at
    hundreds of barriers in a pass. Where there is no processor for one of them, the others wait until the system lets
    it run, so that two threads take many times as long as one on two busy processors."""

    def __init__(self, most: int, look: Callable[[], ProcessorTimes] | None = None) -> None:
        self._most = self._count = most
        self._look = look or processor_times
        self._last = self._look()
        self._due = time.monotonic() + _INTERVAL

    def count(self) -> int:
        """For the next pass; costs next to nothing."""
        if self._most > 1 and time.monotonic() >= self._due:
            before, self._last = self._last, self._look()
            wall = self._last.wall - before.wall
            if wall > 0:
                others = (self._last.busy - before.busy - (self._last.own - before.own)) / wall
                spare = int(self._last.processors - others + 0.5)
                self._count = max(1, min(self._most, spare))
            self._due = time.monotonic() + _INTERVAL
        return self._count


def processor_times() -> ProcessorTimes:
    if sys.platform == "linux":
        # user nice system idle iowait irq softirq steal: what another machine on the same hardware took counts as busy.
        usable = [f"cpu{number}" for number in usable_processors()]
        lines = dict(line.split(" ", 1) for line in _STAT.read_text("ascii").splitlines() if line.startswith("cpu"))
        times = [[int(part) for part in lines[name].split()[:8]] for name in usable if name in lines]
        busy = sum(sum(each) - each[3] - each[4] for each in times) / os.sysconf("SC_CLK_TCK")
        processors = len(times)
    else:
        import psutil  # a megabyte of modules that Linux mostly does without

        each = psutil.cpu_times(percpu=True)
        busy = sum(sum(one) - one.idle for one in each)
        processors = len(each)
    return ProcessorTimes(time.monotonic(), busy, time.process_time(), processors)


_TOGETHER, _MOST_TOGETHER = 4, 16
# Rows left over, and the share of repacked weights from which on filling them up to four pays.
_PAYS = {3: 0.25, 2: 0.75}


@dataclass(frozen=True)
class RowSteps:
    """Whether a model's kernels multiply rows in fours, and how many rows are added to a pass for them.

    A kernel of repacked weights multiplies four rows for about the price of one, and each row that is left over for the
    price of one: c(2) and c(3) exceed c(4), c(6) and c(7) exceed c(8). Sixteen are cheaper still, by the row, so that
    c(13) exceeds c(16) too. Other kernels cost more with every row.
    """

    layers: float  # share of repacked bytes in what a pass reads
    head: float  # the same of the head alone, which computes the rows that logits are wanted of: 1 or 0

    @classmethod
    def of(cls, gguf: GgufFile, weights: str) -> RowSteps:
        """The shares of a file whose weights are kept this way; 0 for mixtures, as padding fetches experts."""
        if any(EXPERTS.fullmatch(tensor.name) for tensor in gguf.tensors):
            return cls(0.0, 0.0)
        read = gguf.tensor_bytes
        if "output.weight" in gguf.by_name and looks_up(gguf, weights):
            read -= gguf.by_name["token_embd.weight"].nbytes
        return cls(packed_bytes(gguf, weights) / max(read, 1), float(is_head_packed(gguf, weights)))

    def padding(self, size: int, outputs: int) -> tuple[int, int]:
        """Rows to add to a pass over so many tokens, and of how many of these logits had best be computed too."""
        rows = _missing(size, self.layers)
        return rows, min(rows, _missing(outputs, self.head))


def _missing(rows: int, share: float) -> int:
    left = rows % _TOGETHER
    if left == 1 and rows % _MOST_TOGETHER == _MOST_TOGETHER - 3 and share >= _PAYS[2]:
        return 3
    return _TOGETHER - left if share >= _PAYS.get(left, 2.0) else 0


class Batch:
    """The arrays of a llama_batch, as numpy's: filled without a step of Python for each token."""

    def __init__(self, lib: Any, size: int, sequences: int) -> None:
        self._spare = sequences
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._sequences = np.zeros((size, max(1, sequences)), np.int32)
        rows = self._sequences.ctypes.data + np.arange(size, dtype=np.uintp) * self._sequences.strides[0]
        self._rows = np.ascontiguousarray(rows, np.uintp)
        self._wanted = np.zeros(size, np.int8)
        self._branched = 0  # rows that belong to others than sequence 0
        fields = dict(lib.llama_batch._fields_)
        arrays: dict[str, NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._counts,
            "seq_id": self._rows,
            "logits": self._wanted,
        }
        self.struct = lib.llama_batch(
            **{name: ctypes.cast(array.ctypes.data, fields[name]) for name, array in arrays.items()}
        )

    def fill(self, tokens: Ints, start: int, rows: Ints) -> None:
        """A chain of sequence 0 from this position on, with logits of these rows."""
        size = len(tokens)
        self._tokens[:size] = tokens
        self._positions[:size] = np.arange(start, start + size)
        self._want(size, rows)
        if self._branched:
            self._counts[: self._branched] = 1
            self._sequences[: self._branched, 0] = 0
            self._branched = 0

    def fill_tree(self, tokens: Ints, positions: Ints, rows: Ints, branches: Sequence[Sequence[int]]) -> None:
        """Rows that each belong to the sequences named for it, ascending."""
        size = len(tokens)
        self._tokens[:size] = tokens
        self._positions[:size] = positions
        self._want(size, rows)
        for row, sequences in enumerate(branches):
            self._counts[row] = len(sequences)
            self._sequences[row, : len(sequences)] = sequences
        self._branched = max(self._branched, size)

    def pad(self, size: int, padding: int, outputs: int) -> None:
        """Adds padding rows, in a sequence of their own."""
        if padding:
            rows = slice(size, size + padding)
            self._tokens[rows] = self._tokens[size - 1]
            self._positions[rows] = np.arange(padding)
            self._counts[rows] = 1
            self._sequences[rows, 0] = self._spare
            self._wanted[rows] = np.arange(padding) < outputs
            self._branched = max(self._branched, size + padding)

    def _want(self, size: int, rows: Ints) -> None:
        self._wanted[:size] = 0
        self._wanted[rows] = 1


ABORTED = 2  # llama_decode's answer where the abort callback ended it
# ggml_type of the KV types.
_TYPES = {FLOAT32: 0, FLOAT16: 1, "q8_0": 8, "q4_0": 2}


@dataclass(frozen=True)
class ContextOptions:
    cells: int  # tokens the cache may hold, those of pending draft trees included
    kv: str
    threads: int  # threads of a pass; the most of them with `adaptive_threads`
    batch: int  # tokens of a pass at most
    outputs: int  # logit rows of a pass at most
    sequences: int  # sequences that may share the cache, without the spare one
    # Work with fewer while others use the processors, which changes no bit of the results.
    adaptive_threads: bool = False
    rollback: int = 0  # rows of a pass that recurrent layers can go back by; more states are kept for them
    offloaded: bool = False  # some layers run on a graphics processor, and keep their cells there

    @property
    def spare(self) -> int:
        """The sequence that is empty between calls."""
        return self.sequences


class LlamaContext:
    """A context of a model and the batch that is fed to it."""

    def __init__(self, lib: Any, model: Any, options: ContextOptions) -> None:
        self._lib = lib
        self.options = options
        self._abort = ctypes.create_string_buffer(2)
        params = _params(lib, options)
        # llama.cpp asks its abort callback before each of a pass's some hundred steps, which a function of Python would
        # delay each time. So it is C's `strlen`: the length of the text in `_abort`, 0 or 1, is the answer.
        c_library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        params.abort_callback = ctypes.cast(c_library.strlen, lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._abort)
        lines: list[str] = []
        with listening(lines.append):
            self.pointer = lib.llama_init_from_model(model, params)
        if not self.pointer:
            reason = logged_error() or "no reason given"
            raise BackendError(f"llama.cpp cannot make a context: {reason}.", "Use a smaller context.")
        self._memory = lib.llama_get_memory(self.pointer)
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self.batch = Batch(lib, options.batch, options.sequences)
        self._threads = options.threads
        self._spare_threads = SpareThreads(options.threads) if options.adaptive_threads else None
        self._compute_bytes = sum(_logged_sizes(lines, "compute"))
        # Size of the cache in the process, as llama.cpp says; all of it is taken at once.
        self.kv_bytes = sum(_logged_sizes(lines, "KV")) + sum(_logged_sizes(lines, "RS"))
        self._most_rows = options.sequences + 1
        self._logits: tuple[int, Floats] = (0, np.zeros((0, self._vocab_size), np.float32))

    @property
    def buffer_bytes(self) -> int:
        return int(self._compute_bytes + 4 * self._most_rows * self._vocab_size)

    @property
    def cells(self) -> int:
        return int(self._lib.llama_n_ctx(self.pointer))

    def run(self, size: int, padding: int = 0, outputs: int = 0) -> int:
        """Evaluates the first tokens of the batch; llama_decode's answer, 0 where it went well."""
        self.batch.pad(size, padding, outputs)
        self._abort[0] = b"\0"
        self.batch.struct.n_tokens = size + padding
        if self._spare_threads is not None and (threads := self._spare_threads.count()) != self._threads:
            self._lib.llama_set_n_threads(self.pointer, threads, threads)
            self._threads = threads
        answer = int(self._lib.llama_decode(self.pointer, self.batch.struct))
        if answer == 0:
            self._lib.llama_synchronize(self.pointer)
        if padding:
            self.cut(self.options.spare, 0)
        return answer

    def logits(self, rows: int) -> Floats:  # (R, V)
        """The logits of the rows that the last pass was asked for, a view that the next one overwrites."""
        if rows == 0:
            return self._logits[1][:0]
        self._most_rows = max(self._most_rows, rows)
        address = ctypes.cast(self._lib.llama_get_logits(self.pointer), ctypes.c_void_p).value or 0
        if self._logits[0] != address or len(self._logits[1]) != rows:
            numbers = (ctypes.c_float * (rows * self._vocab_size)).from_address(address)
            self._logits = (address, np.ctypeslib.as_array(numbers).reshape(rows, self._vocab_size))
        return self._logits[1]

    def cancel(self) -> None:
        self._abort[0] = b"\1"

    def cut(self, sequence: int, start: int) -> None:
        """Drops a sequence's tokens from this position on."""
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise BackendError(f"llama.cpp cannot cut its cache to {start} tokens.")

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Puts a sequence's tokens start..stop-1 into another one too."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def drop(self, sequence: int, start: int, stop: int) -> None:
        """Drops a sequence's tokens start..stop-1; those behind them move to their places."""
        if not self._lib.llama_memory_can_shift(self._memory):
            hint = "Load it with " + Setting("overflow", "stop") + "."
            raise CapabilityError("llama.cpp cannot move this model's tokens.", hint)
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, stop)
        self._lib.llama_memory_seq_add(self._memory, sequence, stop, -1, start - stop)

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def state(self, sequence: int, *, partial: bool = False) -> NDArray[np.uint8]:  # (bytes,)
        """A sequence's cache in llama.cpp's own format."""
        lib, flags, size = self._lib, self._flags(partial), self.state_bytes(sequence, partial=partial)
        blob = np.empty(size, np.uint8)
        if size == 0 or lib.llama_state_seq_get_data_ext(self.pointer, _bytes(blob), size, sequence, flags) != size:
            raise BackendError(f"llama.cpp cannot copy its cache: {logged_error()}.")
        return blob

    def state_bytes(self, sequence: int, *, partial: bool = False) -> int:
        return int(self._lib.llama_state_seq_get_size_ext(self.pointer, sequence, self._flags(partial)))

    def set_state(self, sequence: int, blob: NDArray[np.uint8], *, partial: bool = False) -> None:
        """Replaces a sequence, or what recurrent layers keep of it, by what `state` gave."""
        size, flags = len(blob), self._flags(partial)
        if self._lib.llama_state_seq_set_data_ext(self.pointer, _bytes(blob), size, sequence, flags) != size:
            raise BackendError(f"llama.cpp refuses the copied cache: {logged_error()}.")

    def _flags(self, partial: bool) -> int:
        return int(self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else self._lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def close(self) -> None:
        """Frees it; views of logits are invalid from then on."""
        if self.pointer:
            self._logits = (0, np.zeros((0, self._vocab_size), np.float32))
            self._lib.llama_free(self.pointer)
            self.pointer = None


def _params(lib: Any, options: ContextOptions) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = options.cells
    params.n_batch = params.n_ubatch = options.batch
    params.n_seq_max = options.sequences + 1
    params.n_rs_seq = options.rollback
    # Outputs for each sequence are reserved from the beginning.
    params.n_outputs_max = max(options.outputs, options.sequences + 1)
    params.n_threads = params.n_threads_batch = options.threads
    params.type_k = params.type_v = _TYPES[options.kv]
    # On a processor, 8 rows after 1,500 take 4 times as long with it; a cache of blocks cannot do without.
    flash = LLAMA_KV[options.kv].blocks
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.offload_kqv = options.offloaded
    # Products of a long pass stay where their matrices are, which a copy of them would double.
    params.op_offload = False
    # Cells of a sliding window stay, so that a cut can go back behind it.
    params.swa_full = True
    params.kv_unified = True
    return params


def _logged_sizes(lines: list[str], what: str) -> list[int]:
    """Bytes of the buffers of a kind that llama.cpp said it allocated in the process, not on a device."""
    found = re.findall(rf"(\S+) +{what} buffer size = +([\d.]+) MiB", "".join(lines))
    return [int(float(size) * 1024**2) for place, size in found if place.startswith("CPU") or place.endswith("_Host")]


def _bytes(blob: NDArray[np.uint8]) -> Any:
    return blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
