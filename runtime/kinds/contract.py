"""What the registry knows of a backend before it is made; knows no backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.config import LoadConfig
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.devices.contract import CPU, Device
from edgeinfer.runtime.layouts import Progress
from edgeinfer.runtime.machine import physical_cores
from edgeinfer.runtime.planning.configuration import TOKENIZER, Configuration, Keeping
from edgeinfer.runtime.planning.model_memory import ModelMemory
from edgeinfer.runtime.text.contracts import TokenizerLike
from edgeinfer.runtime.text.transient import tokenizer_facts

__all__ = ["BackendKind", "Order", "thread_count"]


@dataclass(frozen=True)
class Order:
    """A backend that is wanted.

    Attributes:
        layout: of the bundle's weights, as the kind's `layout` says.
        configuration: as planned.
        progress: called while weights are converted or loaded.
        device: that the model runs on.
    """

    bundle: Bundle
    layout: Layout
    config: LoadConfig
    configuration: Configuration
    progress: Progress | None
    device: Device = CPU

    @property
    def threads(self) -> int:
        """Threads of the linear algebra."""
        return thread_count(self.config)


class BackendKind(ABC):
    """How a backend is made and what it can do.

    Attributes:
        modes_differ, loads_experts: as `planning.subject.Subject` has them.
    """

    modes_differ: ClassVar[bool] = False
    loads_experts: ClassVar[bool] = False

    def layout(self, bundle: Bundle, config: LoadConfig) -> Layout:
        """The layout of a bundle's weights that it will run.

        Raises:
            UsageError, BundleError: it cannot run the bundle, or not as asked.
        """
        return bundle.manifest.layout

    @abstractmethod
    def engine(self) -> str:
        """Name and version of the library that runs the model."""

    @abstractmethod
    def kv_types(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Kinds of cache for a bundle, the usual one first."""

    def weights_modes(self, bundle: Bundle, layout: Layout) -> tuple[str, ...]:
        """Where the weights may be, the fastest first."""
        return ("packed",)

    @abstractmethod
    def kernel(self, bundle: Bundle, layout: Layout) -> str:
        """What multiplies, as `Backend.kernel` will say."""

    @abstractmethod
    def memory(self, bundle: Bundle, layout: Layout) -> ModelMemory:
        """What a bundle takes."""

    def tokenizers(self, bundle: Bundle) -> tuple[Keeping, ...]:
        """Ways to have the tokenizer, the usual one first."""
        return ("kept", "transient") if tokenizer_facts(bundle.path / TOKENIZER).can_rest else ("kept",)

    def tokenizer(self, backend: Backend) -> TokenizerLike:
        """The tokenizer of the model's own file, where `tokenizers` says that it is used."""
        raise NotImplementedError

    @abstractmethod
    def make(self, order: Order) -> Backend:
        """The backend, running a bundle as planned; errors as `backends.make_backend`."""


def thread_count(config: LoadConfig) -> int:
    """Threads of the linear algebra."""
    return config.threads or physical_cores()
