"""Apple's neural engine, graphics and CPU through Core ML; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import CPU_MEMORY, STATIC_ONLY, Device, DeviceEntry

__all__ = ["ENTRY"]

# Without static shapes the provider leaves nodes to the CPU or runs them slower, and it knows none of the operators
# outside the ONNX standard; ML programs, unlike the older networks, multiply matrices of activations (onnxruntime,
# docs/execution-providers/CoreML-ExecutionProvider.md).
_OPTIONS = {"ModelFormat": "MLProgram", "RequireStaticInputShapes": "1"}
ENTRY = DeviceEntry(
    (Device("coreml", "CoreMLExecutionProvider", _OPTIONS, STATIC_ONLY, CPU_MEMORY),),
    "onnxruntime for macOS",
    True,
    "not run: macOS alone; its static graphs on the CPU",
)
