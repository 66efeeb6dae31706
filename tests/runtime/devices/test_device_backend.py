"""The ONNX backend on devices: the numbers of the CPU, from a cache that lives there; what falls back where it lacks.

The stand-in is onnxruntime's CPU provider under another name, so that numbers can be compared to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import CapabilityError, DeviceError
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx import graph_backend
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.selfcheck import check_first_pass
from edgeinfer.runtime.devices import arrays as device_arrays
from edgeinfer.runtime.devices.providers import CPU, Device
from tests.devices import STANDIN, TOKENS, feed, lacking, talk
from tests.speculation import random_bundle

CAPACITY = 300
TWO_COPIES = lacking(in_place_kv=False)
ELSEWHERE = dataclasses.replace(STANDIN, memory="elsewhere")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(random_bundle(tmp_path_factory.mktemp("devices")))


@pytest.fixture
def make(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Device], OnnxBackend]]:
    """Makes a backend on a device; memory elsewhere than the process's is played by that of onnxruntime."""
    real, made = device_arrays.device_value, []

    def value(array: np.ndarray, device: Device) -> ort.OrtValue:
        if device.memory != "elsewhere":
            return real(array, device)
        found = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type)
        found.update_inplace(array)
        return found

    for module in (device_arrays, graph_backend):
        monkeypatch.setattr(module, "device_value", value)

    def new(device: Device, **options: Any) -> OnnxBackend:
        made.append(OnnxBackend(bundle, CAPACITY, exact=False, device=device, **options))
        return made[-1]

    yield new
    for backend in made:
        backend.close()


@pytest.mark.parametrize("device", [STANDIN, TWO_COPIES, ELSEWHERE], ids=["in place", "two copies", "own memory"])
def test_numbers_equal_the_cpus(make: Callable[..., OnnxBackend], device: Device) -> None:
    there, here = make(device), make(CPU)
    check_first_pass(there, device)
    assert there.cache.length == 0
    assert all(np.array_equal(*pair) for pair in zip(talk(there), talk(here), strict=True))


def test_bytes_of_a_devices_own_memory_are_not_the_processs(make: Callable[..., OnnxBackend]) -> None:
    row = make(CPU).geometry.kv_bytes_per_token("float32")
    assert make(STANDIN).nbytes()["kv"] == CAPACITY * row
    assert make(TWO_COPIES).nbytes()["kv"] == 2 * CAPACITY * row
    assert make(ELSEWHERE).nbytes()["kv"] == 0


def test_what_kernels_lack_is_no_capability(make: Callable[..., OnnxBackend]) -> None:
    whole, there, copied = (make(device).capabilities for device in (CPU, STANDIN, TWO_COPIES))
    assert whole.tree and whole.exact and whole.layer_skip and whole.hidden
    assert not there.tree and not there.exact and there.layer_skip and there.hidden
    assert not copied.layer_skip and not copied.hidden
    assert make(lacking(tree_bias=True)).capabilities.tree


def test_trees_are_refused_where_rows_have_no_places_of_their_own(make: Callable[..., OnnxBackend]) -> None:
    backend = make(STANDIN)
    feed(backend, TOKENS[:4])
    tree = np.array([-1, -1], np.int64)
    with pytest.raises(CapabilityError, match="cannot verify trees"):
        backend.forward(ForwardInput(np.array([1, 2]), np.array([4, 4]), np.array([0, 1]), tree=tree))


def test_layers_are_skipped_and_resumed_there_too(make: Callable[..., OnnxBackend]) -> None:
    outputs = []
    for device in (STANDIN, CPU):
        backend = make(device)
        feed(backend, TOKENS[:6])
        mask = np.ones(2 * backend.geometry.num_layers, np.bool_)
        mask[2:] = False
        tokens, positions, rows = np.array([9, 8]), np.array([6, 7]), np.array([0, 1])
        first = backend.forward(ForwardInput(tokens, positions, rows, layer_mask=mask))
        outputs.append(first.logits.copy())
        assert first.hidden is not None
        backend.cache.trim(6)
        outputs.append(
            backend.forward(
                ForwardInput(tokens, positions, rows, layer_mask=~mask, hidden=first.hidden.copy())
            ).logits.copy()
        )
    assert np.array_equal(outputs[0], outputs[2]) and np.array_equal(outputs[1], outputs[3])


def test_a_first_pass_without_numbers_is_a_failure(
    make: Callable[..., OnnxBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, forward = make(STANDIN), OnnxBackend.forward
    wrong = iter([np.nan, np.inf])

    def spoilt(self: OnnxBackend, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        out.logits[0, 3] = next(wrong)
        return out

    monkeypatch.setattr(OnnxBackend, "forward", spoilt)
    closed: list[bool] = []
    monkeypatch.setattr(backend, "close", lambda: closed.append(True))
    for times in (1, 2):
        with pytest.raises(DeviceError, match="logits that are no numbers"):
            check_first_pass(backend, STANDIN)
        assert closed == [True] * times
