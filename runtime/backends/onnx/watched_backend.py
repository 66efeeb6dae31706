"""A backend of a model with experts that counts how its tokens use them; knows nothing of how passes are made."""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.results import ExpertUse
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput
from edgeinfer.runtime.backends.wrapped import WrappedBackend
from edgeinfer.runtime.experts.residency import Residency
from edgeinfer.runtime.experts.statistics import ExpertCounter, ExpertCounts

__all__ = ["WatchedBackend"]


class WatchedBackend(WrappedBackend[Backend]):
    """Implements `contracts.Backend` around another one; its passes are the same.

    Args:
        inner: of a model with experts; this closes it.
        decoder: of the model.
        residency: of its experts, where not all stay in memory.

    Attributes:
        residency: as given.
    """

    def __init__(self, inner: Backend, decoder: DecoderSpec, residency: Residency | None = None) -> None:
        super().__init__(inner)
        self._counter = ExpertCounter(decoder)
        self.residency = residency

    @property
    def counts(self) -> ExpertCounts:
        """How the tokens so far used experts, those of drafts that were rejected left out."""
        return self._counter.counts(self.cache.length)

    def use(self, since: ExpertCounts | None = None) -> ExpertUse:
        """What people want to know of it.

        Args:
            since: count only what came after this.
        """
        counts = self.counts if since is None else self.counts - since
        found = counts.summary()
        r = self.residency
        if r is None:
            return found
        return dataclasses.replace(
            found, expert_bytes=r.expert_bytes, resident_bytes=r.resident_bytes, hit_rate=r.hit_rate
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
