"""The backend of graphs in the portable layout, which use ONNX Runtime's own attention.

Facts it relies on, measured on ONNX Runtime 1.31.1: GroupQueryAttention works in place when past and present are one
buffer, so dropping rows is passing a smaller length; a row's result does not depend on the other rows of its pass as
long as there are at least two, and an even number where MatMulNBits multiplies in blocks of 64 or 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.passes import AttentionBias, BoundPass, bind_cache
from edgeinfer.runtime.devices.arrays import device_zeros
from edgeinfer.runtime.devices.providers import CPU, CPU_MEMORY, Device
from edgeinfer.runtime.weights.layouts import Progress


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
