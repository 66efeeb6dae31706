"""Which layers run together where weights are streamed, which stay in memory, and which the system's cache drops.

Passes read the layers again and again in one order. A cache that is full drops what was read longest ago, which is what
comes next, so that nearly everything is read from the disk. So what has no room is dropped right behind its use, always
the same windows, and everything else stays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgeinfer.bundle.manifest import TensorEntry

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
    """The windows of a pass, in order.

    Args:
        kept_layers: that are not streamed. They are spread evenly, so that one window computes while another is read.
    """
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
    """Where each layer lies in the file."""
    ends: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if (layer := LAYER.match(tensor.name)) is not None:
            for blob in tensor.blobs:
                begin, end = ends.get(int(layer[1]), (blob.offset, 0))
                ends[int(layer[1])] = min(begin, blob.offset), max(end, blob.offset + blob.nbytes)
    return tuple((begin, end - begin) for _, (begin, end) in sorted(ends.items()))


def streamed_runs(runs: Sequence[Run], windows: Sequence[LayerWindow]) -> tuple[Run, ...]:
    """What can be dropped behind each window: whole pieces of the file in which nothing lies that stays.

    A piece in which one window ends and the next begins is the latter's.

    Args:
        runs: where each layer lies.
    """
    found = []
    for index, window in enumerate(windows):
        begin, end = runs[window.streamed][0], sum(runs[window.stop - 1])
        joined = index > 0 and window.streamed == window.first
        begin = (begin // PIECE_BYTES if joined else -(-begin // PIECE_BYTES)) * PIECE_BYTES
        found.append((begin, max(0, end // PIECE_BYTES * PIECE_BYTES - begin)))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def window_bytes(runs: tuple[Run, ...], window_layers: int, kept_layers: int = 0) -> tuple[int, ...]:
    """Bytes that can be dropped behind each window.

    Args:
        runs: where each layer lies.
    """
    windows = layer_windows(len(runs), window_layers, kept_layers)
    return tuple(length for _, length in streamed_runs(runs, windows))


def dropped_windows(sizes: Sequence[int], weights: int, room: int) -> tuple[int, ...] | None:
    """The windows that the system's cache drops behind their use, evenly apart, so that all else stays there.

    None where not even dropping all of them makes room.

    Args:
        sizes: bytes that are streamed of each window.
        weights: bytes of all weights.
        room: bytes of them that the system can keep.
    """
    needed = weights - room
    if needed <= 0:
        return ()
    needed += _WINDOWS_AT_ONCE * max(sizes, default=0)
    for count in range(1, len(sizes) + 1):
        chosen = tuple((each + 1) * len(sizes) // count - 1 for each in range(count))
        if sum(sizes[each] for each in chosen) >= needed:
            return chosen
    return None
