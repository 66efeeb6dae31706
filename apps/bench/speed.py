"""Speed in the words of llama-bench: tests of prompt, reply and depth, timed in turns; knows no printing.

`pp512` takes in 512 tokens, `tg128` decodes 128, `pp512+tg128` does both, `@ d4096` does it behind 4096 others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.bench.environment import machine_name, system_name, timestamp
from edgeinfer.apps.bench.timing import rotated
from edgeinfer.errors import BackendError, UsageError

if TYPE_CHECKING:
    from edgeinfer import Model

__all__ = ["SpeedConfig", "SpeedResult", "SpeedTest", "describe_run", "run_speed"]

_S = 1e9


@dataclass(frozen=True, order=True)
class SpeedTest:
    """What is timed.

    Attributes:
        prompt, reply: tokens.
        depth: tokens before them that are not timed.
    """

    prompt: int
    reply: int
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.reply, self.depth) < 0 or self.tokens == 0:
            raise UsageError(f"{self} has nothing to time.", "Give a prompt or a reply of at least one token.")

    @property
    def tokens(self) -> int:
        """That are timed."""
        return self.prompt + self.reply

    @property
    def context(self) -> int:
        """That it needs."""
        return self.depth + self.tokens + 1

    def __str__(self) -> str:
        parts = [f"{name}{count}" for name, count in (("pp", self.prompt), ("tg", self.reply)) if count]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class SpeedConfig:
    """What to run.

    Attributes:
        prompts, replies: lengths, each a test of its own; 0 is none.
        both: lengths of prompt and reply that are timed together.
        depths: all of these before each.
        repeats: timed visits to each test; one more warms up.
    """

    prompts: Sequence[int] = (512,)
    replies: Sequence[int] = (128,)
    both: Sequence[tuple[int, int]] = ()
    depths: Sequence[int] = (0,)
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"repeats must be at least 1, not {self.repeats}.", "Leave it out for 5.")
        if not self.tests:
            raise UsageError("There is nothing to time.", "Give -p, -n or -pg.")

    @property
    def tests(self) -> list[SpeedTest]:
        """Each once, in the order of llama-bench."""
        pairs = [(n, 0) for n in self.prompts if n] + [(0, n) for n in self.replies if n] + list(self.both)
        return list(dict.fromkeys(SpeedTest(*pair, depth) for depth in self.depths for pair in pairs))

    @property
    def context(self) -> int:
        """That all tests need."""
        return max(test.context for test in self.tests)


@dataclass(frozen=True)
class SpeedResult:
    """How long one test took.

    Attributes:
        samples_ns: of each visit.
        facts: of model, engine and machine, the same for all tests of a run.
    """

    test: SpeedTest
    samples_ns: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each visit."""
        return tuple(self.test.tokens * _S / ns for ns in self.samples_ns)

    def to_dict(self) -> dict[str, Any]:
        """By the keys of llama-bench's JSON, and of ours the median."""
        ns, ts = self.samples_ns, self.samples_ts
        return {
            **self.facts,
            "n_prompt": self.test.prompt,
            "n_gen": self.test.reply,
            "n_depth": self.test.depth,
            "test": str(self.test),
            "avg_ns": round(statistics.fmean(ns)),
            "stddev_ns": round(_deviation(ns)),
            "median_ns": round(statistics.median(ns)),
            "avg_ts": statistics.fmean(ts),
            "stddev_ts": _deviation(ts),
            "median_ts": statistics.median(ts),
            "samples_ns": list(ns),
            "samples_ts": list(ts),
        }


def run_speed(
    model: Model, config: SpeedConfig, told: Callable[[int, int], None], command: str = ""
) -> list[SpeedResult]:
    """Times all tests in turns, each visit beginning with another one.

    A test whose greedy tokens are not the same at every visit is no test: a fast wrong answer never counts.

    Args:
        told: visits done and to do.
        command: kept with the figures, to have them again.

    Raises:
        UsageError: the model's context is too small.
        BackendError: the tokens differ.
    """
    tests = config.tests
    samples: dict[SpeedTest, list[int]] = {test: [] for test in tests}
    tokens: dict[SpeedTest, tuple[int, ...]] = {}
    visits = [(visit, test) for visit in range(config.repeats + 1) for test in rotated(tests, visit)]
    for done, (visit, test) in enumerate(visits):
        told(done, len(visits))
        times = model.measure_work(test.prompt, test.reply, past=test.depth)
        if tokens.setdefault(test, times.token_ids) != times.token_ids:
            raise BackendError(f"{test} gave other tokens the second time.", "Report it: the engine is at fault.")
        if visit:
            samples[test].append(round(times.ms * 1e6))
    told(len(visits), len(visits))
    facts = describe_run(model, command)
    return [SpeedResult(test, tuple(taken), facts) for test, taken in samples.items()]


def describe_run(model: Model, command: str) -> dict[str, Any]:
    """Model, engine and machine, by llama-bench's keys where it has them."""
    from edgeinfer import __version__

    info, plan = model.info, model.plan
    return {
        "build_commit": f"edgeinfer {__version__}",
        "cpu_info": machine_name(),
        "platform": system_name(),
        "backends": f"{info.backend} ({info.kernel})",
        "model_filename": Path(info.name).name,
        "model_type": f"{info.name} {info.bits_per_weight:.3g} bits",
        "model_architecture": info.architecture,
        "model_size": round(info.parameters * info.bits_per_weight / 8),
        "model_n_params": info.parameters,
        "n_batch": plan.prefill_chunk,
        "n_threads": model.threads,
        "type_k": plan.configuration.kv,
        "type_v": plan.configuration.kv,
        "weights": plan.configuration.weights,
        "command": command,
        "test_time": timestamp(),
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
