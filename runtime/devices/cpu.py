"""The CPU, on onnxruntime's own provider and our kernel; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import CPU, DeviceEntry

__all__ = ["ENTRY"]

ENTRY = DeviceEntry((CPU,), "onnxruntime", True, "all tests")
