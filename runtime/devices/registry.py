"""Which devices there are, by name; knows nothing of models.

The order is the one in which "auto" looks for a device: what computes most comes first, the CPU last.
"""

from __future__ import annotations

from edgeinfer.errors import UsageError
from edgeinfer.runtime.devices import coreml, cpu, cuda, directml, openvino, qnn, webgpu, xnnpack
from edgeinfer.runtime.devices.contract import Device, DeviceEntry
from edgeinfer.runtime.devices.providers import is_installed

__all__ = ["ENTRIES", "find_device"]

ENTRIES: tuple[DeviceEntry, ...] = (
    cuda.ENTRY,
    directml.ENTRY,
    webgpu.ENTRY,
    qnn.ENTRY,
    coreml.ENTRY,
    openvino.ENTRY,
    xnnpack.ENTRY,
    cpu.ENTRY,
)


def find_device(name: str) -> tuple[DeviceEntry, Device]:
    """What a name such as "openvino:NPU" means. A bare name is the first of its devices that has hardware.

    Raises:
        UsageError: nothing has this name.
    """
    for entry in ENTRIES:
        if name == entry.name:
            seen = (device for device in entry.devices if is_installed(device) and entry.hardware(device))
            return entry, next(seen, entry.devices[0])
        for device in entry.devices:
            if name == device.name:
                return entry, device
    known = [entry.name for entry in ENTRIES] + [d.name for entry in ENTRIES for d in entry.devices if ":" in d.name]
    raise UsageError(f"There is no device {name!r}.", f"Choose auto or one of {', '.join(known)}.")
