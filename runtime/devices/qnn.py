"""Qualcomm's neural processor through QNN; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import CPU_MEMORY, STATIC_ONLY, Device, DeviceEntry
from edgeinfer.runtime.devices.providers import plugin_devices

__all__ = ["ENTRY"]


def _seen(device: Device) -> bool:
    """Whether there is a neural processor: the provider would run on others too, no better than theirs."""
    return any(found.device.type.name == "NPU" for found in plugin_devices(device))


# Dynamic shapes are not supported (onnxruntime, docs/execution-providers/QNN-ExecutionProvider.md). Since 2.0 the
# package is a plugin beside onnxruntime (onnxruntime-qnn, README.md); older ones came in its place.
ENTRY = DeviceEntry(
    (Device("qnn", "QNNExecutionProvider", {}, STATIC_ONLY, CPU_MEMORY, plugin="onnxruntime_qnn"),),
    "onnxruntime-qnn>=2",
    True,
    "not run: no such hardware; its static graphs on the CPU",
    _seen,
)
