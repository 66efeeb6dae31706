"""The CPU through XNNPACK's kernels; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import CPU_MEMORY, STATIC_ONLY, Device, DeviceEntry

__all__ = ["ENTRY"]

# A few operators with static shapes (onnxruntime, docs/execution-providers/Xnnpack-ExecutionProvider.md); no package
# for Python has it, so whoever wants it builds onnxruntime with --use_xnnpack. Never chosen by itself: nothing says
# that it is faster than onnxruntime's own kernels on the same processor.
ENTRY = DeviceEntry(
    (Device("xnnpack", "XnnpackExecutionProvider", {}, STATIC_ONLY, CPU_MEMORY),),
    "onnxruntime built with --use_xnnpack",
    False,
    "not run: no package for Python; its static graphs on the CPU",
    automatic=False,
)
