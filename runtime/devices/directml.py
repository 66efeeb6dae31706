"""Graphics processors of Windows through DirectML; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import STATIC_ONLY, Device, DeviceEntry

__all__ = ["ENTRY"]

# There is no `If` among the provider's operators, and it compiles a graph as a whole where shapes are known
# (onnxruntime, docs/OperatorKernels.md and docs/execution-providers/DirectML-ExecutionProvider.md). Past and present
# of a static graph are rows that the host holds.
ENTRY = DeviceEntry(
    (Device("directml", "DmlExecutionProvider", {}, STATIC_ONLY, "dml"),),
    "onnxruntime-directml",
    False,
    "not run: Windows alone; its static graphs on the CPU",
)
