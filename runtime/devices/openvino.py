"""Intel's neural, graphics and central processors through OpenVINO; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import CPU_MEMORY, STATIC_ONLY, Device, DeviceEntry

__all__ = ["ENTRY"]

_PROVIDER = "OpenVINOExecutionProvider"


def _device(kind: str) -> Device:
    # Tried on onnxruntime-openvino 1.24.1: the provider takes the ordinary graphs whole and then cannot read them
    # ("Exception while Reading network"), so no session is made of them.
    return Device(f"openvino:{kind}", _PROVIDER, {"device_type": kind}, STATIC_ONLY, CPU_MEMORY)


def _seen(device: Device) -> bool:
    """Whether OpenVINO lists such a processor; two of a kind are GPU.0 and GPU.1."""
    from onnxruntime.capi import _pybind_state as state

    kind = device.options["device_type"]
    return any(seen.partition(".")[0] == kind for seen in state.get_available_openvino_device_ids())


ENTRY = DeviceEntry(
    tuple(map(_device, ("NPU", "GPU", "CPU"))),
    "onnxruntime-openvino",
    False,
    "CPU: run with onnxruntime-openvino 1.24.1; NPU and GPU not run: no such hardware",
    _seen,
)
