"""Counters of the server in Prometheus' text format. Names after the colon are llama-server's where it has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from edgeinfer import MemoryPlan
from edgeinfer.core.results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "edgeinfer:"

_Samples = Iterable[tuple[Mapping[str, str], float]]


@dataclass(frozen=True)
class Load:
    """What the server is doing now."""

    # `running`, `waiting`: replies in progress and in the queue.
    running: int
    waiting: int
    context: int = 0  # of the loaded model; 0 without one
    plan: MemoryPlan | None = None


# Counters of one value, with their help.
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens evaluated.",
    "prompt_tokens_cached_total": "Prompt tokens taken from the cache.",
    "prompt_seconds_total": "Time of evaluating prompts.",
    "tokens_predicted_total": "Tokens generated.",
    "tokens_predicted_seconds_total": "Time of generating tokens.",
    "n_decode_total": "Passes of the model that generated tokens.",
    "spec_decode_num_drafts_total": "Drafts verified.",
    "spec_decode_num_draft_tokens_total": "Tokens drafted.",
    "spec_decode_num_accepted_tokens_total": "Drafted tokens accepted.",
    "replies_failed_total": "Replies that an error ended.",
    "disconnects_total": "Requests whose client hung up before their end.",
}


class Metrics:
    """Sums since the server started."""

    def __init__(self) -> None:
        self._requests: Counter[int] = Counter()
        self._replies: Counter[str] = Counter()
        self._accepted: Counter[int] = Counter()
        self._sums: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._most_tokens = 0
        self._used: dict[str, int] = {}

    def answered(self, status: int) -> None:
        self._requests[status] += 1

    def failed(self) -> None:
        self._sums["replies_failed_total"] += 1

    def disconnected(self) -> None:
        self._sums["disconnects_total"] += 1

    def finished(self, result: Result) -> None:
        """Count a finished reply."""
        usage, timings, speculation = result.usage, result.timings, result.speculation
        self._replies[result.finish_reason] += 1
        for name, value in (
            ("prompt_tokens_total", usage.prompt_tokens - timings.cached_prompt_tokens),
            ("prompt_tokens_cached_total", timings.cached_prompt_tokens),
            ("prompt_seconds_total", timings.prompt_ms / 1e3),
            ("tokens_predicted_total", usage.completion_tokens),
            ("tokens_predicted_seconds_total", timings.per_token_ms * max(usage.completion_tokens - 1, 0) / 1e3),
            ("n_decode_total", speculation.rounds or usage.completion_tokens),
            ("spec_decode_num_drafts_total", sum(use.rounds for use in speculation.per_drafter.values())),
            ("spec_decode_num_draft_tokens_total", speculation.drafted),
            ("spec_decode_num_accepted_tokens_total", sum(speculation.accepted_per_position)),
        ):
            self._sums[name] += value
        self._accepted.update(dict(enumerate(speculation.accepted_per_position)))
        self._most_tokens = max(self._most_tokens, usage.total_tokens)
        self._used = dict(result.memory.used)

    def text(self, load: Load) -> str:
        """Write all figures for Prometheus."""
        lines = [*self._counters(), *self._gauges(load), *_memory(load.plan, self._used)]
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[str]:
        for name, meaning in _COUNTERS.items():
            yield from _metric(name, "counter", meaning, [({}, self._sums[name])])
        places = [({"position": str(place)}, tokens) for place, tokens in sorted(self._accepted.items())]
        meaning = "Drafted tokens accepted, by place in the draft."
        yield from _metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", meaning, places)
        requests = [({"status": str(status)}, count) for status, count in sorted(self._requests.items())]
        yield from _metric("requests_total", "counter", "Requests answered, by status.", requests)
        replies = [({"reason": reason}, count) for reason, count in sorted(self._replies.items())]
        yield from _metric("replies_total", "counter", "Replies finished, by reason.", replies)

    def _gauges(self, load: Load) -> Iterator[str]:
        sums = self._sums
        prompt = sums["prompt_tokens_total"], sums["prompt_seconds_total"]
        predicted = sums["tokens_predicted_total"], sums["tokens_predicted_seconds_total"]
        for name, meaning, value in (
            ("prompt_tokens_seconds", "Prompt tokens evaluated per second.", _rate(*prompt)),
            ("predicted_tokens_seconds", "Tokens generated per second.", _rate(*predicted)),
            ("requests_processing", "Replies in progress.", load.running),
            ("requests_deferred", "Replies that wait in the queue.", load.waiting),
            ("n_tokens_max", "Most tokens of prompt and reply together so far.", self._most_tokens),
            ("context_tokens", "Context window in tokens.", load.context),
            ("process_resident_bytes", "Memory of the process now.", psutil.Process().memory_info().rss),
        ):
            yield from _metric(name, "gauge", meaning, [({}, value)])


def _rate(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


def _memory(plan: MemoryPlan | None, used: Mapping[str, int]) -> Iterator[str]:
    if plan is not None:
        yield from _metric("memory_planned_bytes", "gauge", "Memory planned, by term.", _by_term(plan.terms))
        yield from _metric("memory_planned_total_bytes", "gauge", "Memory planned.", [({}, plan.planned_bytes)])
        if plan.budget_bytes is not None:
            yield from _metric("memory_budget_bytes", "gauge", "The budget.", [({}, plan.budget_bytes)])
    meaning = "Memory in use at the end of the last reply, by the plan's terms."
    yield from _metric("memory_used_bytes", "gauge", meaning, _by_term(used))


def _by_term(terms: Mapping[str, int]) -> _Samples:
    return [({"term": term}, size) for term, size in terms.items()]


def _metric(name: str, kind: str, meaning: str, samples: _Samples) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {meaning}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        written = f"{value:.6f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
        yield f"{_PREFIX}{name}{'{' + inner + '}' if inner else ''} {written}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
