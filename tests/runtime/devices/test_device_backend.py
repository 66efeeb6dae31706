"""Devices: their names, arrays, sessions, and the ONNX backend on them, with the numbers of the CPU.

The stand-in is onnxruntime's CPU provider under another name, so that numbers can be compared to the bit.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError, CapabilityError, DeviceError, UsageError
from edgeinfer.core.options.load import DEVICES, LoadOptions
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.backends.onnx import graph_backend, selfcheck
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.selfcheck import WIDTH, check_device, check_first_pass, static_model
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.devices import arrays as device_arrays
from edgeinfer.runtime.devices import providers
from edgeinfer.runtime.devices.arrays import DeviceArray, device_value, device_zeros
from edgeinfer.runtime.devices.providers import CPU, STATIC_ONLY, Device
from edgeinfer.runtime.devices.registry import ENTRIES, find_device
from tests.alone import Alone, restore
from tests.devices import STANDIN, TOKENS, feed, lacking, talk
from tests.speculation import random_bundle
from tests.tables import each_row

CAPACITY = 300
TWO_COPIES = lacking(in_place_kv=False)
ELSEWHERE = dataclasses.replace(STANDIN, memory="elsewhere")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(random_bundle(tmp_path_factory.mktemp("devices")))


@pytest.fixture
def make(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Device], Alone[OnnxBackend]]]:
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

    def new(device: Device, **options: Any) -> Alone[OnnxBackend]:
        made.append(Alone(OnnxBackend(bundle, CAPACITY, exact=False, device=device, **options), CAPACITY))
        return made[-1]

    yield new
    for backend in made:
        backend.close()


@pytest.mark.parametrize("device", [STANDIN, TWO_COPIES, ELSEWHERE], ids=["in place", "two copies", "own memory"])
def test_numbers_equal_the_cpus(make: Callable[..., Alone[OnnxBackend]], device: Device) -> None:
    there, here = make(device), make(CPU)
    del there.cache
    check_first_pass(there.model, device)
    there.cache = there.model.new_sequence(CAPACITY)
    assert all(np.array_equal(*pair) for pair in zip(talk(there), talk(here), strict=True))


def test_bytes_of_a_devices_own_memory_are_not_the_processs(make: Callable[..., Alone[OnnxBackend]]) -> None:
    row = make(CPU).geometry.kv_bytes_per_token("float32")
    assert make(STANDIN).nbytes()["kv"] == CAPACITY * row
    assert make(TWO_COPIES).nbytes()["kv"] == 2 * CAPACITY * row
    assert make(ELSEWHERE).nbytes()["kv"] == 0


def test_what_kernels_lack_is_no_capability(make: Callable[..., Alone[OnnxBackend]]) -> None:
    whole, there, copied = (make(device).capabilities for device in (CPU, STANDIN, TWO_COPIES))
    assert whole.tree and whole.exact and whole.layer_skip and whole.hidden
    assert not there.tree and not there.exact and there.layer_skip and there.hidden
    assert not copied.layer_skip and not copied.hidden
    assert make(lacking(tree_bias=True)).capabilities.tree


def test_trees_are_refused_where_rows_have_no_places_of_their_own(make: Callable[..., Alone[OnnxBackend]]) -> None:
    backend = make(STANDIN)
    feed(backend, TOKENS[:4])
    tree = np.array([-1, -1], np.int64)
    with pytest.raises(CapabilityError, match="cannot verify trees"):
        backend.forward(Pass(np.array([1, 2]), np.array([4, 4]), np.array([0, 1]), tree=tree))


def test_layers_are_skipped_and_resumed_there_too(make: Callable[..., Alone[OnnxBackend]]) -> None:
    outputs = []
    for device in (STANDIN, CPU):
        backend = make(device)
        feed(backend, TOKENS[:6])
        mask = np.ones(2 * backend.geometry.num_layers, np.bool_)
        mask[2:] = False
        tokens, positions, rows = np.array([9, 8]), np.array([6, 7]), np.array([0, 1])
        first = backend.forward(Pass(tokens, positions, rows, layer_mask=mask))
        outputs.append(first.logits.copy())
        assert first.hidden is not None
        backend.cache.trim(6)
        outputs.append(
            backend.forward(Pass(tokens, positions, rows, layer_mask=~mask, hidden=first.hidden.copy())).logits.copy()
        )
    assert np.array_equal(outputs[0], outputs[2]) and np.array_equal(outputs[1], outputs[3])


def test_a_first_pass_without_numbers_is_a_failure(
    make: Callable[..., Alone[OnnxBackend]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, forward = make(STANDIN), OnnxBackend.forward
    wrong = iter([np.nan, np.inf])

    def spoilt(self: OnnxBackend, *args: Any, **options: Any) -> Any:
        (out,) = forward(self, *args, **options)
        out.logits[0, 3] = next(wrong)
        return [out]

    monkeypatch.setattr(OnnxBackend, "forward", spoilt)
    del backend.cache
    closed: list[bool] = []
    monkeypatch.setattr(backend.model, "close", lambda: closed.append(True))
    for times in (1, 2):
        with pytest.raises(DeviceError, match="logits that are no numbers"):
            check_first_pass(backend.model, STANDIN)
        assert closed == [True] * times
        gc.collect()  # the error held the sequence


def run_twice(device: Device) -> list[np.ndarray]:
    """A session that is bound once, with inputs that are written between its runs."""
    session = OrtSession(static_model(), 1, device=device)
    binding = session.binding()
    x, y = np.zeros((2, WIDTH), np.float32), np.zeros((2, WIDTH), np.float32)
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(y))
    found = []
    for value in (0.5, -2.0):
        x[:] = value
        session.run(binding)
        found.append(y.copy())
    return found


def test_inputs_are_read_as_they_are_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with memory of its own, where binding an input copies it."""
    here, bind = run_twice(CPU), ort.IOBinding.bind_ortvalue_input

    def copied(self: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
        bind(self, name, ort.OrtValue.ortvalue_from_numpy(value.numpy().copy()))

    monkeypatch.setattr(ort.IOBinding, "bind_ortvalue_input", copied)
    there = run_twice(ELSEWHERE)
    assert np.array_equal(here, there) and not np.array_equal(there[0], there[1])


def test_a_device_that_is_not_installed_fails() -> None:
    absent = dataclasses.replace(STANDIN, provider="NoSuchExecutionProvider")
    with pytest.raises(DeviceError, match=r"standin \(NoSuch.*\) fails: it is not installed\. Use device='cpu'"):
        OrtSession(static_model(), 1, device=absent)


def test_a_provider_that_onnxruntime_leaves_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then says so in its log only, and runs everything on the CPU."""
    absent = dataclasses.replace(STANDIN, provider="CUDAExecutionProvider")
    monkeypatch.setattr(providers, "is_installed", lambda device: True)
    if absent.provider in ort.get_available_providers():
        pytest.skip("this onnxruntime has the provider")
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(DeviceError, match="could not make its provider"),
    ):
        OrtSession(static_model(), 1, device=absent)


def test_a_model_that_a_device_does_not_take_is_the_devices_failure(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"not a model")
    with pytest.raises(DeviceError, match="standin"):
        OrtSession(str(file), 1, device=STANDIN)
    with pytest.raises(BundleError, match=r"model\.onnx cannot be loaded"):
        OrtSession(str(file), 1)


def test_threads_can_be_bound_to_processors() -> None:
    assert OrtSession(static_model(), 2, affinity="1").outputs == ("y",)


class Plugin:
    """A package with a provider's library, which is registered with onnxruntime once."""

    def __init__(self, patch: pytest.MonkeyPatch, *found: str) -> None:
        self.registered: list[str] = []
        self.added: list[list[str]] = []
        module = ModuleType("a_plugin")
        module.get_library_path = lambda: "/installed/a_plugin.so"  # type: ignore[attr-defined]
        module.__spec__ = SimpleNamespace(name="a_plugin")  # type: ignore[assignment]
        patch.setitem(sys.modules, "a_plugin", module)
        patch.setattr(providers, "_LOADED", set())
        patch.setattr(ort, "register_execution_provider_library", lambda name, path: self.registered.append(path))
        devices = [SimpleNamespace(ep_name="PluginProvider", number=each) for each in found]
        patch.setattr(ort, "get_ep_devices", lambda: [SimpleNamespace(ep_name="CPUExecutionProvider"), *devices])

    def add_provider_for_devices(self, devices: list[SimpleNamespace], options: dict[str, str]) -> None:
        self.added.append([device.number for device in devices])


PLUGIN = Device("plugin", "PluginProvider", {}, STATIC_ONLY, "cpu", plugin="a_plugin")


def test_a_plugin_is_loaded_once_and_gives_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Plugin(monkeypatch, "first", "second")
    for _ in range(2):
        assert providers.add_provider(PLUGIN, plugin) is None
    assert plugin.registered == ["/installed/a_plugin.so"]
    assert plugin.added == [["first"], ["first"]]


def test_a_plugin_without_hardware_or_library_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="finds no hardware"):
        providers.add_provider(PLUGIN, Plugin(monkeypatch))
    plugin = Plugin(monkeypatch, "first")

    def refuse(name: str, path: str) -> None:
        raise RuntimeError("incompatible version\nmore of it")

    monkeypatch.setattr(ort, "register_execution_provider_library", refuse)
    with pytest.raises(DeviceError, match=r"fails: incompatible version\. Use"):
        providers.add_provider(PLUGIN, plugin)


@each_row("device", [CPU, STANDIN, lacking(in_place_kv=False), lacking(dynamic_shapes=False)])
def test_small_models_run_on_devices_that_work(device: Device) -> None:
    check_device(device)


def test_a_device_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selfcheck._ordinary
    for spoilt in (0.1, np.nan):
        monkeypatch.setattr(selfcheck, "_ordinary", lambda d, by=spoilt: whole(d) + (0 if d.on_cpu else by))
        with pytest.raises(DeviceError, match="something else than the CPU"):
            check_device(STANDIN)


def test_what_the_check_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "ordinary_model", lambda: b"not a model")
    with pytest.raises(DeviceError, match="standin"):
        check_device(STANDIN)


@pytest.mark.clock
def test_threads_of_a_new_session_do_not_spin() -> None:
    session = OrtSession(static_model(), 2)
    started = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - started < 0.02
    assert session.inputs


GEOMETRY = Geometry(vocab_size=8, hidden_size=8, num_layers=2, num_kv_heads=2, head_dim=4, max_positions=1000)


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
        restore(cache, kept)
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


NAMES = [device.name for entry in ENTRIES for device in entry.devices]


def test_options_name_the_devices_of_the_registry() -> None:
    bare = {entry.name for entry in ENTRIES}
    assert set(DEVICES) == bare | set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_the_cpu_comes_last_and_can_do_everything() -> None:
    assert ENTRIES[-1].devices == (CPU,)
    assert all(dataclasses.asdict(CPU.traits).values())
    assert [name for name in NAMES if find_device(name)[1].on_cpu] == ["cpu"]


@each_row("name", NAMES)
def test_each_is_found_and_described(name: str) -> None:
    entry, device = find_device(name)
    assert device.name == name and entry.package and entry.tried
    assert device.provider.endswith("ExecutionProvider")
    # What needs fixed shapes runs nothing else that traits could be about; only the CPU has our kernel.
    assert device.traits.dynamic_shapes or device.traits == STATIC_ONLY
    assert device.traits.custom_ops == device.on_cpu


def test_a_bare_name_is_the_first_device_that_has_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.runtime.devices import registry

    entry, device = find_device("openvino")
    assert device.name == "openvino:NPU"
    seen = dataclasses.replace(entry, hardware=lambda device: device.name == "openvino:CPU")
    monkeypatch.setattr(registry, "ENTRIES", (seen,))
    monkeypatch.setattr(registry, "is_installed", lambda device: True)
    assert find_device("openvino")[1].name == "openvino:CPU"
    assert find_device("openvino:GPU")[1].name == "openvino:GPU"


@pytest.mark.parametrize("name", ["gpu", "openvino:TPU", "", "CPU", "cuda:0"])
def test_other_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"Choose auto or one of .*openvino"):
        find_device(name)
    with pytest.raises(UsageError, match=r"Choose auto or one of .*openvino:NPU"):
        LoadOptions(device=name)
