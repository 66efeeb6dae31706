"""What a loaded model really takes, watched while it works: gives up what it can spare before the budget is exceeded.
It knows the plan and what can give memory back, not what that memory holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from edgeinfer.core.errors import BudgetError, Setting
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.planner import Replan
from edgeinfer.runtime.system.memory import ProcessMemory, process_memory

_log = logging.getLogger("edgeinfer")

# Seconds between two looks: one takes some 30 microseconds.
LOOK_S = 0.02
# Bytes below the budget from which memory is given up, and the share of the budget that must be free to take it again.
_MARGIN_BYTES = 1_000_000
_AMPLE = 0.1


@dataclass(frozen=True)
class MemoryRelief:
    """A way to free memory: `release` returns False if nothing was left, `restore` undoes it when there is ample room.
    `name` is for people, "" where the loss is not noticed."""

    name: str
    release: Callable[[], bool]
    restore: Callable[[], None] | None = None


class Ledger:
    """Keeps a process within the budget of its plan; without a budget nothing is ever given up. `terms` gives bytes in
    use by the plan's terms; `reliefs` are tried in order; `given_up` names what was given up."""

    def __init__(
        self,
        plan: MemoryPlan,
        terms: Callable[[], Mapping[str, int]],
        reliefs: Sequence[MemoryRelief],
        replan: Replan,
        apply: Callable[[MemoryPlan], None],
    ) -> None:
        self.plan = plan
        self._terms = terms
        self._reliefs = reliefs
        self._replan = replan
        self._apply = apply
        self._looked = 0.0
        self.given_up: list[str] = []
        self.peak = 0

    def terms(self, memory: ProcessMemory) -> dict[str, int]:
        """Bytes in use now, by term; "process" is the whole process."""
        return dict(self._terms()) | {"process": self.counted(memory)}

    def counted(self, memory: ProcessMemory) -> int:
        """Bytes of the pages that count against the budget."""
        return memory.rss if self.plan.counted == "resident" else memory.anonymous

    def begin_turn(self) -> None:
        """Plan again if the program around the model has changed, and take back what was given up if there is ample
        room."""
        budget = self.plan.budget_bytes
        if budget is None:
            return
        memory = process_memory()
        plan = self._replan(self.plan, memory, self._terms())
        if plan.configuration != self.plan.configuration:
            _log.info("Replanned: %s.", "; ".join(plan.given_up) or "nothing given up")
            self._apply(plan)
        self.plan = plan
        if self.given_up and self.counted(memory) < (1 - _AMPLE) * budget:
            for relief in self._reliefs:
                if relief.name in self.given_up and relief.restore is not None:
                    relief.restore()
            self.given_up.clear()
        self.check(now=True)

    def plan_grammars(self) -> None:
        """Plan memory for replies by a grammar if the current plan has none."""
        if self.plan.configuration.grammars != "none":
            return
        plan = self._replan(self.plan, process_memory(), self._terms(), grammars=True)
        if not plan.fits:
            assert plan.budget_bytes is not None, "without a budget all fits"
            raise BudgetError(
                f"Replies by a schema, an expression or a grammar take up to {format_size(plan.terms['grammars'])} "
                f"more, for which the budget of {format_size(plan.budget_bytes)} has no room.",
                f"Give at least {format_size(plan.planned_bytes, up=True)}, or load the model with "
                + Setting("structured", True)
                + ", which plans for them from the start.",
                terms=plan.terms,
                minimum_bytes=plan.planned_bytes,
            )
        self._apply(plan)
        self.plan = plan

    def check(self, *, now: bool = False) -> None:
        """Check the budget and give up what is needed to keep it; `now` even if the last check is a moment ago."""
        budget = self.plan.budget_bytes
        clock = time.monotonic()
        if budget is None or (not now and clock - self._looked < LOOK_S):
            return
        self._looked = clock
        used = self._look()
        for relief in self._reliefs:
            while used > budget - _MARGIN_BYTES and relief.release():
                used = self._look()
                if relief.name and relief.name not in self.given_up:
                    self.given_up.append(relief.name)
                    _log.info("Memory is short: gave up %s.", relief.name)
        if used > budget:
            raise BudgetError(
                f"The process holds {format_size(used)}, the budget is {format_size(budget)}, and nothing is left to "
                "give up.",
                "Free memory elsewhere in this program, use a larger budget, or load the model with a smaller context.",
                terms=self.terms(process_memory()),
                minimum_bytes=used,
            )

    def _look(self) -> int:
        used = self.counted(process_memory())
        self.peak = max(self.peak, used)
        return used
