"""Work of `memory` and `devices` in a fresh process, whose memory is then its own.

`python -m edgeinfer.apps.bench.jobs NAME ARGUMENTS` takes a JSON object and prints one.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.processes import set_limit
from edgeinfer.apps.bench.texts import BUILTIN_STORIES
from edgeinfer.core.errors import BudgetError

# A form whose reply goes on for as long as it may.
_FORM = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 900}
# Words of a text that is repeated, so that drafts are made and some are right.
_REPEATED_WORDS = 24
_REPLY_TOKENS, _SAMPLED_TOKENS, _LAST_TOKENS = 24, 8, 40
# The work of `devices`: context, stories to read, tokens of prompts and replies that are compared and timed.
_CONTEXT, _STORIES, _PROMPT_TOKENS, _COMPARED_TOKENS = 256, 3, 24, 24
_TIMED_PROMPT, _TIMED_REPLY = 128, 64


def random_words(count: int, seed: int = 1) -> str:
    """Words of the built-in stories in random order."""
    known = sorted({word for story in BUILTIN_STORIES for word in story.text.split()})
    return " ".join(random.Random(seed).choices(known, k=count))


def fill_context(model: edgeinfer.Model, seed: int, *, beyond: bool = False, draft_width: int = 1) -> dict[str, Any]:
    """Fill a context: prefill half of it, reply, prefill more, reply with sampled tokens (by a grammar where these are
    planned for), and reply to its end, which the figures of speed and accepted length are of."""
    context = model.context
    words = f"{random_words(_REPEATED_WORDS, seed)} "
    # No longer than the context, as tokenizing takes memory too.
    text = words * (context // len(model.tokenize(words)) + 1)
    options: dict[str, Any] = {"ignore_eos": True, "draft_width": draft_width}
    whole = list(model.tokenize(text)[: context // 2])
    whole += model.generate(whole, max_tokens=min(_REPLY_TOKENS, context // 8 or 1), **options).token_ids
    last = min(_LAST_TOKENS, context // 4)
    whole += model.tokenize(text)[: max(context - last - len(whole), 0)]
    sampled = options | {"temperature": 1.0, "seed": seed, "max_tokens": max(1, min(_SAMPLED_TOKENS, last // 2))}
    if model.plan.configuration.grammars != "none":
        sampled |= {"json_schema": _FORM, "ignore_eos": False}
    whole += model.generate(whole, **sampled).token_ids
    left = context - len(whole) + 1 + (context // 4 if beyond else 0)
    reply = model.generate(whole, max_tokens=max(left, 1), **options)
    return {
        "tokens": reply.usage.total_tokens,
        "tokens_per_second": reply.timings.tokens_per_second,
        "accepted_length": reply.speculation.mean_accepted_length,
        "peak_rss_bytes": reply.memory.peak_rss_bytes,
        "used": dict(reply.memory.used),
        "given_up": reply.memory.given_up[len(model.plan.given_up) :],
    }


def run_planned(
    model: str | None, slack: float, limit: Mapping[str, str], seed: int, draft_width: int, **options: Any
) -> dict[str, Any]:
    """Load with `slack` times the smallest budget inside an enforced limit, and fill the context."""
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
            found |= fill_context(loaded, seed, beyond=beyond, draft_width=draft_width)
    except BudgetError as error:
        return {**found, "refused": error.message}
    return found


def time_replies(
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    limit: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Reply to every prompt, under a limit if there is one: times, and memory of plan and process."""
    plan = edgeinfer.plan(model, **options)
    if limit is not None and plan.budget_bytes is not None:
        set_limit(limit, plan.budget_bytes, mapped=sum(plan.footprint.file.values()))
    try:
        with edgeinfer.load(model, **options) as loaded:
            plan = loaded.plan
            replies = [loaded.generate(list(ids), max_tokens=max_tokens, ignore_eos=True) for ids in prompts]
    except BudgetError as error:
        return {"refused": error.message}
    return {
        "planned": plan.planned_bytes,
        "terms": plan.terms,
        "choice": plan.to_dict()["choice"],
        "plan_given_up": plan.given_up,
        "peak_rss_bytes": max(reply.memory.peak_rss_bytes for reply in replies),
        "given_up": replies[-1].memory.given_up[len(plan.given_up) :],
        "ms_per_token": [reply.timings.per_token_ms for reply in replies],
        "prompt_ms": [reply.timings.prompt_ms for reply in replies],
        "tokens": [len(reply.token_ids) for reply in replies],
    }


def plan_sizes(model: str | None, **options: Any) -> dict[str, Any]:
    """The planned bytes of a fresh process, and the smallest budget."""
    plan = edgeinfer.plan(model, **options)
    return {"planned": plan.planned_bytes, "minimum": plan.minimum_bytes}


def compare_device(model: str, device: str, repeats: int, **options: Any) -> dict[str, Any]:
    """Compare predictions and greedy replies of the built-in model on a device with the numpy reference; time it."""
    plain: dict[str, Any] = {"context": _CONTEXT, "speculation": "off"}
    with edgeinfer.load(None, backend="reference", **plain) as oracle:
        stories = [oracle.tokenize(story.text)[: _CONTEXT // 2] for story in BUILTIN_STORIES[:_STORIES]]
        with edgeinfer.load(model, device=device, **plain, **options) as loaded:
            divergence = edgeinfer.tools.evaluate(loaded, stories, reference=oracle).divergence
            replies = [(_reply(loaded, story), _reply(oracle, story)) for story in stories]
            found: dict[str, Any] = {
                "device": loaded.info.device,
                "note": loaded.info.device_note,
                "kernel": loaded.info.kernel,
                "backend": loaded.info.backend,
                "threads": loaded.threads,
                "load_ms": loaded.load_costs.total_ms,
            }
            found |= _speed(loaded, repeats)
    assert divergence is not None, "there is a reference"
    return {
        **found,
        "divergence": divergence.mean,
        "agreement": divergence.agreement,
        "read": len(divergence.values),
        "replied": sum(len(theirs) for _, theirs in replies),
        "replied_same": sum(_common(ours, theirs) for ours, theirs in replies),
    }


def _reply(model: edgeinfer.Model, story: list[int]) -> list[int]:
    options: dict[str, Any] = {"max_tokens": _COMPARED_TOKENS, "temperature": 0, "ignore_eos": True}
    return list(model.generate(story[:_PROMPT_TOKENS], **options).token_ids)


def _common(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference; later ones continue another text."""
    pairs = zip(ours, theirs, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(theirs))


def _speed(model: edgeinfer.Model, repeats: int) -> dict[str, float]:
    """Tokens per second of a prompt and of a plain reply: medians."""
    works = {"prompt_per_second": (_TIMED_PROMPT, 0), "reply_per_second": (0, _TIMED_REPLY)}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, (prompt, reply) in works.items():
            taken[name].append(edgeinfer.tools.measure_work(model, prompt, reply).ms)
    return {name: 1e3 * sum(works[name]) / statistics.median(times[1:]) for name, times in taken.items()}


def fill_device(model: str, device: str, slack: float | None, **options: Any) -> dict[str, Any]:
    """Memory of a process that fills the whole context on a device, with `slack` times the smallest budget or none."""
    settings: dict[str, Any] = {"context": _CONTEXT, "device": device, **options}
    budget = None
    if slack is not None:
        budget = settings["memory"] = round(edgeinfer.plan(model, **settings).minimum_bytes * slack)
    with edgeinfer.load(model, **settings) as loaded:
        filled = fill_context(loaded, seed=1)
        kept = {name: filled[name] for name in ("tokens", "peak_rss_bytes")}
        return {"budget": budget, "planned": loaded.plan.planned_bytes, **kept}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan_sizes,
    "planned": run_planned,
    "replies": time_replies,
    "compare": compare_device,
    "fill": fill_device,
}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
