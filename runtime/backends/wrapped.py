"""Backends around another one: what they leave to it, and the one that counts the experts that its passes use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.results import ExpertUse
from edgeinfer.runtime.backends.adapting import adapters_of, choose_adapter
from edgeinfer.runtime.backends.cache import KVCache, ObservedCache
from edgeinfer.runtime.backends.contract import (
    Backend,
    ForwardInput,
    ForwardOutput,
)
from edgeinfer.runtime.experts.expert_cache import ExpertCache
from edgeinfer.runtime.experts.statistics import ExpertCounter, ExpertCounts

B = TypeVar("B", bound=Backend)
_NO_ROWS = np.zeros(0, np.int64)


class WrappedBackend(Generic[B]):
    """Implements `contract.Backend` but for `forward`, which takes a turn of its own.

    Args:
        inner: that runs the passes; this closes it.
    """

    def __init__(self, inner: B) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """Name for people."""
        return self._inner.name

    @property
    def kernel(self) -> str:
        """What multiplies."""
        return self._inner.kernel

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""
        return self._inner.geometry

    @property
    def capabilities(self) -> Capabilities:
        """What may be asked of `forward`."""
        return self._inner.capabilities

    @property
    def cache(self) -> KVCache:
        """That of the backend inside."""
        return self._inner.cache

    @property
    def adapters(self) -> Mapping[str, str]:
        """See `adapting.AdaptingBackend.adapters`; none where the backend inside takes none."""
        return adapters_of(self._inner)

    def use_adapter(self, name: str | None) -> None:
        """See `adapting.AdaptingBackend.use_adapter`."""
        choose_adapter(self._inner, name)

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        return self._inner.forward(batch)

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        self._inner.cancel()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        return self._inner.nbytes()

    def close(self) -> None:
        """Closes the backend inside."""
        self._inner.close()


class ExpertCountingBackend(WrappedBackend[Backend]):
    """Implements `contract.Backend` around another one; its passes are the same.

    Args:
        inner: of a model with experts; this closes it.
        cache: its own, which tells which rows were kept.
        decoder: of the model.
        expert_cache: of its experts, where not all stay in memory.

    Attributes:
        expert_cache: as given.
    """

    def __init__(
        self, inner: Backend, cache: ObservedCache, decoder: DecoderSpec, expert_cache: ExpertCache | None = None
    ) -> None:
        super().__init__(inner)
        self._counter = ExpertCounter(decoder)
        self.expert_cache = expert_cache
        cache.observe_keep = self._counter.kept

    @property
    def counts(self) -> ExpertCounts:
        """How the tokens so far used experts, those of drafts that were rejected left out."""
        return self._counter.counts(self.cache.length)

    def use(self, since: ExpertCounts | None = None) -> ExpertUse:
        """What people want to know of it."""
        counts = self.counts if since is None else self.counts - since
        found = counts.summary()
        cache = self.expert_cache
        if cache is None:
            return found
        return dataclasses.replace(
            found, expert_bytes=cache.expert_bytes, resident_bytes=cache.cached_bytes, hit_rate=cache.hit_rate
        )

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        start = self.cache.length
        output = self._inner.forward(batch)
        # Drafts of cheaper passes are not what the model's tokens use, and passes that go on after one know not all.
        whole = batch.planes == 2 and batch.experts is None and batch.layer_mask is None and batch.hidden is None
        if whole and output.experts is not None:
            self._counter.passed(start, output.experts)
        return output


def uncounted(backend: Backend) -> Backend:
    """The backend whose passes use experts without being counted: inside `ExpertCountingBackend`, or the same."""
    return backend._inner if isinstance(backend, ExpertCountingBackend) else backend
