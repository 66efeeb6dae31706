"""Drafting with a module that fills a block of masks at once (Chen et al. 2026, DFlash, arXiv 2602.06036). One pass
gives the logits of all places behind the root, each without knowing what stands at the others. Chains take the best of
each; trees, grown by the controller over the best few of each place, are those of DDTree (arXiv 2604.12989)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import module_method
from edgeinfer.runtime.speculation.drafters.module_drafter import ModuleDrafter, OpenModule, Unread

_NO_ROWS = np.zeros(0, np.int64)


class DflashDrafter(ModuleDrafter):
    """Drafts with the places of a block, which only the first guess of a round waits for; arguments as its base."""

    name = "dflash"
    at_once = True

    def __init__(self, own: OpenModule) -> None:
        super().__init__(own)
        self._block = np.full(own.described.block, own.described.mask, np.int64)  # of the block
        self._logits_of: Floats | None = None  # behind the root, by place: a view of the module's last pass. (n, V)

    def repeat(self) -> None:
        self._known.clear()
        self._logits_of = None

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        base = context.root_row
        if len(drafted) >= self._size(base) - 1 or not (yield from self._catch_up(context, base)):
            return None
        if self._logits_of is None:
            yield from self._fill(_NO_ROWS, None, base, context.tokens[-1])
        places = self._logits_of
        return None if places is None else places[len(drafted)]

    def _size(self, base: int) -> int:
        """Rows of a block whose root lies in a row of the context."""
        return min(len(self._block), self._cache.capacity - base)

    def _read(self, unread: Unread) -> Passes[None]:
        self._logits_of = None
        base = int(unread.positions[-1]) + 1
        if unread.last and self._size(base) > 1:
            yield from self._fill(unread.positions, unread.states, base, int(unread.tokens[-1]))
        else:
            yield from self._evaluate(Pass(unread.tokens, unread.positions, _NO_ROWS, tapped=unread.states, block=0))

    def _fill(
        self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], states: Floats | None, base: int, root: int
    ) -> Passes[None]:
        """One pass over rows of the text that were not read and over the block, whose rows go again."""
        given, size = len(positions), self._size(base)
        self._block[0] = root
        # Which tokens the text's rows have is nowhere read.
        tokens = np.concatenate([np.full(given, root), self._block[:size]])
        places = np.concatenate([positions, np.arange(base, base + size)])
        rows = np.arange(given + 1, given + size)
        start = self._cache.length
        output = yield from self._evaluate(Pass(tokens, places, rows, tapped=states, block=size))
        self._cache.trim(start + given)
        self._logits_of = output.logits

    def _trim(self, rows: int) -> None:
        self._logits_of = None
        self._cache.trim(rows)


METHODS = (
    module_method(
        "dflash",
        DflashDrafter,
        what="DFlash drafter",
        hint="Export it with one (edgeinfer export --drafter FOLDER) and run it on the native kernel, or leave it out.",
        help="a DFlash module in the bundle, which fills a block at once",
        order=62,
    ),
)
