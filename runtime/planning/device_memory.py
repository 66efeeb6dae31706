"""What a model takes, and can be chosen of it, on a device other than the CPU; knows no device and no backend.

A device with memory of its own holds the weights, and the cache where the graph updates it in place. Those bytes are
listed, but no budget of the process counts them. What the device's driver takes inside the process is known only once
it is loaded, so a budget there is watched, not promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeinfer.bundle.kv_types import find_kv_type
from edgeinfer.runtime.devices.contract import CPU_MEMORY, Device
from edgeinfer.runtime.planning.configuration import Configuration, Keeping
from edgeinfer.runtime.planning.footprint import Footprint
from edgeinfer.runtime.planning.model_memory import ModelMemory

__all__ = ["kv_types_on", "memory_on", "weights_modes_on"]


def kv_types_on(device: Device, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Of the kinds of cache those that the device has kernels for."""
    return tuple(kv for kv in kinds if device.traits.quantized_kv or not find_kv_type(kv).quantized)


def weights_modes_on(device: Device, modes: tuple[str, ...]) -> tuple[str, ...]:
    """Of the places of the weights the usual one alone, but on the CPU: a provider takes weights as it likes."""
    return modes if device.on_cpu else modes[:1]


def memory_on(device: Device, memory: ModelMemory, *, cache: bool) -> ModelMemory:
    """What a model takes on a device.

    Args:
        memory: what it takes on the CPU.
        cache: whether the cache is where the weights are.
    """
    return memory if device.memory == CPU_MEMORY else _OwnMemory(memory, cache)


@dataclass(frozen=True)
class _OwnMemory:
    """Implements `model_memory.ModelMemory` for a device with memory of its own."""

    memory: ModelMemory
    cache: bool

    def import_libraries(self) -> None:
        """Imports what loading will import."""
        self.memory.import_libraries()

    def weights(self, configuration: Configuration) -> Footprint:
        """On the device; in the process the pages of the file that they are copied from, which may stay resident."""
        whole = self.memory.weights(configuration)
        size = sum(whole.anonymous.values()) + sum(whole.file.values())
        return Footprint({"weights_packed": 0}, {"weights_mapped": size}, {"weights": size})

    def running(self, configuration: Configuration) -> Footprint:
        """The cache may be on the device; inputs and outputs of passes stay in the process, as much as on the CPU."""
        whole = self.memory.running(configuration)
        if not self.cache:
            return whole
        anonymous = dict(whole.anonymous)
        return Footprint(anonymous | {"kv": 0}, whole.file, {"kv": anonymous["kv"]})

    def tokenizer(self, keeping: Keeping, *, used: bool) -> Footprint:
        """As on the CPU."""
        return self.memory.tokenizer(keeping, used=used)

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """As on the CPU: weights are read from their file there too."""
        return self.memory.phases(outside, running, configuration)
