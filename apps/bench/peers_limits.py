"""One reply of any engine inside a memory limit that the system enforces."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.driver import WORKER_SCRIPT, engine_environment
from edgeinfer.apps.bench.enforced import enclosure, forget_files, set_limit
from edgeinfer.apps.bench.peers_figures import BudgetFigures
from edgeinfer.apps.bench.watch import watch

_NO_GROUPS = "no control group can be made here, which takes Linux and the right to make one below one's own"


@dataclass(frozen=True)
class LimitedRun:
    """One process.

    Attributes:
        reason: why it gave no reply; empty where it did.
    """

    reason: str = ""
    tokens_per_second: float = 0.0
    peak_rss_bytes: int = 0
    token_ids: tuple[int, ...] = ()


def can_enforce() -> str:
    """Why limits cannot be enforced here; empty where they can."""
    with enclosure() as place:
        return "" if place.kind == "cgroup" else _NO_GROUPS


def run_limited(
    kind: str,
    options: Mapping[str, Any],
    python: str | None,
    *,
    budget: int,
    prompt: Sequence[int],
    tokens: int,
    patience: float,
    files: Sequence[Path] = (),
) -> LimitedRun:
    """Loads an engine and has it reply, all inside a control group of so many bytes.

    Args:
        patience: seconds after which the process is ended.
    """
    requests = [{"kind": kind, **options}, {"kind": "reply", "prompt": list(prompt), "tokens": tokens}]
    stdin = "".join(json.dumps(request) + "\n" for request in requests)
    forget_files(files)
    with enclosure() as place:
        set_limit(place.limit, budget)
        command = place.command([python or sys.executable, str(WORKER_SCRIPT)])
        ended = watch(command, engine_environment(python), stdin, patience)
        killed = place.killed()
    if ended.late:
        return LimitedRun(f"over {patience:g} s")
    answers = [json.loads(line) for line in ended.watched.stdout.splitlines()] if ended.watched else []
    refused = next((answer["error"] for answer in answers if "error" in answer), "")
    if refused:
        return LimitedRun(f"refused: {refused}")
    if killed or ended.returncode < 0:
        return LimitedRun("killed")
    if ended.returncode != 0 or len(answers) != len(requests) or ended.watched is None:
        return LimitedRun(f"failed: {ended.reason}")
    reply = answers[-1]["answer"]
    rate = (len(reply["token_ids"]) - 1) / reply["later_ms"] * 1e3
    return LimitedRun("", rate, ended.watched.peak_rss_bytes, tuple(reply["token_ids"]))


def summary(runs: Sequence[LimitedRun]) -> BudgetFigures:
    """Of all processes of an engine within a budget; one that gave no reply speaks for all."""
    for run in runs:
        if run.reason:
            return BudgetFigures(None, run.reason)
    rate = statistics.median(run.tokens_per_second for run in runs)
    return BudgetFigures(rate, "", max(run.peak_rss_bytes for run in runs))
