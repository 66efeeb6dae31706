"""What the memory benchmark measures inside a fresh process, whose memory is then its own.

python -m edgeinfer.apps.bench.memory_jobs NAME ARGUMENTS

Arguments are a JSON object, and so is what it prints.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.enforced import set_limit
from edgeinfer.apps.bench.synthetic import pseudo_text
from edgeinfer.apps.bench.watch import Growth, resident_bytes
from edgeinfer.errors import BudgetError
from edgeinfer.results import Result

# A form whose reply goes on for as long as it may.
_FORM = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 900}
# Words of a text, said again and again, so that drafts are made and some are right.
_REPEATED_WORDS = 24
_REPLY_TOKENS, _SAMPLED_TOKENS, _LAST_TOKENS = 24, 8, 40
# Turns of a conversation in a loop of many, and tokens: of markup around a turn, and of a message at least.
_TURNS_TO_FILL, _MARKUP_TOKENS, _LEAST_MESSAGE = 4, 32, 8


@dataclass(frozen=True)
class FilledContext:
    """A context that was filled to its end.

    Attributes:
        tokens: of prompt and reply, those beyond the context included.
        tokens_per_second: of the last reply.
        accepted_length: its mean number of tokens per pass.
        peak_rss_bytes: of the process so far.
        used: bytes that the plan's terms take at its end.
        given_up: what had to be spared beyond what the plan gave up.
    """

    tokens: int
    tokens_per_second: float
    accepted_length: float
    peak_rss_bytes: int
    used: dict[str, int] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()


def fill_context(model: Any, seed: int, *, beyond: bool = False, draft_width: int = 1) -> FilledContext:
    """Prefills half a context, replies, prefills more, replies with sampled tokens, and replies until all is full.

    Where replies by grammars are planned for, the sampled one is such a reply.
    """
    context = model.context
    words = f"{pseudo_text(_REPEATED_WORDS, seed)} "
    # No longer than the context, as turning a text into tokens takes memory too.
    text = words * (context // len(model.tokenize(words)) + 1)
    options = {"ignore_eos": True, "draft_width": draft_width}
    whole = model.tokenize(text)[: context // 2]
    whole += model.generate(whole, max_tokens=min(_REPLY_TOKENS, context // 8 or 1), **options).token_ids
    last = min(_LAST_TOKENS, context // 4)
    whole += model.tokenize(text)[: max(context - last - len(whole), 0)]
    sampled = options | {"temperature": 1.0, "seed": seed, "max_tokens": max(1, min(_SAMPLED_TOKENS, last // 2))}
    if model.plan.configuration.grammars != "none":
        sampled |= {"json_schema": _FORM, "ignore_eos": False}
    whole += model.generate(whole, **sampled).token_ids
    left = context - len(whole) + 1 + (context // 4 if beyond else 0)
    reply = model.generate(whole, max_tokens=max(left, 1), **options)
    return FilledContext(
        tokens=reply.usage.total_tokens,
        tokens_per_second=reply.timings.tokens_per_second,
        accepted_length=reply.speculation.mean_accepted_length,
        peak_rss_bytes=reply.memory.peak_rss_bytes,
        used=dict(reply.memory.used),
        given_up=reply.memory.given_up[len(model.plan.given_up) :],
    )


def run_planned(
    model: str | None, slack: float, limit: Mapping[str, str], seed: int, draft_width: int, **options: Any
) -> dict[str, Any]:
    """Loads with `slack` times the smallest budget, under an enforced limit, and fills the context."""
    least = edgeinfer.plan(model, **options)
    budget = round(least.minimum_bytes * slack)
    # Where pages of files are not counted, the system still counts those that this process is the first to touch.
    spare = sum(least.footprint.file.values()) if least.counted == "anonymous" else 0
    set_limit(limit, budget + spare, mapped=sum(least.footprint.file.values()))
    found: dict[str, Any] = {"budget": budget, "minimum": least.minimum_bytes}
    try:
        with edgeinfer.load(model, memory=budget, **options) as loaded:
            plan = loaded.plan
            found |= {"planned": plan.planned_bytes, "context": plan.context, "choice": plan.to_dict()["choice"]}
            found |= {"anonymous": dict(plan.footprint.anonymous), "file": dict(plan.footprint.file)}
            found |= {"plan_given_up": plan.given_up}
            beyond = options.get("overflow", "stop") != "stop"
            found |= asdict(fill_context(loaded, seed, beyond=beyond, draft_width=draft_width))
    except BudgetError as error:
        return {**found, "refused": error.message}
    return found


def time_replies(
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    limit: Mapping[str, str] | None = None,
    *,
    ignore_eos: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Replies to every prompt: how long they take, and what plan and process take; under a limit where there is one."""
    plan = edgeinfer.plan(model, **options)
    if limit is not None and plan.budget_bytes is not None:
        set_limit(limit, plan.budget_bytes, mapped=sum(plan.footprint.file.values()))
    try:
        with edgeinfer.load(model, **options) as loaded:
            plan, growth = loaded.plan, Growth()
            timed = [_timed_reply(loaded, ids, max_tokens, ignore_eos) for ids in prompts]
            replies = [reply for reply, _ in timed]
            generation, mapped = growth.bytes(), resident_bytes(Path(model) / "weights.bin")
    except BudgetError as error:
        return {"refused": error.message}
    return {
        "planned": plan.planned_bytes,
        "terms": plan.terms,
        "weights_resident": mapped + plan.terms.get("weights_packed", 0),
        "generation": generation,
        "choice": plan.to_dict()["choice"],
        "plan_given_up": plan.given_up,
        "peak_rss_bytes": max(growth.peak_before, *(reply.memory.peak_rss_bytes for reply in replies)),
        "given_up": replies[-1].memory.given_up[len(plan.given_up) :],
        "ms_per_token": [reply.timings.per_token_ms for reply in replies],
        "processor_ms_per_token": [ms for _, ms in timed],
        "prompt_ms": [reply.timings.prompt_ms for reply in replies],
        "tokens": [len(reply.token_ids) for reply in replies],
    }


def _timed_reply(model: Any, ids: Sequence[int], max_tokens: int, ignore_eos: bool) -> tuple[Result, float]:
    """A reply, and the processor's milliseconds for each token after its first."""
    with model.stream(list(ids), max_tokens=max_tokens, ignore_eos=ignore_eos) as stream:
        next(stream, None)
        started = time.process_time()
        reply: Result = stream.complete()
    return reply, (time.process_time() - started) * 1e3 / max(len(reply.token_ids) - 1, 1)


def message_text(model: Any, tokens: int, seed: int) -> str:
    """Text of about so many tokens, never more."""
    taken: list[str] = []
    count = 0
    for word in pseudo_text(tokens, seed).split():
        count += len(model.tokenize(" " + word))
        if count > tokens:
            break
        taken.append(word)
    return " ".join(taken)


def plan_sizes(model: str | None, **options: Any) -> dict[str, Any]:
    """What a plan takes in a fresh process, and the smallest budget that would do."""
    plan = edgeinfer.plan(model, **options)
    return {"planned": plan.planned_bytes, "minimum": plan.minimum_bytes}


def chat_loop(model: Any, turns: int, reply_tokens: int) -> list[int]:
    """Two conversations in turns, each started again when it nears the end of the context: peak RSS after every turn.

    Messages are so long that this happens every few turns: whatever grows with a conversation has been at its largest
    before the loop is well under way.
    """
    chats = [model.chat(system=f"You tell stories of {name}.") for name in ("Nora", "Otto")]
    used, peaks = [0, 0], list[int]()
    # A turn also costs its template's markup, and a reply may come back as more tokens than it was made of.
    around = 2 * reply_tokens + _MARKUP_TOKENS
    message = max(model.context // _TURNS_TO_FILL - around, _LEAST_MESSAGE)
    for turn in range(turns):
        who = turn % len(chats)
        if model.context - used[who] < message + around:
            chats[who].reset()
        text = message_text(model, message, turn)
        result: Result = chats[who].send(text, max_tokens=reply_tokens, ignore_eos=True)
        used[who] = result.usage.total_tokens
        peaks.append(result.memory.peak_rss_bytes)
    return peaks


def _chat_loop(model: str | None, turns: int, reply_tokens: int, **options: Any) -> dict[str, Any]:
    with edgeinfer.load(model, **options) as loaded:
        peaks = chat_loop(loaded, turns, reply_tokens)
        return {"peaks": peaks, "planned": loaded.plan.planned_bytes, "context": loaded.context}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan_sizes,
    "planned": run_planned,
    "replies": time_replies,
    "chat": _chat_loop,
}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
