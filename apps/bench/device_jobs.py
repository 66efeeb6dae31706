"""What `edgeinfer bench devices` runs on one device inside a fresh process, which a driver may end.

python -m edgeinfer.apps.bench.device_jobs NAME ARGUMENTS

Arguments are a JSON object, and so is what it prints.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.memory_jobs import fill_context
from edgeinfer.apps.bench.texts import BUILTIN_STORIES

_CONTEXT = 256
_PROMPT_TOKENS, _REPLY_TOKENS = 24, 24
_TIMED_PROMPT, _TIMED_REPLY = 128, 64
# Prompts are visited in turns with the timings' warm-up.
_STORIES = 3


def compare(model: str, reference: str | None, device: str, repeats: int, **options: Any) -> dict[str, Any]:
    """Predictions and greedy replies on a device beside those of the numpy reference, and the device's speed.

    Args:
        reference: a bundle with the same weights, which the reference backend can run; None is the built-in model.
    """
    plain: dict[str, Any] = {"context": _CONTEXT, "speculation": "off"}
    with edgeinfer.load(reference, backend="reference", **plain) as oracle:
        stories = [oracle.tokenize(story.text)[: _CONTEXT // 2] for story in BUILTIN_STORIES[:_STORIES]]
        with edgeinfer.load(model, device=device, **plain, **options) as loaded:
            divergence = edgeinfer.tools.evaluate(loaded, stories, reference=oracle).divergence
            replies = [(_reply(loaded, story), _reply(oracle, story)) for story in stories]
            found: dict[str, Any] = {
                "device": loaded.info.device,
                "note": loaded.info.device_note,
                "kernel": loaded.info.kernel,
            }
            found |= {"backend": loaded.info.backend, "threads": loaded.threads, "load_ms": loaded.load_costs.total_ms}
            found |= _speed(loaded, repeats)
    assert divergence is not None, "there is a reference"
    same = [_common(*pair) for pair in replies]
    return {
        **found,
        "divergence": divergence.mean,
        "agreement": divergence.agreement,
        "read": len(divergence.values),
        "replied": sum(len(oracle_ids) for _, oracle_ids in replies),
        "replied_same": sum(same),
    }


def _reply(model: edgeinfer.Model, story: list[int]) -> list[int]:
    options: dict[str, Any] = {"max_tokens": _REPLY_TOKENS, "temperature": 0, "ignore_eos": True}
    return list(model.generate(story[:_PROMPT_TOKENS], **options).token_ids)


def _common(ours: list[int], theirs: list[int]) -> int:
    """Tokens up to the first that differs, as what follows it answers another text."""
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


def fill(model: str, device: str, slack: float | None, **options: Any) -> dict[str, Any]:
    """Memory of a process that fills the whole context on a device.

    Args:
        slack: the budget, as a multiple of the smallest that would do; None runs without one.
    """
    settings: dict[str, Any] = {"context": _CONTEXT, "device": device, **options}
    budget = None
    if slack is not None:
        budget = settings["memory"] = round(edgeinfer.plan(model, **settings).minimum_bytes * slack)
    with edgeinfer.load(model, **settings) as loaded:
        filled = fill_context(loaded, seed=1)
        planned, tokens = loaded.plan.planned_bytes, filled.tokens
    return {"budget": budget, "planned": planned, "tokens": tokens, "peak_rss_bytes": filled.peak_rss_bytes}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"compare": compare, "fill": fill}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
