"""Arrays on a device compared with numpy's, and the cache that is made of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.errors import DeviceError
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.devices import arrays as device_arrays
from edgeinfer.runtime.devices.arrays import DeviceArray, device_value, device_zeros
from tests.devices import STANDIN, lacking
from tests.tables import each_row

GEOMETRY = Geometry(vocab_size=8, hidden_size=8, num_layers=2, num_kv_heads=2, head_dim=4, max_positions=1000)
CAPACITY = 300


def filled(cache: KVBuffers, rows: int) -> None:
    """Writes so many rows, each number another."""
    start = cache.length
    cache.reserve(start + rows)
    for layer in range(GEOMETRY.num_layers):
        numbers = np.arange(rows * 8, dtype=np.float32).reshape(2, rows, 4) + 1000 * layer + start
        cache.write(layer, start, numbers, -numbers)
    cache.length = start + rows


def held(cache: KVBuffers) -> list[np.ndarray]:
    return [part for layer in range(GEOMETRY.num_layers) for part in cache.read(layer, 0, cache.length)]


def test_parts_are_read_and_written_as_numpys() -> None:
    array, plain = DeviceArray((1, 2, 6, 4), np.float32, STANDIN), np.zeros((1, 2, 6, 4), np.float32)
    for target in (array, plain):
        target[0, :, 2:4] = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
        target[:, :, 0:2] = target[:, :, [3, 2]]
    assert np.array_equal(array[:], plain)
    assert array.nbytes == plain.nbytes
    part = array[0, :, :2]
    part[:] = 7
    assert np.array_equal(array[:], plain), "a part that was read is a copy"


def test_two_copies_where_nothing_is_updated_in_place() -> None:
    array = DeviceArray((2,), np.float32, lacking(in_place_kv=False))
    array.written.update_inplace(np.array([1, 2], np.float32))
    assert array[:].tolist() == [0, 0]
    array.swap()
    assert array[:].tolist() == [1, 2] and array.nbytes == 16


def test_a_cache_on_a_device_is_the_cache_of_the_process() -> None:
    there, here = KVBuffers(GEOMETRY, CAPACITY, zeros=device_zeros(STANDIN)), KVBuffers(GEOMETRY, CAPACITY)
    assert there.rows == CAPACITY, "arrays of a device do not grow"
    for cache in (there, here):
        filled(cache, 9)
        cache.keep(4, [0, 2, 3])
        snapshot = cache.snapshot(1, 5)
        filled(cache, 290)
        cache.trim(20)
        cache.append(snapshot)
        cache.rewrite(lambda layer, keys, values: (keys[:, ::2] + layer, values[:, ::2]))
        kept = cache.snapshot()
        cache.clear()
        assert cache.nbytes == 0 and cache.rows == 0
        cache.restore(kept)
    assert there.length == here.length == 12
    assert all(np.array_equal(*pair) for pair in zip(held(there), held(here), strict=True))
    assert there.rows == CAPACITY


def test_no_room_on_a_device_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVBuffers(GEOMETRY, CAPACITY, zeros=device_zeros(STANDIN))
    cache.clear()
    make, left = device_arrays.device_value, iter([True, True])

    def scarce(array: np.ndarray, device: object) -> ort.OrtValue:
        if not next(left, False):
            raise DeviceError("no room")
        return make(array, STANDIN)

    with monkeypatch.context() as patch:
        patch.setattr(device_arrays, "device_value", scarce)
        with pytest.raises(DeviceError):
            cache.reserve(1)
    assert cache.rows == cache.length == cache.nbytes == 0
    filled(cache, 3)
    assert cache.length == 3


def test_memory_that_onnxruntime_does_not_have_is_an_error_of_the_device() -> None:
    elsewhere = dataclasses.replace(STANDIN, memory="cuda")
    with pytest.raises(DeviceError, match=r"standin .* fails: .* Use device='cpu'"):
        device_value(np.zeros(2, np.float32), elsewhere)


@each_row(
    ("reason", "says"),
    [("Failed to allocate memory for requested buffer of size 64", "no room for 8 B"), ("broken", "broken")],
)
def test_refused_memory_is_distinguished_from_failures(monkeypatch: pytest.MonkeyPatch, reason: str, says: str) -> None:
    def refuse(*args: object) -> ort.OrtValue:
        raise RuntimeError(reason)

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_shape_and_type", refuse)
    with pytest.raises(DeviceError, match=says):
        device_value(np.zeros(2, np.float32), dataclasses.replace(STANDIN, memory="cuda"))
