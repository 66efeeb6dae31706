"""The target's view of a round: its logits behind a sampler that knows each node's path; knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.contracts import Draft, Law
from edgeinfer.runtime.speculation.selfcheck import near_edge

__all__ = ["PathChooser", "RoundView"]


class PathChooser(Protocol):
    """Chooses tokens from logits as a generation asks, also behind tokens that are only drafted."""

    @property
    def follows_paths(self) -> bool:
        """Whether choices depend on the tokens before them other than by the logits; else paths may be left out."""

    @property
    def takes_likeliest(self) -> bool:
        """Whether every choice is simply the token of the largest logit."""

    def token(self, logits: Floats, position: int, path: Sequence[int] = ()) -> int:  # (V,)
        """The token at an absolute position, `path` being the drafted ones before it."""

    def law(self, logits: Floats, path: Sequence[int] = ()) -> Law:  # (V,) -> (V,)
        """The distribution that `token` draws from."""

    def draw(self, law: Law, position: int, stream: int) -> int:
        """A token from a law, by a draw of that position and stream which decides nothing else."""

    def chance(self, position: int, draw: int) -> float:
        """A number in [0, 1) of that position for verification by ratio; independent for each draw."""

    def forced(self, path: Sequence[int]) -> Sequence[int]:
        """Tokens that a constraint leaves no choice about after `path`."""

    def accept(self, token: int, logits: Floats) -> None:  # (V,)
        """The token joins the reply, whose place these logits predicted."""


class RoundView:
    """Implements `contracts.TargetView` over one pass.

    Args:
        chooser: of the generation.
        draft: that was verified.
        logits: after the root and each node. (S, V)
        position: of the token after the root.
    """

    def __init__(self, chooser: PathChooser, draft: Draft, logits: Floats, position: int) -> None:
        self._chooser = chooser
        self._draft = draft
        self._logits = logits
        self._position = position
        self._chain = draft.is_chain

    def token(self, node: int) -> int:
        """The keyed choice after a node."""
        return self._chooser.token(self._logits[node + 1], self.position(node), self.path(node))

    def law(self, node: int) -> Law:
        """The distribution after a node."""
        return self._chooser.law(self._logits[node + 1], self.path(node))

    def chance(self, depth: int, draw: int) -> float:
        """A number for the position `depth` tokens after the root's successor."""
        return self._chooser.chance(self._position + depth, draw)

    def near_tie(self, node: int, noise: float) -> bool:
        """Whether the choice after a node would be another if each logit were off by at most `noise`."""
        if self._chooser.takes_likeliest:
            row = self._logits[node + 1]
            # What `near_edge` finds then, in a twentieth of its time over a large vocabulary.
            return bool(np.count_nonzero(row >= row.max() - np.float32(2 * noise)) > 1)
        position, path = self.position(node), self.path(node)
        return near_edge(lambda logits: self._chooser.token(logits, position, path), self._logits[node + 1], noise)

    def position(self, node: int) -> int:
        """Absolute position of the token after a node."""
        if node < 0:
            return self._position
        return self._position + 1 + (node if self._chain else self._draft.depth(node))

    def path(self, node: int) -> Sequence[int]:
        """Drafted tokens up to a node, where choices depend on them."""
        return self._draft.path(node) if self._chooser.follows_paths else ()
