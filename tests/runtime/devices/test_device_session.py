"""Sessions on devices: where inputs are copied, what fails, which providers are asked for."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.errors import BundleError, DeviceError
from edgeinfer.runtime.backends.onnx import selfcheck
from edgeinfer.runtime.backends.onnx.selfcheck import WIDTH, check_device, static_model
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.devices import providers
from edgeinfer.runtime.devices.providers import CPU, STATIC_ONLY, Device
from tests.devices import STANDIN, lacking
from tests.tables import each_row

# A provider of whose arrays nothing is shared with the process, as far as a session can tell.
ELSEWHERE = dataclasses.replace(STANDIN, memory="elsewhere")


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
