"""Drafting with heads over a prefix layer (Hydra++, Ankner et al. 2024, arXiv 2402.05109).

The layer reads the target's last states of the whole text, each row once. What it gives in the row before the root is
what every head of a round reads, next to the root and the tokens drafted behind it; a guess runs one head and no layer,
so trees cost one such guess a node and no rows of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import module_method
from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule, StepDrafter

_FIRST_ROW = np.zeros(1, np.int64)


class HydraPlusDrafter(StepDrafter):
    """Drafts with the heads of a module, as many tokens as there are heads; arguments as its base."""

    name = "hydra-plus"

    def __init__(self, own: OpenModule) -> None:
        super().__init__(own)
        geometry = own.backend.geometry
        self._heads = own.described.heads
        self._no_layers = np.zeros(2 * geometry.num_layers, np.bool_)
        self._prefix = np.empty(geometry.hidden_size, np.float32)  # what all heads read

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        base, size = context.root_row, 1 + len(drafted)
        if size > self._heads or max(base, self._states.done) + size > self._cache.capacity:
            return None
        if not (yield from self._catch_up(context, base)):
            return None
        if not drafted:
            return self._widened(self._first)
        return self._widened((yield from self._run([context.tokens[-1], *drafted], base)))

    def _run(self, tokens: Sequence[int], base: int) -> Passes[Floats]:  # (Vd,)
        """What the head behind these tokens says; rows that the pass took go again."""
        size = len(tokens)
        batch = Pass(
            np.array(tokens, np.int64),
            np.arange(base, base + size),
            _FIRST_ROW,
            layer_mask=self._no_layers,
            hidden=np.broadcast_to(self._prefix, (size, len(self._prefix))),
        )
        output = yield from self._evaluate(batch)
        self._cache.trim(self._states.done)
        logits: Floats = output.logits[0]
        return logits

    def _begin_at(self, state: Floats) -> None:  # (D,)
        self._prefix[:] = state

    def _trim(self, rows: int) -> None:
        self._cache.trim(rows)

    def nbytes(self) -> int:
        return super().nbytes() + self._prefix.nbytes


METHODS = (
    module_method(
        "hydra-plus",
        HydraPlusDrafter,
        what="Hydra++ module",
        hint="Train one (edgeinfer distill hydra-plus) and run it on the native kernel, or leave it out.",
        help="Hydra++ heads in the bundle",
        order=63,
    ),
)
