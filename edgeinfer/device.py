"""What the machine at hand can do: devices that models may run on, and the limits of its processor; knows no model."""

from __future__ import annotations

import dataclasses

from edgeinfer.errors import DeviceError
from edgeinfer.results import DeviceFacts, DeviceLimits
from edgeinfer.runtime.backends.onnx.selfcheck import check_device
from edgeinfer.runtime.devices.contract import Device, DeviceEntry
from edgeinfer.runtime.devices.providers import is_installed
from edgeinfer.runtime.devices.registry import ENTRIES
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.native.probe import measure_limits

__all__ = ["list_devices", "measure_device"]


def measure_device(threads: int = 1) -> DeviceLimits:
    """Measures how fast memory is read and multiply-adds are done, in about 0.2 s.

    No pass can be faster than `Model.pass_work` divided by these figures.

    Args:
        threads: that work together.

    Raises:
        NativeUnavailableError: there is no native kernel here.
        UsageError: no thread.
    """
    return measure_limits(native_kernel(), threads)


def list_devices(*, check: bool = True) -> tuple[DeviceFacts, ...]:
    """The devices that models may run on, installed or not, in the order in which "auto" looks for one.

    Args:
        check: run small models on those that are there and have hardware.
    """
    return tuple(_facts(entry, device, check) for entry in ENTRIES for device in entry.devices)


def _facts(entry: DeviceEntry, device: Device, check: bool) -> DeviceFacts:
    installed, hardware, outcome = is_installed(device), None, ""
    if installed:
        try:
            hardware = entry.hardware(device)
            if check and hardware:
                check_device(device)
                outcome = "ok"
        except DeviceError as error:
            outcome = error.message
    traits = dataclasses.asdict(device.traits)
    return DeviceFacts(
        name=device.name,
        provider=device.provider,
        package=entry.package,
        beside=entry.beside,
        installed=installed,
        hardware=hardware,
        bundles="all" if traits.pop("dynamic_shapes") else "static",
        traits=traits,
        memory=device.memory,
        check=outcome,
        tried=entry.tried,
    )
