"""Names of devices, and what the table says of each."""

from __future__ import annotations

import dataclasses

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.options.load import DEVICES, LoadConfig
from edgeinfer.runtime.devices.providers import CPU, STATIC_ONLY
from edgeinfer.runtime.devices.registry import ENTRIES, find_device
from tests.tables import each_row

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
        LoadConfig(device=name)
