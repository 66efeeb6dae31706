"""Times a model under different settings, with two of them loaded at once where there is memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from edgeinfer.errors import BudgetError
from edgeinfer.records import dataclass
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.tuning.search import LOADED, PROMPTS, TURNS
from edgeinfer.runtime.tuning.work import LOAD, TURN, Times, Work, fitting, sized, verified_rows

# The most work of a visit: more tells nothing more. A prompt as long as the largest chunk tried, twice that where
# prompts alone are timed.
_LONGEST_PROMPT, _LONGEST_PROMPTS, _LONGEST_REPLY = 256, 512, 64
# What is timed first, to know how much fits a visit.
_GLANCE = Work(64, 4)
_FIRST = Work(1, 0)


@dataclass(frozen=True)
class _Loaded:
    engine: Engine
    plan: MemoryPlan


class Stopwatch:
    """Loads a model as settings say and times it.

    Args:
        plan_for: plans for settings.
        make: loads by settings and a plan.
        memory: bytes that may be taken.
        visit_ms: how long a visit may take.

    Raises:
        BudgetError, UsageError: the model does not fit with the usual settings, or has too small a context.
    """

    def __init__(
        self,
        plan_for: Callable[[TunedSettings], MemoryPlan],
        make: Callable[[TunedSettings, MemoryPlan], Engine],
        memory: int,
        visit_ms: float,
    ) -> None:
        self._plan_for = plan_for
        self._make = make
        self._memory = memory
        self._loaded: dict[TunedSettings, _Loaded] = {}  # the longest unused first
        usual = self._load(UNTUNED)
        configuration = usual.plan.configuration
        most = Work(_LONGEST_PROMPT, _LONGEST_REPLY, verified_rows(configuration))
        try:
            glance = fitting(_GLANCE, configuration.context)
            # What disturbs only adds, and would make all that follows too short.
            times = min((glance.visit(usual.engine, configuration) for _ in range(2)), key=lambda each: each[TURN])
        except BaseException:
            self.close()
            raise
        turn = sized(times, visit_ms, most)
        prompts = sized(times, visit_ms, Work(_LONGEST_PROMPTS, 0))
        works = {TURNS: turn, LOADED: turn, PROMPTS: prompts}
        self._work = {task: fitting(work, configuration.context) for task, work in works.items()}

    @property
    def longest_prompt(self) -> int:
        """Tokens of the prompts that are timed; larger chunks show nothing."""
        return self._work[PROMPTS].prompt

    def __call__(self, settings: TunedSettings, task: str) -> Times:
        """Milliseconds of one visit."""
        work = self._work[task]
        if task != LOADED:
            loaded = self._load(settings)
            return work.visit(loaded.engine, loaded.plan.configuration)
        self.close()
        started = time.perf_counter()
        loaded = self._load(settings)
        load_ms = (time.perf_counter() - started) * 1e3
        times = work.visit(loaded.engine, loaded.plan.configuration)
        self.close()
        return {**times, LOAD: load_ms}

    def _load(self, settings: TunedSettings) -> _Loaded:
        if settings in self._loaded:
            self._loaded[settings] = self._loaded.pop(settings)
            return self._loaded[settings]
        plan = self._plan_for(settings)
        plan.require_fit()
        missing = [name for name in settings.names if name not in plan.tuned]
        if missing:
            message = f"There is not enough memory to try {', '.join(missing)} within the budget."
            raise BudgetError(message, "Tune with a larger budget, or none.", terms=plan.terms)
        while self._loaded and (len(self._loaded) > 1 or not self._room_beside(plan)):
            self._drop(next(iter(self._loaded)))
        loaded = _Loaded(self._make(settings, plan), plan)
        self._loaded[settings] = loaded
        # The first pass reads the weights' pages in, which belongs to loading.
        _FIRST.visit(loaded.engine, plan.configuration)
        return loaded

    def _room_beside(self, plan: MemoryPlan) -> bool:
        return plan.planned_bytes + sum(each.plan.planned_bytes for each in self._loaded.values()) <= self._memory

    def _drop(self, settings: TunedSettings) -> None:
        self._loaded.pop(settings).engine.backend.close()
        release_freed()

    def close(self) -> None:
        """Frees what is loaded."""
        for settings in tuple(self._loaded):
            self._drop(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
