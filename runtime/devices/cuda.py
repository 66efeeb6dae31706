"""NVIDIA's processors through CUDA; knows no other device."""

from __future__ import annotations

from edgeinfer.runtime.devices.contract import STATIC_ONLY, Device, DeviceEntry

__all__ = ["ENTRY"]

# Our graphs compute in float32. The provider's GroupQueryAttention takes float16 and bfloat16 alone (onnxruntime,
# docs/OperatorKernels.md), and refuses attention_bias, which our graphs always give (onnxruntime,
# contrib_ops/cuda/bert/group_query_attention.cc): attention would run on the CPU, and the cache cross over twice in
# every layer. All operators of the static graphs are there in float32.
ENTRY = DeviceEntry(
    (Device("cuda", "CUDAExecutionProvider", {}, STATIC_ONLY, "cuda"),),
    "onnxruntime-gpu[cuda,cudnn]",
    False,
    "not run: no such hardware; its static graphs on the CPU",
)
