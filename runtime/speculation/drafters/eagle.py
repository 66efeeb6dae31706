"""Drafting with a module that reads the target's states: EAGLE heads (Li et al. 2024, 2025) and MTP modules. Its rows
for the text read the target's states; those for drafted tokens read its own of the row before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.method import module_method
from edgeinfer.runtime.speculation.drafters.module_drafter import OpenModule, StepDrafter


class EagleDrafter(StepDrafter):
    """Drafts with a module that reads its own state of the row before where it goes on; arguments as its base."""

    name = "eagle"

    def __init__(self, own: OpenModule) -> None:
        super().__init__(own)
        self._nodes: dict[tuple[int, ...], Floats] = {}  # the module's state in the row of each path's last token
        self._path: list[int] = []  # whose rows are in the module's cache

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        base, cache = context.root_row, self._cache
        if max(base, self._states.done) + 1 + len(drafted) > cache.capacity:
            return None
        if not (yield from self._catch_up(context, base)):
            return None
        if not drafted:
            return self._widened(self._first)
        path = tuple(drafted)
        cached = 0
        while cached < min(len(self._path), len(path) - 1) and self._path[cached] == path[cached]:
            cached += 1
        cache.trim(self._states.done + cached)
        del self._path[cached:]
        logits = self._first
        while cached < len(path):
            # Rows whose own state before is known already go together.
            end = cached + 1
            while end < len(path) and path[:end] in self._nodes:
                end += 1
            logits = yield from self._feed(path, cached, end, base)
            cached = end
        return self._widened(logits)

    def _feed(self, path: tuple[int, ...], start: int, end: int, base: int) -> Passes[Floats]:  # (Vd,)
        """One pass over a path's tokens start..end-1: the logits behind the last of them."""
        hidden = np.stack([self._nodes[path[:place]] for place in range(start, end)])
        tokens, positions = np.array(path[start:end], np.int64), np.arange(base + start, base + end)
        last = np.array([end - start - 1])
        output = yield from self._evaluate(Pass(tokens, positions, last, hidden=hidden))
        assert output.hidden is not None, "modules give their states"
        for place in range(start, end):
            self._nodes[path[: place + 1]] = output.hidden[place - start].copy()
        self._path.extend(path[start:end])
        logits: Floats = output.logits[0]
        return logits

    def _begin_at(self, state: Floats) -> None:  # (D,)
        self._nodes[()] = state.copy()

    def _leave_draft(self) -> None:
        super()._leave_draft()
        self._nodes.clear()
        if self._path:
            self._trim(self._states.done)

    def _trim(self, rows: int) -> None:
        """Leaves so many rows of the text in the module's cache, and none of a path."""
        self._path.clear()
        self._cache.trim(rows)


class MtpDrafter(EagleDrafter):
    """Drafts with the module for multi-token prediction that a model ships with (DeepSeek-V3, Qwen3-Next)."""

    name = "mtp"


METHODS = (
    module_method(
        "eagle",
        EagleDrafter,
        what="EAGLE head",
        hint="Export it with one (edgeinfer export --drafter FOLDER) and run it on the native kernel, or leave it out.",
        help="an EAGLE head in the bundle",
        order=60,
    ),
    module_method(
        "mtp",
        MtpDrafter,
        what="module for multi-token prediction",
        hint="Export a checkpoint that has one and run it on the native kernel, or leave it out.",
        help="the model's own module for multi-token prediction",
        order=61,
    ),
)
