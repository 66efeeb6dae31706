"""Counts what the server does and writes it in Prometheus' text format.

Names after the colon are llama-server's wherever it has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from edgeinfer import MemoryPlan
from edgeinfer.results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "edgeinfer:"

_Samples = Iterable[tuple[Mapping[str, str], float]]


@dataclass(frozen=True)
class Load:
    """What the server is doing now.

    Attributes:
        running, waiting: replies that have started, and those in the queue.
        context: tokens that the model holds; 0 without a model, whose plan is then None.
    """

    running: int
    waiting: int
    context: int = 0
    plan: MemoryPlan | None = None


class Metrics:
    """Sums since the server was started."""

    def __init__(self) -> None:
        self._requests: Counter[int] = Counter()
        self._replies: Counter[str] = Counter()
        self._failed = 0
        self._disconnects = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._prompt_ms = 0.0
        self._predicted_tokens = 0
        self._predicted_ms = 0.0
        self._most_tokens = 0
        self._passes = 0
        self._drafts = 0
        self._drafted = 0
        self._accepted: Counter[int] = Counter()
        self._used: dict[str, int] = {}

    def answered(self, status: int) -> None:
        """Counts a request."""
        self._requests[status] += 1

    def failed(self) -> None:
        """Counts a reply that an error ended."""
        self._failed += 1

    def disconnected(self) -> None:
        """Counts a request whose client hung up before its end."""
        self._disconnects += 1

    def finished(self, result: Result) -> None:
        """Counts a reply."""
        usage, timings, speculation = result.usage, result.timings, result.speculation
        self._replies[result.finish_reason] += 1
        self._prompt_tokens += usage.prompt_tokens - timings.cached_prompt_tokens
        self._cached_tokens += timings.cached_prompt_tokens
        self._prompt_ms += timings.prompt_ms
        self._predicted_tokens += usage.completion_tokens
        self._predicted_ms += timings.per_token_ms * max(usage.completion_tokens - 1, 0)
        self._most_tokens = max(self._most_tokens, usage.total_tokens)
        self._passes += speculation.rounds or usage.completion_tokens
        self._drafts += sum(use.rounds for use in speculation.per_drafter.values())
        self._drafted += speculation.drafted
        for place, tokens in enumerate(speculation.accepted_per_position):
            self._accepted[place] += tokens
        self._used = dict(result.memory.used)

    def text(self, load: Load) -> str:
        """Writes all figures for Prometheus."""
        lines = [*self._counters(), *self._gauges(load), *_memory(load.plan, self._used)]
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[str]:
        plain = [
            ("prompt_tokens_total", "Prompt tokens evaluated.", self._prompt_tokens),
            ("prompt_tokens_cached_total", "Prompt tokens taken from the cache.", self._cached_tokens),
            ("prompt_seconds_total", "Time of evaluating prompts.", self._prompt_ms / 1e3),
            ("tokens_predicted_total", "Tokens generated.", self._predicted_tokens),
            ("tokens_predicted_seconds_total", "Time of generating tokens.", self._predicted_ms / 1e3),
            ("n_decode_total", "Passes of the model that generated tokens.", self._passes),
            ("spec_decode_num_drafts_total", "Drafts verified.", self._drafts),
            ("spec_decode_num_draft_tokens_total", "Tokens drafted.", self._drafted),
            ("spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", self._accepted.total()),
            ("replies_failed_total", "Replies that an error ended.", self._failed),
            ("disconnects_total", "Requests whose client hung up before their end.", self._disconnects),
        ]
        for name, meaning, value in plain:
            yield from _metric(name, "counter", meaning, [({}, value)])
        places = [({"position": str(place)}, tokens) for place, tokens in sorted(self._accepted.items())]
        meaning = "Drafted tokens accepted, by place in the draft."
        yield from _metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", meaning, places)
        requests = [({"status": str(status)}, count) for status, count in sorted(self._requests.items())]
        yield from _metric("requests_total", "counter", "Requests answered, by status.", requests)
        replies = [({"reason": reason}, count) for reason, count in sorted(self._replies.items())]
        yield from _metric("replies_total", "counter", "Replies finished, by reason.", replies)

    def _gauges(self, load: Load) -> Iterator[str]:
        rates = [
            ("prompt_tokens_seconds", "Prompt tokens evaluated per second.", self._prompt_tokens, self._prompt_ms),
            ("predicted_tokens_seconds", "Tokens generated per second.", self._predicted_tokens, self._predicted_ms),
        ]
        for name, meaning, tokens, ms in rates:
            yield from _metric(name, "gauge", meaning, [({}, tokens / ms * 1e3 if ms else 0.0)])
        plain = [
            ("requests_processing", "Replies in progress.", load.running),
            ("requests_deferred", "Replies that wait in the queue.", load.waiting),
            ("n_tokens_max", "Most tokens of prompt and reply together so far.", self._most_tokens),
            ("context_tokens", "Context window in tokens.", load.context),
            ("process_resident_bytes", "Memory of the process now.", psutil.Process().memory_info().rss),
        ]
        for name, meaning, value in plain:
            yield from _metric(name, "gauge", meaning, [({}, value)])


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
