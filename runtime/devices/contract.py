"""What a device is: an execution provider of onnxruntime, what its kernels can do, where its arrays live.

Knows no device but the CPU, which is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CPU", "CPU_MEMORY", "CPU_PROVIDER", "Device", "Traits"]

CPU_PROVIDER = "CPUExecutionProvider"
# onnxruntime's name of ordinary memory.
CPU_MEMORY = "cpu"


@dataclass(frozen=True)
class Traits:
    """What a provider's own kernels can do; what they cannot falls back as `devices.fitting` says.

    Attributes:
        dynamic_shapes: runs the ordinary graphs; else only static ones (edgeinfer export --static).
        in_place_kv: past and present may be bound to one buffer.
        quantized_kv: attention over a cache of int8 and int4.
        branches: `If`.
        tree_bias: GroupQueryAttention with attention_bias.
        custom_ops: runs our native kernel.
    """

    dynamic_shapes: bool
    in_place_kv: bool
    quantized_kv: bool
    branches: bool
    tree_bias: bool
    custom_ops: bool


@dataclass(frozen=True)
class Device:
    """Where a model runs.

    Attributes:
        name: as users write it: "cpu", "cuda", "openvino:NPU".
        provider: onnxruntime's name: "CPUExecutionProvider".
        options: of the provider.
        traits: of its kernels.
        memory: onnxruntime's name of where its arrays live; CPU_MEMORY where it reads ordinary memory.
        plugin: module of the package that brings the provider as a library of its own; empty where onnxruntime has it.
    """

    name: str
    provider: str
    options: Mapping[str, str]
    traits: Traits
    memory: str
    plugin: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether onnxruntime's own CPU provider runs everything."""
        return self.provider == CPU_PROVIDER


CPU = Device("cpu", CPU_PROVIDER, {}, Traits(True, True, True, True, True, True), CPU_MEMORY)
