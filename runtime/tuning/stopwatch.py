"""Times a model under different settings, with two of them loaded at once where there is memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from statistics import mean
from types import TracebackType
from typing import Self

from edgeinfer.core.errors import BudgetError, Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.planning.facts import Configuration
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.speed_model import REPLY_TOKENS, ROUND_MS, TURN_TOKENS, Pace, SpeedModel
from edgeinfer.runtime.profile.costs import PassCosts, prospects_by
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.speculation.drafters.method import table_priors
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.tuning.measure import pass_times, turn_times

# Milliseconds: of a token of a long prompt, of a plain token, of a pass that verifies, of a turn; of loading.
PREFILL, DECODE, VERIFY, TURN, LOAD = "prompt", "decode", "verify", "turn", "load"
Times = Mapping[str, float]
# What a timer times: turns of a chat; long prompts alone; loading and then a turn.
TURNS, PROMPTS, LOADED = "turns", "prompts", "loaded"

# Rows of passes that verify, for which every plan has room that drafts.
_VERIFIED = (4, 8)
_LEAST_CONTEXT, _LEAST_PROMPT, _LEAST_REPLY = 32, 64, 4
# Tokens behind which passes verify, and passes of each size in a visit.
_PAST, _REPEATS = 64, 2


@dataclass(frozen=True)
class Work:
    """What is timed in a visit: tokens of a prompt and of a plain reply (0 for the prompt alone), and rows of verifying
    passes."""

    prompt: int
    reply: int
    verified: tuple[int, ...] = ()

    def visit(self, sequence: decoding.Sequence, configuration: Configuration) -> Times:
        """Milliseconds of each part; empties the cache."""
        turn = turn_times(sequence, self.prompt, self.reply)
        times = {PREFILL: turn.prompt_ms / self.prompt}
        if not self.reply:
            return times
        times[DECODE] = turn.reply_ms / self.reply
        passes: dict[int, float] = {}
        if self.verified:
            timed = pass_times(sequence, self.verified, past=min(_PAST, self.prompt), repeats=_REPEATS)
            passes = {rows: mean(ms) for rows, ms in timed.items()}
            times[VERIFY] = mean(passes.values())
        times[TURN] = TURN_TOKENS * times[PREFILL] + REPLY_TOKENS * _token_ms(configuration, times[DECODE], passes)
        return times


def verified_rows(configuration: Configuration) -> tuple[int, ...]:
    """Row counts of verifying passes that a plan has room for."""
    return tuple(rows for rows in _VERIFIED if rows <= configuration.draft_max + 1)


def sized(times: Times, visit_ms: float, most: Work) -> Work:
    """Work that takes about this long, at most `most`."""
    share = visit_ms / (2 if most.reply else 1)
    prompt = min(most.prompt, max(_LEAST_PROMPT, round(share / times[PREFILL])))
    reply = min(most.reply, max(_LEAST_REPLY, round(share / times[DECODE])))
    return dataclasses.replace(most, prompt=prompt, reply=reply)


def fitting(work: Work, context: int) -> Work:
    """Cuts the work to what a context holds."""
    if context < _LEAST_CONTEXT:
        message = f"Tuning needs a context of {_LEAST_CONTEXT} tokens, but there are {context}."
        raise UsageError(message, "Use a larger " + Setting("context") + ", or leave it out.")
    reply = min(work.reply, context // 4)
    return dataclasses.replace(work, prompt=min(work.prompt, context - max((*work.verified, reply))), reply=reply)


def _token_ms(configuration: Configuration, plain_ms: float, passes: Mapping[int, float]) -> float:
    """A token of a reply, drafted where that is predicted to pay."""
    costs = PassCosts(((1, plain_ms), *sorted(passes.items())))
    prospects = prospects_by(table_priors(), plain_ms)
    pace = Pace(costs, measured=True, round_ms=ROUND_MS, prospects=prospects)
    drafting = dataclasses.replace(configuration, draft_max=min(configuration.draft_max, costs.largest - 1))
    return 1e3 / SpeedModel(lambda _: pace).speed(drafting).tokens_per_second


# The most work of a visit: more tells nothing more. A prompt as long as the largest chunk tried, twice that where
# prompts alone are timed.
_LONGEST_PROMPT, _LONGEST_PROMPTS, _LONGEST_REPLY = 256, 512, 64
# What is timed first, to know how much fits a visit.
_GLANCE = Work(64, 4)
_FIRST = Work(1, 0)


@dataclass(frozen=True)
class _Loaded:
    sequence: decoding.Sequence
    plan: MemoryPlan


class Stopwatch:
    """Loads a model as settings say and times it, within `memory` bytes and `visit_ms` a visit."""

    def __init__(
        self,
        plan_for: Callable[[TunedSettings], MemoryPlan],
        make: Callable[[TunedSettings, MemoryPlan], decoding.Sequence],
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
            times = min((glance.visit(usual.sequence, configuration) for _ in range(2)), key=lambda each: each[TURN])
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
        work = self._work[task]
        if task != LOADED:
            loaded = self._load(settings)
            return work.visit(loaded.sequence, loaded.plan.configuration)
        self.close()
        started = time.perf_counter()
        loaded = self._load(settings)
        load_ms = (time.perf_counter() - started) * 1e3
        times = work.visit(loaded.sequence, loaded.plan.configuration)
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
        while self._loaded and (
            len(self._loaded) > 1
            or plan.planned_bytes + sum(each.plan.planned_bytes for each in self._loaded.values()) > self._memory
        ):
            self._drop(next(iter(self._loaded)))
        loaded = _Loaded(self._make(settings, plan), plan)
        self._loaded[settings] = loaded
        # The first pass reads the weights' pages in, which belongs to loading.
        _FIRST.visit(loaded.sequence, plan.configuration)
        return loaded

    def _drop(self, settings: TunedSettings) -> None:
        self._loaded.pop(settings).sequence.backend.close()
        release_freed()

    def close(self) -> None:
        for settings in tuple(self._loaded):
            self._drop(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
