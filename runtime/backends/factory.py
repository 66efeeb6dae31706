"""Factories of backends: how each is made, and what a plan knows of it before. The registry lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tokenizer_table import TABLE
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.expert_use import ExpertUseObserver
from edgeinfer.runtime.devices.providers import CPU, Device, Graphs
from edgeinfer.runtime.devices.registry import choose_device
from edgeinfer.runtime.planning.plan_input import BackendChoice, Configuration, ModelMemory, TokenizerMode
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.system.machine import usable_cores
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.experts import ExpertCache
from edgeinfer.runtime.weights.layouts import Progress


@dataclass(frozen=True)
class BackendOrder:
    bundle: Bundle
    layout: Layout  # where the bundle's weights are kept, as the factory's `layout` says
    config: LoadConfig
    configuration: Configuration
    progress: Progress | None
    device: Device = CPU
    settings: TunedSettings = UNTUNED
    room: int | None = None  # bytes of the weights that the system can keep in memory; None where it keeps all

    @property
    def threads(self) -> int:
        return thread_count(self.config, self.settings)

    @property
    def affinity(self) -> str:
        """Processors of these threads, as onnxruntime takes them; "" leaves them to the system."""
        return self.settings.affinity


class BackendFactory(ABC):
    """Makes a backend, and says what it can do."""

    # `modes_differ`, `loads_experts`: see `planning.plan_input.PlanInput`.
    modes_differ: ClassVar[bool] = False
    loads_experts: ClassVar[bool] = False
    tunes: ClassVar[tuple[str, ...]] = ()  # names of the fields of `TunedSettings` that change how fast it is
    graphs: ClassVar[Graphs] = "none"  # the backend runs on onnxruntime, which decides about devices other than the CPU
    adapts: ClassVar[bool] = False

    def layout(self, bundle: Bundle, config: LoadConfig, device: Device) -> Layout:
        """The layout of a bundle's weights that it will run on a device."""
        return bundle.manifest.layout

    def device(self, config: LoadConfig) -> Device:
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
        """As `planning.plan_input.PlanInput` has it."""
        return None

    @abstractmethod
    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """The later `Backend.kernel`."""

    @abstractmethod
    def memory(self, choice: BackendChoice, config: LoadConfig) -> ModelMemory:
        """Memory of a bundle."""

    def offload(self, choice: BackendChoice, config: LoadConfig) -> Callable[[Configuration], int] | None:
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


def thread_count(config: LoadConfig, settings: TunedSettings = UNTUNED) -> int:
    """Threads of the linear algebra: as the caller said, else as tuned, else one on each core that it can keep busy."""
    return config.threads or settings.threads or usable_cores()


def counting_experts(bundle: Bundle, backend: Backend, expert_cache: ExpertCache | None = None) -> Backend:
    """A backend, its experts counted where it has any."""
    decoder = bundle.manifest.decoder
    if decoder is not None and decoder.moe is not None:
        backend.observers.append(ExpertUseObserver(decoder, expert_cache))
    return backend
