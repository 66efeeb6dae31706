"""Drafting with heads over a prefix layer (Hydra++, Ankner et al. 2024, arXiv 2402.05109).

The layer reads the target's last states of the whole text, each row once. What it gives in the row before the root is
what every head of a round reads, beside the root and the tokens drafted behind it; a guess runs one head and no layer,
so trees cost one such guess a node and no rows of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ObservedBackend
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.module_drafter import ModuleDrafter
from edgeinfer.runtime.speculation.drafters.target_states import Unread

__all__ = ["HydraPlusDrafter"]

_NO_ROWS = np.zeros(0, np.int64)
_FIRST_ROW = np.zeros(1, np.int64)


class HydraPlusDrafter(ModuleDrafter):
    """Drafts with the heads of a module, as many tokens as there are heads; arguments as its base, and:

    Args:
        heads: of the module.
    """

    name = "hydra-plus"

    def __init__(
        self,
        target: ObservedBackend,
        module: Backend,
        width: int,
        *,
        heads: int,
        tokens: NDArray[np.int64] | None,
    ) -> None:
        geometry = module.geometry
        self._heads = heads
        self._no_layers = np.zeros(2 * geometry.num_layers, np.bool_)
        # In the row before the root: what the first head says, and what all heads read.
        self._first = np.empty(geometry.vocab_size if tokens is None else len(tokens), np.float32)
        self._prefix = np.empty(geometry.hidden_size, np.float32)
        super().__init__(target, module, width, tapped=False, tokens=tokens)

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Floats | None:  # (V,)
        base, size, cache = context.root_row, 1 + len(drafted), self._module.cache
        if size > self._heads or max(base, self._states.done) + size > cache.capacity:
            return None
        if not self._catch_up(context, base):
            return None
        return self._widened(self._run([context.tokens[-1], *drafted], base) if drafted else self._first)

    def _run(self, tokens: Sequence[int], base: int) -> Floats:  # (Vd,)
        """What the head behind these tokens says; rows that the pass took go again."""
        size = len(tokens)
        batch = ForwardInput(
            np.array(tokens, np.int64),
            np.arange(base, base + size),
            _FIRST_ROW,
            layer_mask=self._no_layers,
            hidden=np.broadcast_to(self._prefix, (size, len(self._prefix))),
        )
        output = self._module.forward(batch)
        self._module.cache.trim(self._states.done)
        logits: Floats = output.logits[0]
        return logits

    def _read(self, unread: Unread) -> None:
        self._leave_draft()
        rows = np.array([len(unread.tokens) - 1]) if unread.last else _NO_ROWS
        output = self._module.forward(ForwardInput(unread.tokens, unread.positions, rows, tapped=unread.states))
        if not unread.last:
            return
        assert output.hidden is not None, "modules give their states"
        self._first[:] = output.logits[0]
        self._prefix[:] = output.hidden[-1]

    def _trim(self, rows: int) -> None:
        self._module.cache.trim(rows)

    def nbytes(self) -> int:
        """Bytes that its module's backend allocated, and its own."""
        return super().nbytes() + self._first.nbytes + self._prefix.nbytes
