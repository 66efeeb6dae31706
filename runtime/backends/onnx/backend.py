"""The backend of graphs in the portable layout, which use ONNX Runtime's own attention.

Facts it relies on, measured on ONNX Runtime 1.31.1: GroupQueryAttention works in place when past and present are one
buffer, so dropping rows is passing a smaller length; a row's result does not depend on the other rows of its pass as
long as there are at least two, and an even number where MatMulNBits multiplies in blocks of 64 or 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import KVBuffers, visible_rows
from edgeinfer.runtime.backends.onnx.graph_backend import BoundPass, GraphBackend
from edgeinfer.runtime.backends.onnx.session import Binding
from edgeinfer.runtime.devices.arrays import DeviceArray, device_zeros
from edgeinfer.runtime.devices.providers import CPU, CPU_MEMORY, Device
from edgeinfer.runtime.weights.layouts import Progress

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN.
_HIDDEN = np.float32(-1e9)


def _copy_padding(bias: Floats, real: int) -> None:  # (S, T)
    """Lets each row of padding see itself in place of the last real row, and else what that sees. So it is that row
    again, up to rounding, and its experts are the same: any others would have to be fetched for nothing."""
    size, total = bias.shape
    start = total - size
    bias[real:] = bias[real - 1]
    bias[real:, start + real - 1 :] = _HIDDEN
    padding = np.arange(real, size)
    bias[padding, start + padding] = 0


class AttentionBias:
    """The attention bias, bound to every pass, as its shape changes with each; with `copies_padding` rows of padding
    are the last real row again, so that they choose its experts."""

    def __init__(self, window: int, copies_padding: bool) -> None:
        self._window = window
        self._copies_padding = copies_padding
        self._zeros = np.zeros(0, np.float32)

    def bind(self, step: BoundPass, room: int, tree: Ints | None, real: int, total: int) -> None:
        """Binds the bias of a pass of `real` rows and padding, with `total` rows in the cache after it, which has
        `room`."""
        size = len(step.positions)
        plain = tree is None and not (self._copies_padding and size > real)
        bias = self._no_bias(size, total, room) if plain else self._hiding(size, total, real, tree)
        step.binding.bind_ortvalue_input(graph.ATTENTION_BIAS, ort.OrtValue.ortvalue_from_numpy(bias))
        if self._window:
            windowed = self._hiding(size, total, real, tree, self._window)
            step.binding.bind_ortvalue_input(graph.WINDOW_BIAS, ort.OrtValue.ortvalue_from_numpy(windowed))

    def _hiding(self, size: int, total: int, real: int, tree: Ints | None, window: int = 0) -> Floats:  # (1, 1, S, T)
        """Hides from each row the slots it does not see."""
        bias, start = np.zeros((1, 1, size, total), np.float32), total - size
        seen = visible_rows(start, real, tree, window)
        bias[0, 0, :real, : start + real][~seen] = _HIDDEN
        if self._copies_padding and size > real:
            _copy_padding(bias[0, 0], real)
        return bias

    def _no_bias(self, size: int, total: int, room: int) -> Floats:  # (1, 1, S, T)
        if self._zeros.size < size * total:
            # Never written, so the zero pages of this buffer take no memory.
            self._zeros = np.zeros(size * room, np.float32)
        return self._zeros[: size * total].reshape(1, 1, size, total)


def bind_cache(binding: Binding, cache: KVBuffers) -> None:
    for layer, arrays in enumerate(zip(cache.keys, cache.values, strict=True)):
        names = zip(graph.past_names(layer), graph.present_names(layer), arrays, strict=True)
        for past, present, array in names:
            if isinstance(array, DeviceArray):  # a device may not write to the cache that it reads
                before, after = array.value, array.written
            else:
                before = after = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(past, before)
            binding.bind_ortvalue_output(present, after)


class OnnxBackend(OneSequenceBackend, GraphBackend):
    """Implements `contract.Backend`, with a float32 KV cache updated in place, on a device other than the CPU in its
    memory. `exact` pads passes so that every row is bit-identical whatever pass it is computed in, on the CPU alone."""

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        exact: bool = True,
        progress: Progress | None = None,
        device: Device = CPU,
        affinity: str = "",
    ) -> None:
        exact = exact and device.on_cpu
        # Attention needs two rows to be exact; so does the LM head, but only where its kernel takes rows in pairs.
        head = bundle.manifest.capabilities_in(PORTABLE).row_multiple
        self._multiple = max(2, head) if exact else 1
        self._head_multiple = head if exact else 1
        self._capacity, self._spare = capacity, self._multiple - 1
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        super().__init__(
            bundle,
            capacity,
            places=capacity + self._spare,
            threads=threads,
            layout=PORTABLE,
            progress=progress,
            device=device,
            affinity=affinity,
        )
        decoder = bundle.manifest.decoder
        self._window = 0 if decoder is None else decoder.window_size
        self._bias = AttentionBias(self._window, self._experts is not None)

    def _new_cache(self, capacity: int) -> KVBuffers:
        zeros = None if self._device.on_cpu else device_zeros(self._device)
        cache = KVBuffers(self.geometry, capacity, spare=self._spare, zeros=zeros)
        cache.unbind = self._unbind
        self._passes.clear()
        return cache

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, KVBuffers), "sequences are made here"
        if self._window and batch.tree is not None and len(batch.tree) > graph.TREE_ROWS:
            raise BackendError(f"A draft tree of {len(batch.tree)} rows is larger than {graph.TREE_ROWS}.")
        start, size, rows = cache.length, len(batch.tokens), len(batch.rows)
        padded = -(-size // self._multiple) * self._multiple
        total = start + padded
        cache.reserve(total)
        padded_rows = -(-rows // self._head_multiple) * self._head_multiple
        step = self._prepared(batch, padded, padded_rows, apart=self._experts is None)
        self._seqlens[0] = total - 1
        self._total[...] = total
        if step.bound is not cache.keys or not self._device.traits.in_place_kv:
            bind_cache(step.binding, cache)
            step.bound = cache.keys
        self._bias.bind(step, cache.rows, batch.tree, size, total)
        self._session.run(step.binding)
        if not self._device.traits.in_place_kv:
            # What the pass wrote is the cache now.
            for array in (*cache.keys, *cache.values):
                array.swap()
        cache.length = start + size
        return self._output(step, size, rows)

    def _attention_inputs(self, step: BoundPass) -> dict[str, NDArray[Any]]:
        return {graph.SEQLENS_K: self._seqlens, graph.TOTAL_LENGTH: self._total}

    def nbytes(self) -> dict[str, int]:
        # What lies in a device's own memory is none of the process's.
        return {"kv": self._kv_bytes if self._device.memory == CPU_MEMORY else 0, "buffers": self._buffer_bytes}
