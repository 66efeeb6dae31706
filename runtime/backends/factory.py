"""Factories of backends: how each is made, and what a plan knows of it before. The registry lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tokenizer_table import TABLE
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.expert_use import ExpertUseObserver
from edgeinfer.runtime.devices.providers import Device, Graphs
from edgeinfer.runtime.devices.registry import choose_device
from edgeinfer.runtime.planning.facts import (
    BundleFacts,
    Configuration,
    ModelMemory,
    TokenizerMode,
    memory_on,
    weights_modes_on,
)
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.system.machine import usable_cores
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.experts import ExpertCache
from edgeinfer.runtime.weights.layouts import Progress


@dataclass(frozen=True)
class BackendOrder:
    """A backend to make: what was found out about its bundle, and what was chosen."""

    facts: BundleFacts
    config: LoadOptions
    configuration: Configuration
    progress: Progress | None = None
    room: int | None = None  # bytes of the weights that the system can keep in memory; None where it keeps all

    @property
    def bundle(self) -> Bundle:
        return self.facts.bundle

    @property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def device(self) -> Device:
        return self.facts.device

    @property
    def threads(self) -> int:
        return self.facts.threads

    @property
    def affinity(self) -> str:
        """Processors of these threads, as onnxruntime takes them; "" leaves them to the system."""
        return self.facts.settings.affinity


class BackendFactory(ABC):
    """Makes a backend, and says what it can do."""

    # As `planning.facts.BundleFacts` has them.
    modes_differ: ClassVar[bool] = False
    loads_experts: ClassVar[bool] = False
    tunes: ClassVar[tuple[str, ...]] = ()
    graphs: ClassVar[Graphs] = "none"  # the backend runs on onnxruntime, which decides about devices other than the CPU
    adapts: ClassVar[bool] = False

    def facts(self, name: str, bundle: Bundle, config: LoadOptions) -> BundleFacts:
        """All that loading and planning ask about a bundle."""
        device = self.device(config)
        layout = self.layout(bundle, config, device)
        return BundleFacts(
            name,
            bundle,
            layout,
            drafter=None,
            kv_types=self.kv_types(bundle, layout),
            weights_modes=weights_modes_on(device, self.weights_modes(bundle, layout)),
            tokenizer=self.tokenizer_mode(bundle),
            threads=thread_count(config),
            memory=memory_on(device, self.memory(bundle, layout, device, config), cache=self.graphs == "ordinary"),
            modes_differ=self.modes_differ,
            loads_experts=self.loads_experts,
            most_drafted=self.most_drafted(bundle),
            head_apart=self.head_apart(bundle, layout),
            device=device,
            offload=self.offload(bundle, device, config),
            weights_place=self.weights_place(bundle, layout),
            tunes=self.tunes,
            engine=lambda: self.engine() if device.on_cpu else f"{self.engine()} on {device.name}",
            kernel=lambda: self.kernel(bundle, layout),
        )

    def layout(self, bundle: Bundle, config: LoadOptions, device: Device) -> Layout:
        """The layout of a bundle's weights that it will run on a device."""
        return bundle.manifest.layout

    def device(self, config: LoadOptions) -> Device:
        config.refuse_division(self.engine())
        return choose_device(config, self.graphs)

    @abstractmethod
    def engine(self) -> str:
        """Name and version of the library that runs the model."""

    @abstractmethod
    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Kinds of cache for a bundle, the usual one first."""

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Where the weights may be, the fastest first."""
        return ("packed",)

    def weights_place(self, bundle: Bundle, layout: Layout) -> Path | None:
        """As `planning.facts.BundleFacts` has it."""
        return None

    @abstractmethod
    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """The later `Backend.kernel`."""

    @abstractmethod
    def memory(self, bundle: Bundle, layout: Layout, device: Device, config: LoadOptions) -> ModelMemory:
        """Memory of a bundle."""

    def offload(self, bundle: Bundle, device: Device, config: LoadOptions) -> Callable[[Configuration], int] | None:
        """Counts the layers that run on a graphics processor; None without one."""
        return None

    def most_drafted(self, bundle: Bundle) -> int | None:
        """Tokens of a draft that can be taken back again, at most; None where any number can."""
        return None

    def head_apart(self, bundle: Bundle, layout: Layout) -> bool:
        """Whether logits of a pass's rows can be computed later, a few at a time, where all weights are in memory."""
        return False

    def tokenizer_mode(self, bundle: Bundle) -> TokenizerMode:
        """How the tokenizer is kept in memory."""
        return "mapped" if bundle.has(TABLE) else "kept"

    def tokenizer(self, backend: Backend) -> TokenizerLike:
        """The tokenizer of the model's own file, where `tokenizer_mode` is "model"."""
        raise NotImplementedError

    @abstractmethod
    def make(self, order: BackendOrder) -> Backend:
        """The backend, running a bundle as planned; errors as `registry.make_backend`."""


def thread_count(config: LoadOptions, settings: TunedSettings = UNTUNED) -> int:
    """Threads of the linear algebra: as the caller said, else as tuned, else one on each core that it can keep busy."""
    return config.threads or settings.threads or usable_cores()


def counting_experts(bundle: Bundle, backend: Backend, expert_cache: ExpertCache | None = None) -> Backend:
    """A backend, its experts counted where it has any."""
    decoder = bundle.manifest.decoder
    if decoder is not None and decoder.moe is not None:
        backend.observers.append(ExpertUseObserver(decoder, expert_cache))
    return backend
