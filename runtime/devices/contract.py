"""What a device is: an execution provider of onnxruntime, what its kernels can do, where its arrays live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from edgeinfer.records import dataclass

# Graphs that a backend runs on onnxruntime: none, the ordinary ones, those of fixed shapes.
Graphs = Literal["none", "ordinary", "static"]

CPU_PROVIDER = "CPUExecutionProvider"
# onnxruntime's name of ordinary memory.
CPU_MEMORY = "cpu"


@dataclass(frozen=True)
class Traits:
    """What a provider's own kernels can do.

    Attributes:
        dynamic_shapes: runs the ordinary graphs; else only static ones (edgeinfer export --static), to which none of
            the others applies.
        in_place_kv: past and present may be bound to one buffer.
        quantized_kv: attention over a cache of int8 and int4.
        branches: `If`; without, the CPU decides, and what is inside runs on the device all the same.
        tree_bias: GroupQueryAttention with attention_bias, and rows at positions of their own.
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
        servers: addresses of other machines that it is made of; none where it is this machine's.
        preloaded: whether the provider needs libraries that pip installs where the system's linker does not look.
    """

    name: str
    provider: str
    options: Mapping[str, str]
    traits: Traits
    memory: str
    plugin: str = ""
    servers: tuple[str, ...] = ()
    preloaded: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether this is the CPU as all else is measured against: our kernel, and arrays used in place."""
        return self.name == "cpu"


STATIC_ONLY = Traits(False, False, False, False, False, False)
CPU = Device("cpu", CPU_PROVIDER, {}, Traits(True, True, True, True, True, True), CPU_MEMORY)


def _always(device: Device) -> bool:
    return True


@dataclass(frozen=True)
class DeviceEntry:
    """What the registry holds of one name.

    Attributes:
        devices: that it stands for, the first by the bare name.
        package: of pip that brings the provider.
        beside: whether the package is installed beside onnxruntime; else in place of it.
        tried: where it was run, for people: the table says so.
        hardware: whether the provider, which is installed, sees hardware for a device.
        automatic: whether "auto" may take it.
    """

    devices: tuple[Device, ...]
    package: str
    beside: bool
    tried: str
    hardware: Callable[[Device], bool] = _always
    automatic: bool = True

    @property
    def name(self) -> str:
        """As users write it."""
        return self.devices[0].name.partition(":")[0]
