"""What mapping weights, and streaming them through memory, takes in bytes and in time; knows nothing of what runs.

Formulas for the plan: of streamed weights the largest window of layers is resident, and every pass reads all of them
again. The tensors are those of the layout that runs (edgeinfer.bundle.tables.tensors_in).
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.bundle import PORTABLE, TensorEntry
from edgeinfer.runtime.memory import releases_pages

__all__ = [
    "ReadRates",
    "loading_bytes",
    "looked_up_bytes",
    "mapped_bytes",
    "packed_bytes",
    "pass_bytes",
    "read_rates",
    "streamed_bytes",
    "streamed_ms",
]

_LAYER = re.compile(r"layers\.(\d+)\.")
_EMBED = "embed"
# Bits that packed values have at least, and what stands before them.
_LEAST_BITS, _PACKED_HEAD = 4, 128
# Rows of the embedding that are looked up between two releases of its pages, with what the system maps around each: 64
# of 128 KB, twice, for values and for scales.
_LOOKUP_BYTES = 16 << 20
# The system maps whole pieces of a file, of up to 2 MB, also where a window begins or ends in the middle of one.
_PIECE_BYTES = 2 << 20
# Milliseconds of a pass that runs no layer, besides what its weights take: 0.3 with 24 layers on 2.4 GHz.
_WINDOW_MS = 0.3
# Read to measure a rate, in so many pieces all over the file: how fast they come depends on how they were written.
_SAMPLE_BYTES, _PIECES = 64 << 20, 16


def mapped_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Resident bytes of a file of packed weights: all that is read but the embedding, of which only rows are."""
    tensors = list(tensors)
    return pass_bytes(tensors) + looked_up_bytes(tensors)


def loading_bytes(tensors: Iterable[TensorEntry]) -> tuple[int, int]:
    """What loading or making a file of packed weights takes for a moment: anonymous bytes, and bytes of the file.

    onnxruntime packs one weight after the other and then maps the packed copy instead.
    """
    largest = max((t for t in tensors if len(t.shape) == 2 and t.name != _EMBED), key=_read_bytes)
    return _read_bytes(largest), largest.nbytes


def streamed_bytes(tensors: Iterable[TensorEntry], window_layers: int) -> int:
    """Most bytes of weights that are resident at once where they are streamed: the largest window, head or embedding.

    Of the embedding all count, because around each row that is looked up the system may map far more.
    """
    windows: dict[str | int, int] = defaultdict(int)
    for tensor in tensors:
        layer = _LAYER.match(tensor.name)
        window = int(layer[1]) // window_layers if layer else "embedding" if tensor.name == _EMBED else "head"
        windows[window] += _read_bytes(tensor)
    return max(windows.values()) + 2 * _PIECE_BYTES


def pass_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Bytes of weights that a pass reads, which is what comes back in every pass where they are streamed."""
    return sum(_read_bytes(t) for t in tensors if t.name != _EMBED)


def streamed_ms(plain_ms: float, weight_bytes: int, rate: float, windows: int) -> float:
    """Milliseconds of a pass whose weights come back to memory at `rate` bytes per second.

    Args:
        plain_ms: of the same pass with weights that stay.
        weight_bytes: `pass_bytes`.
        windows: into which it is cut, those of embedding and head included.
    """
    return plain_ms + 1e3 * weight_bytes / rate + _WINDOW_MS * windows


def packed_bytes(tensor: TensorEntry) -> int:
    """Most bytes of what onnxruntime packs of a weight of the portable layout: values of at least four bits, which two
    become on some processors, scales, and a sum per block that is as large as a scale."""
    if tensor.bits == 32 or tensor.scales is None:
        return tensor.nbytes
    values = tensor.data.nbytes * max(1, _LEAST_BITS // tensor.bits)
    return values + 2 * tensor.scales.nbytes + _PACKED_HEAD


def _read_bytes(tensor: TensorEntry) -> int:
    """Bytes of a weight that running reads."""
    packed = tensor.bits < 32 and tensor.layout == PORTABLE
    return packed_bytes(tensor) if packed else tensor.nbytes


def looked_up_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Resident bytes of an embedding of which only rows are read, and dropped from time to time."""
    return sum(min(t.nbytes, _LOOKUP_BYTES) for t in tensors if t.name == _EMBED)


@dataclass(frozen=True)
class ReadRates:
    """Bytes per second at which dropped pages come back.

    Attributes:
        cached: while the system still has them.
        disk: when they must be read from the disk.
    """

    cached: float
    disk: float


def read_rates(path: Path) -> ReadRates | None:
    """Measures how fast pages of a file come back; None where they cannot be dropped.

    Takes some 20 ms, and what the disk needs for 64 MB. Pages that another process has mapped stay in memory, and are
    then read faster than the disk reads.

    Raises:
        OSError: the file cannot be read.
    """
    if not releases_pages():
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        pieces = [size * i // _PIECES // mmap.PAGESIZE * mmap.PAGESIZE for i in range(_PIECES)]
        length = min(_SAMPLE_BYTES, size) // _PIECES // 8 * 8
        with mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
            for piece in pieces:
                os.posix_fadvise(handle, piece, length, os.POSIX_FADV_DONTNEED)
            cold = _seconds_to_read(mapped, pieces, length)
            resident = _seconds_to_read(mapped, pieces, length)
            mapped.madvise(mmap.MADV_DONTNEED)
            cached = _seconds_to_read(mapped, pieces, length)
    finally:
        os.close(handle)
    # The pass itself reads them once more; only what comes on top of that is the price.
    least, read = 1e-6, length * _PIECES
    return ReadRates(read / max(cached - resident, least), read / max(cold - resident, least))


def _seconds_to_read(mapped: mmap.mmap, pieces: Sequence[int], length: int) -> float:
    begun = time.perf_counter()
    for piece in pieces:
        np.frombuffer(mapped, np.uint64, length // 8, piece).max()
    return time.perf_counter() - begun
