"""What is planned for: a model and what there is to choose from; knows nothing of how one is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.bundle import Bundle, Layout, Manifest
from edgeinfer.runtime.devices.contract import CPU, Device
from edgeinfer.runtime.planning.configuration import Configuration, Keeping
from edgeinfer.runtime.planning.model_memory import ModelMemory
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """What is planned for.

    Attributes:
        backend: name of the backend that runs the model.
        layout: of the target's weights, as it will run.
        drafter: a small model that drafts.
        kv_types: those the bundle has graphs and scales for, the usual one first.
        weights_modes: those the backend has, the fastest first.
        tokenizers: ways to have the tokenizer, the usual one first.
        threads: of the linear algebra.
        memory: what the model takes.
        modes_differ: whether weights of another mode are multiplied in another way, at another speed.
        loads_experts: whether how many experts a token uses is fixed when the model is loaded.
        settings: that were tuned, and hold beside what the caller set; the largest that fit are taken.
        device: that the model runs on.
        device_note: why it is not the one that was asked for; empty where it is.
    """

    backend: str
    bundle: Bundle
    layout: Layout
    drafter: Subject | None
    kv_types: tuple[str, ...]
    weights_modes: tuple[str, ...]
    tokenizers: tuple[Keeping, ...]
    threads: int
    memory: ModelMemory
    modes_differ: bool = False
    loads_experts: bool = False
    settings: TunedSettings = UNTUNED
    device: Device = CPU
    device_note: str = ""

    @property
    def manifest(self) -> Manifest:
        """The target's manifest."""
        return self.bundle.manifest

    def variant(self, configuration: Configuration) -> str:
        """What passes cost, and may round, as in no other way of running the model: the kind of cache, streaming,
        experts left out of memory; "" is the usual one."""
        kv = "" if configuration.kv == self.kv_types[0] else configuration.kv
        mode = configuration.weights
        weights = f" {mode}" if self.modes_differ and mode != self.weights_modes[0] else ""
        streamed = f" streamed {configuration.window_layers}" if configuration.window_layers else ""
        experts = f" experts {configuration.expert_bytes}" if configuration.expert_bytes else ""
        return kv + weights + streamed + experts
