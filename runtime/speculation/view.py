"""The target's view of a round: its logits behind a sampler that knows each node's path; knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.speculation.contracts import Draft, Probabilities
from edgeinfer.runtime.speculation.selfcheck import near_edge

__all__ = ["RoundView"]


class RoundView:
    """Implements `contracts.TargetView` over one pass.

    Args:
        sampler: of the generation.
        draft: that was verified.
        logits: after the root and each node. (S, V)
        position: of the token after the root.
    """

    def __init__(self, sampler: Sampler, draft: Draft, logits: Floats, position: int) -> None:
        self._sampler = sampler
        self._draft = draft
        self._logits = logits
        self._position = position
        self._chain = draft.is_chain

    def token(self, node: int) -> int:
        """The keyed choice after a node."""
        return self._sampler.sample(self._logits[node + 1], self.position(node), self.path(node))

    def probabilities(self, node: int) -> Probabilities:
        """The distribution after a node."""
        return self._sampler.probabilities(self._logits[node + 1], self.path(node))

    def uniform(self, depth: int, draw: int) -> float:
        """A number for the position `depth` tokens after the root's successor."""
        return self._sampler.uniform(self._position + depth, draw)

    def near_tie(self, node: int, noise: float) -> bool:
        """Whether the choice after a node would be another if each logit were off by at most `noise`."""
        if self._sampler.takes_likeliest:
            row = self._logits[node + 1]
            # What `near_edge` finds then, in a twentieth of its time over a large vocabulary.
            return bool(np.count_nonzero(row >= row.max() - np.float32(2 * noise)) > 1)
        position, path = self.position(node), self.path(node)
        return near_edge(lambda logits: self._sampler.sample(logits, position, path), self._logits[node + 1], noise)

    def position(self, node: int) -> int:
        """Absolute position of the token after a node."""
        if node < 0:
            return self._position
        return self._position + 1 + (node if self._chain else self._draft.depth(node))

    def path(self, node: int) -> Sequence[int]:
        """Drafted tokens up to a node, where choices depend on them."""
        return self._draft.path(node) if self._sampler.follows_paths else ()
