"""Graphics processors of any make through WebGPU; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import Device, DeviceEntry, Traits
from edgeinfer.runtime.devices.providers import plugin_devices

__all__ = ["ENTRY"]

# Run with onnxruntime-ep-webgpu 0.4.0 on onnxruntime 1.31.1: the ordinary graphs give the CPU's tokens; `If` is
# decided on the CPU, which costs a copy of a truth value, and what is inside runs on the device.
# GroupQueryAttention there takes no notice of position_ids (onnxruntime, contrib_ops/webgpu/bert/
# group_query_attention.cc), so siblings in a draft tree would be rotated as if they followed each other; its quantized
# caches are of another layout than ours (onnxruntime, pull requests 28059 and 32284).
_TRAITS = Traits(
    dynamic_shapes=True, in_place_kv=True, quantized_kv=False, branches=False, tree_bias=False, custom_ops=False
)


def _seen(device: Device) -> bool:
    """Whether the provider found a graphics processor; one in software it lists only where its environment says so."""
    return bool(plugin_devices(device))


ENTRY = DeviceEntry(
    (Device("webgpu", "WebGpuExecutionProvider", {}, _TRAITS, "webgpu", plugin="onnxruntime_ep_webgpu"),),
    "onnxruntime-ep-webgpu",
    True,
    "run with onnxruntime-ep-webgpu 0.4.0 on a graphics processor in software (SwiftShader)",
    _seen,
)
