"""What budgets cost: the smallest at which a model chats as fast, and at which speculation pays as much."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import StageProgress
from edgeinfer.apps.bench.driver import WORKER_SCRIPT, engine_environment, token_ids
from edgeinfer.apps.bench.memory_timed import (
    LoadSetup,
    ReplyRequest,
    Timed,
    TimedRun,
    budgets_between,
    narrow,
    time_setups,
)
from edgeinfer.apps.bench.prompts import Prompt, tokenize_prompts
from edgeinfer.apps.bench.synthetic import pseudo_text
from edgeinfer.apps.bench.watch import watch
from edgeinfer.errors import UsageError

# Of the best speed, what counts as chatting as fast.
BEST_SHARE = 0.95
# A short chat, and one that has nearly filled the context: tokens of their prompts, and of each reply.
_SHORT_PROMPT, _REPLY = 200, 96
_MARGIN = 24
_SHORT, _DEEP = (0,), (1,)


@dataclass(frozen=True)
class BudgetPeer:
    """Another engine to measure the same way.

    Attributes:
        engine: a key of worker.ENGINES.
        path: its model.
        python: the interpreter that has it; None is this one.
    """

    engine: str
    path: Path
    python: str | None = None


@dataclass(frozen=True)
class BudgetPeerFigures:
    """What a peer takes and runs at, or why it could not be measured."""

    peer: BudgetPeer
    reason: str = ""
    peak_rss: int = 0
    peak_anonymous: int = 0
    short_speed: float = 0.0
    deep_speed: float = 0.0


@dataclass(frozen=True)
class SmallestResults:
    """One model under budgets from what it takes unbounded to the smallest that would do, the largest first."""

    model: str
    context: int
    points: tuple[Timed, ...]
    peers: tuple[BudgetPeerFigures, ...] = ()

    def speeds(self, point: Timed) -> tuple[float, float]:
        """Tokens a second of the short chat and of the deep one."""
        return point.speed(_SHORT), point.speed(_DEEP)

    def shares(self, point: Timed) -> tuple[float, float]:
        """The same of the speeds under the largest budget, which is ample."""
        return point.share(self.points[0], _SHORT), point.share(self.points[0], _DEEP)

    def keeps(self, point: Timed) -> bool:
        """Whether it replied, at `BEST_SHARE` of the best speed in both chats."""
        return not point.reason and min(self.shares(point)) >= BEST_SHARE

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        points = []
        for point in self.points:
            short, deep = self.speeds(point)
            shares = dict(zip(("short_share", "deep_share"), self.shares(point), strict=True))
            points.append(asdict(point) | {"short_speed": short, "deep_speed": deep} | shares)
        peers = [asdict(figures) | {"peer": figures.peer.engine} for figures in self.peers]
        return {"model": self.model, "context": self.context, "points": points, "peers": peers}


def measure_smallest(
    model: str,
    options: Mapping[str, Any],
    *,
    steps: int,
    rounds: int,
    halvings: int = 0,
    peers: Sequence[BudgetPeer] = (),
    enforce: bool = True,
    progress: StageProgress | None = None,
) -> SmallestResults:
    """Two chats under every budget, each in a process of its own.

    Args:
        progress: called with the processes done and their number.
    """
    with edgeinfer.load(model, **options) as loaded:
        context, name = loaded.context, loaded.info.name
        words = loaded.tokenize(pseudo_text(context))
    deep = context - _REPLY - _MARGIN
    if deep <= _SHORT_PROMPT:
        message = f"A context of {context} tokens has no room for chats of different length."
        raise UsageError(message, f"Take one of at least {_SHORT_PROMPT + _REPLY + _MARGIN + 1} tokens (-c).")
    replies = ReplyRequest((tuple(words[:_SHORT_PROMPT]), tuple(words[:deep])), _REPLY, ignore_eos=True)
    fixed = {**options, "context": context}
    budgets = budgets_between(model, fixed, steps)
    setups = [LoadSetup(str(budget), {**fixed, "memory": budget}) for budget in budgets]
    points = time_setups(model, setups, replies, rounds, enforce=enforce, progress=progress)
    results = SmallestResults(name, context, tuple(points))
    points = narrow(model, points, replies, rounds, halvings, results.keeps, enforce=enforce)
    found = [measure_peer(peer, context, options.get("threads") or 1) for peer in peers]
    return SmallestResults(name, context, tuple(points), tuple(found))


def measure_peer(peer: BudgetPeer, context: int, threads: int) -> BudgetPeerFigures:
    """The same chats with another engine, in a process of its own and without a limit, which none of them knows."""
    deep = context - _REPLY - _MARGIN
    requests: list[dict[str, Any]] = [
        {"kind": peer.engine, "path": str(peer.path), "threads": threads, "context": context},
        {"kind": "decode_times", "tokens": _REPLY, "past": token_ids(_SHORT_PROMPT)},
        {"kind": "decode_times", "tokens": _REPLY, "past": token_ids(deep)},
    ]
    command = [peer.python or sys.executable, str(WORKER_SCRIPT)]
    env = engine_environment(peer.python)
    ended = watch(command, env, "".join(json.dumps(request) + "\n" for request in requests))
    if ended.returncode != 0 or ended.watched is None:
        return BudgetPeerFigures(peer, ended.reason)
    short, deeper = _speeds(ended.watched.stdout)
    return BudgetPeerFigures(peer, "", ended.watched.peak_rss_bytes, ended.watched.peak_anonymous_bytes, short, deeper)


def _speeds(answers: str) -> Iterator[float]:
    """Tokens a second of every list of milliseconds, after the line that says the engine's version."""
    for line in answers.splitlines()[1:]:
        times = json.loads(line)["answer"]
        yield len(times) / sum(times) * 1e3


# Of the unconstrained speed, what a budget has to keep.
KEPT_SHARE = 0.96
UNCONSTRAINED, DEFAULT = "unconstrained", "default"
# Contexts fill pages of so many rows, of which a cache keeps one for itself.
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class SpecMemoResults:
    """Setups with their speed and what they take besides the weights.

    Attributes:
        context: tokens that the prompts need, for which budgets are planned.
        timed: without limits first, then by falling budget.
    """

    model: str
    context: int
    prompts: tuple[str, ...]
    timed: tuple[Timed, ...]

    def speed(self, timed: Timed) -> float:
        """Tokens a second over all prompts."""
        return timed.speed(range(len(self.prompts)))

    def named(self, name: str) -> Timed:
        """The setup of that name."""
        return next(timed for timed in self.timed if timed.setup.name == name)

    def share(self, timed: Timed) -> float:
        """The share of the unconstrained speed."""
        return timed.share(self.named(UNCONSTRAINED), range(len(self.prompts)))

    def processor_share(self, timed: Timed) -> float:
        """The same by the processor's time."""

        def speed(run: TimedRun) -> float:
            return run.speed(range(len(self.prompts)), clock="processor_ms_per_token")

        free = self.named(UNCONSTRAINED)
        return timed.median(speed) / Timed(free.setup, timed.beside or free.runs).median(speed)

    def keeps(self, timed: Timed) -> bool:
        """Whether that is enough."""
        return self.share(timed) >= KEPT_SHARE

    @property
    def smallest(self) -> Timed | None:
        """The smallest budget that keeps `KEPT_SHARE` of the unconstrained speed."""
        kept = [timed for timed in self.timed if timed.setup.budget and self.keeps(timed)]
        return min(kept, key=lambda timed: timed.setup.budget or 0, default=None)

    def cut(self, timed: Timed, baseline: str, *, planned: bool, alone: bool) -> float:
        """The share of a baseline's generation memory that a setup does without; arguments as `generation_bytes`."""

        def size(run: TimedRun) -> float:
            return run.generation_bytes(planned=planned, alone=alone)

        return 1 - timed.median(size) / self.named(baseline).median(size)

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        setups = []
        for timed in self.timed:
            figures: dict[str, Any] = {"tokens_per_second": self.speed(timed), "share": self.share(timed)}
            if not timed.reason:
                figures["processor_share"] = self.processor_share(timed)
                figures["generation_bytes"] = {
                    f"{'planned' if planned else 'measured'}{'_alone' if alone else ''}": timed.median(
                        lambda run, p=planned, a=alone: run.generation_bytes(planned=p, alone=a)  # type: ignore[misc]
                    )
                    for planned in (True, False)
                    for alone in (True, False)
                }
            setups.append(asdict(timed) | figures)
        smallest = self.smallest.setup.budget if self.smallest else None
        return {"model": self.model, "context": self.context, "prompts": list(self.prompts)} | {
            "smallest_budget": smallest,
            "setups": setups,
        }


def measure_spec_memory(
    model: str,
    options: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    steps: int,
    rounds: int,
    halvings: int = 0,
    budgets: Sequence[int] = (),
    enforce: bool = True,
    progress: StageProgress | None = None,
) -> SpecMemoResults:
    """Replies with speculation and the model's whole context, as loaded by default, and under falling budgets.

    Budgets are planned for the context that the prompts need, as SpecMemo reserves no more than is used.

    Args:
        budgets: bytes of each in place of evenly spaced ones; none spaces them.
        progress: called with the processes done and their number.
    """
    if not prompts:
        raise UsageError("There are no prompts.", "Name other categories.")
    longest = _longest_context(model)
    # Nothing is learnt from one process to the next, as what one learns would be an advantage of the later ones.
    fixed = {"remember": False, **options}
    with edgeinfer.load(model, **fixed) as loaded:
        items, name = tokenize_prompts(loaded, prompts, max_tokens), loaded.info.name
    replies = ReplyRequest(tuple(item.ids for item in items), max_tokens)
    needed = max(len(item.ids) for item in items) + max_tokens
    context = min(-(-(needed + 1) // _CONTEXT_STEP) * _CONTEXT_STEP - 1, longest)
    sized = {**fixed, "context": context}
    setups = [LoadSetup(UNCONSTRAINED, {**fixed, "context": longest}), LoadSetup(DEFAULT, fixed)]
    sizes = budgets or budgets_between(model, sized, steps)
    setups += [LoadSetup(str(size), {**sized, "memory": size}) for size in sizes]
    timed = time_setups(model, setups, replies, rounds, enforce=enforce, progress=progress)
    results = SpecMemoResults(name, context, tuple(item.prompt.name for item in items), tuple(timed))
    narrowed = narrow(model, timed, replies, rounds, halvings, results.keeps, enforce=enforce)
    return replace(results, timed=tuple(narrowed))


def _longest_context(model: str) -> int:
    manifest = json.loads((Path(model) / "edgeinfer.json").read_text("utf-8"))
    return int(manifest["geometry"]["max_positions"])
