"""The work by which two ways to run a model are compared: prompt, reply, and passes that verify.

A turn of a chat is reckoned from them as a plan reckons it: 64 new tokens of prompt and 128 of reply, drafted where
drafting is on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import mean

from edgeinfer.errors import Setting, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.economics import prospects_by
from edgeinfer.runtime.planning.speed_model import REPLY_TOKENS, ROUND_MS, TURN_TOKENS, Pace, SpeedModel
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.speculation.prospects import TABLES
from edgeinfer.runtime.tuning.measure import pass_times, turn_times

# Milliseconds: of a token of a long prompt, of a plain token, of a pass that verifies, of a turn; of loading.
PREFILL, DECODE, VERIFY, TURN, LOAD = "prompt", "decode", "verify", "turn", "load"
Times = Mapping[str, float]

# Rows of passes that verify, for which every plan has room that drafts.
_VERIFIED = (4, 8)
_LEAST_CONTEXT, _LEAST_PROMPT, _LEAST_REPLY = 32, 64, 4
# Tokens behind which passes verify, and passes of each size in a visit.
_PAST, _REPEATS = 64, 2


@dataclass(frozen=True)
class Work:
    """What is timed in a visit.

    Attributes:
        prompt: tokens; a pass over a large chunk needs as many.
        reply: tokens decoded plainly; 0 times the prompt alone.
        verified: rows of passes that verify; () where nothing is drafted.
    """

    prompt: int
    reply: int
    verified: tuple[int, ...] = ()

    def visit(self, engine: Engine, configuration: Configuration) -> Times:
        """Milliseconds of each part; empties the cache."""
        turn = turn_times(engine, self.prompt, self.reply)
        times = {PREFILL: turn.prompt_ms / self.prompt}
        if not self.reply:
            return times
        times[DECODE] = turn.reply_ms / self.reply
        passes: dict[int, float] = {}
        if self.verified:
            timed = pass_times(engine, self.verified, past=min(_PAST, self.prompt), repeats=_REPEATS)
            passes = {rows: mean(ms) for rows, ms in timed.items()}
            times[VERIFY] = mean(passes.values())
        times[TURN] = TURN_TOKENS * times[PREFILL] + REPLY_TOKENS * _token_ms(configuration, times[DECODE], passes)
        return times


def verified_rows(configuration: Configuration) -> tuple[int, ...]:
    """Rows of the passes that verify which a plan has room for."""
    return tuple(rows for rows in _VERIFIED if rows <= configuration.draft_max + 1)


def sized(times: Times, visit_ms: float, most: Work) -> Work:
    """Work that takes about so long.

    Args:
        most: more is not needed.
    """
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
    prospects = prospects_by(TABLES, plain_ms)
    pace = Pace(costs, measured=True, round_ms=ROUND_MS, prospects=prospects)
    drafting = dataclasses.replace(configuration, draft_max=min(configuration.draft_max, costs.largest - 1))
    return 1e3 / SpeedModel(lambda _: pace).speed(drafting).tokens_per_second
