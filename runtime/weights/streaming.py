"""Weights streamed through memory: which layers run together, which stay, and what that takes in bytes and in time.

Passes read the layers again and again in one order. A cache that is full drops what was read longest ago, which is what
comes next, so that nearly everything is read from the disk. So what has no room is dropped right after its use, always
the same windows, and everything else stays. The tensors are those of the layout that runs
(edgeinfer.bundle.tables.tensors_in).
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.tables import PER_LAYER_TABLE, is_looked_up, stored_tensors

# Offset and length of bytes in a file.
Run = tuple[int, int]

LAYER = re.compile(r"layers\.(\d+)\.")
# The system maps and caches whole pieces of a file, of up to 2 MB, also where a part of it begins or ends in one.
PIECE_BYTES = 2 << 20
# Of the window that runs and of the one that is read ahead.
_WINDOWS_AT_ONCE = 2


class LayerWindow(NamedTuple):
    """Layers first..stop-1, which run together; those from `streamed` on are dropped afterwards."""

    first: int
    streamed: int
    stop: int


def layer_windows(layers: int, window_layers: int, kept_layers: int = 0) -> tuple[LayerWindow, ...]:
    """The windows of a pass, in order. Layers that are kept, not streamed, are spread evenly, so that one window
    computes while another is read."""
    streamed = layers - kept_layers
    count = -(-streamed // window_layers)
    if not kept_layers:
        firsts = range(0, layers, window_layers)
        return tuple(LayerWindow(first, first, min(first + window_layers, layers)) for first in firsts)
    found = []
    for each in range(count):
        first, stop = each * layers // count, (each + 1) * layers // count
        own = (each + 1) * streamed // count - each * streamed // count
        found.append(LayerWindow(first, max(first, stop - own), stop))
    return tuple(found)


def layer_runs(tensors: Iterable[TensorEntry]) -> tuple[Run, ...]:
    ends: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if (layer := LAYER.match(tensor.name)) is not None:
            for blob in tensor.blobs:
                begin, end = ends.get(int(layer[1]), (blob.offset, 0))
                ends[int(layer[1])] = min(begin, blob.offset), max(end, blob.offset + blob.nbytes)
    return tuple((begin, end - begin) for _, (begin, end) in sorted(ends.items()))


def streamed_runs(runs: Sequence[Run], windows: Sequence[LayerWindow]) -> tuple[Run, ...]:
    """The runs of the file to drop behind each window: whole pieces in which no other weights lie. A piece in which one
    window ends and the next begins is the latter's."""
    found = []
    for index, window in enumerate(windows):
        begin, end = runs[window.streamed][0], sum(runs[window.stop - 1])
        joined = index > 0 and window.streamed == window.first
        begin = (begin // PIECE_BYTES if joined else -(-begin // PIECE_BYTES)) * PIECE_BYTES
        found.append((begin, max(0, end // PIECE_BYTES * PIECE_BYTES - begin)))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def window_bytes(runs: tuple[Run, ...], window_layers: int, kept_layers: int = 0) -> tuple[int, ...]:
    windows = layer_windows(len(runs), window_layers, kept_layers)
    return tuple(length for _, length in streamed_runs(runs, windows))


def dropped_windows(sizes: Sequence[int], weights: int, room: int) -> tuple[int, ...] | None:
    """The windows of these streamed sizes that the system's cache drops behind their use, evenly apart, so that all
    else stays in `room` bytes; None where not even dropping all of them makes room."""
    needed = weights - room
    if needed <= 0:
        return ()
    needed += _WINDOWS_AT_ONCE * max(sizes, default=0)
    for count in range(1, len(sizes) + 1):
        chosen = tuple((each + 1) * len(sizes) // count - 1 for each in range(count))
        if sum(sizes[each] for each in chosen) >= needed:
            return chosen
    return None


_PER_LAYER = "per_layer."
# Bits that packed values have at least, and what stands before them.
_LEAST_BITS, _PACKED_HEAD = 4, 128
# Rows of a table that are looked up between two releases of its pages, where a pass has no more; and what the system
# maps around each, 128 KB for values and for scales.
_LOOKUPS, _LOOKUP_BYTES = 64, 256 << 10
# Jobs that an operator of the kernel divides a large matrix into (MOST_JOBS of ort_support.c).
_JOBS = 64
# Smaller arrays, as a head's scales, are not dropped while they are read: the system maps them 64 KB at a time again.
WORTH_DROPPING = 2 * PIECE_BYTES
# Milliseconds that a window takes for each layer of the model, which all its graph decides about, and that a page fault
# takes to map a piece of the system's cache and drop it again (docs/log/2026-11-26.md, fifth).
_DECIDED_MS, _FAULT_MS = 0.014, 0.006
# What a fault maps of a file; every array begins and ends in the middle of such a piece.
_FAULT_BYTES = 64 << 10


def streamed_bytes(tensors: Iterable[TensorEntry], window_layers: int, kept_layers: int = 0, *, threads: int) -> int:
    """Most bytes of weights in memory at once where they are streamed: the largest window, head or embedding.

    Operators drop embedding and head while they read them: each thread has a job's share of every large array in
    memory, and a piece around it. The weights of per-layer embeddings are read by every window. A window of all layers
    stays in memory, together with a part of the rest.
    """
    tensors = list(tensors)
    if kept_layers:
        sizes = window_bytes(layer_runs(tensors), window_layers, kept_layers)
        return sum(t.nbytes for t in stored_tensors(tensors)) - sum(sizes) + max(sizes) + 2 * PIECE_BYTES
    always = sum(t.nbytes for t in tensors if t.name.startswith(_PER_LAYER))
    always += sum(looked_up_bytes([t]) for t in tensors if t.name == PER_LAYER_TABLE)
    tensors = [t for t in tensors if t.name != PER_LAYER_TABLE and not t.name.startswith(_PER_LAYER)]
    # Where all layers stay, only head and embedding are streamed.
    stay = all(int(layer[1]) < window_layers for t in tensors if (layer := LAYER.match(t.name)))
    windows: dict[str | int, int] = defaultdict(int)
    for tensor in stored_tensors(tensors) if stay else tensors:
        layer, size = LAYER.match(tensor.name), tensor.nbytes
        window = int(layer[1]) // window_layers if layer else "embedding" if is_looked_up(tensor.name) else "head"
        if layer is None and tensor.bits < 32:
            size = sum(_dropped_bytes(blob.nbytes, threads) for blob in tensor.blobs)
        windows[window] += size
    return (sum if stay else max)(windows.values()) + always + 2 * PIECE_BYTES


def _dropped_bytes(size: int, threads: int) -> int:
    """Bytes in memory of an array that operators drop while they read it, if it is large."""
    return size if size < WORTH_DROPPING else min(size, threads * (-(-size // _JOBS) + PIECE_BYTES))


def pass_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Bytes of weights that a pass reads, which is what comes back in every pass where they are streamed."""
    return sum(packed_bytes(t) if t.layout == PORTABLE else t.nbytes for t in tensors if not is_looked_up(t.name))


def reread_ms(weight_bytes: float, arrays: int = 0, layers_decided: int = 0) -> float:
    """Milliseconds added to a pass where weights come back to memory from the system's file cache."""
    return _FAULT_MS * (weight_bytes / _FAULT_BYTES + 2 * arrays) + _DECIDED_MS * layers_decided


def packed_bytes(tensor: TensorEntry) -> int:
    """Most bytes of what onnxruntime packs of a weight of the portable layout: values of at least four bits, which two
    become on some processors, scales, and a sum per block that is as large as a scale."""
    if tensor.bits == 32 or tensor.scales is None:
        return tensor.nbytes
    values = tensor.data.nbytes * max(1, _LEAST_BITS // tensor.bits)
    return values + 2 * tensor.scales.nbytes + _PACKED_HEAD


def looked_up_bytes(tensors: Iterable[TensorEntry], rows: int = 0) -> int:
    """Bytes in memory of embeddings of which only rows are read, and dropped from time to time."""
    most = max(_LOOKUPS, rows) * _LOOKUP_BYTES
    return sum(min(t.nbytes, most) for t in tensors if is_looked_up(t.name))
