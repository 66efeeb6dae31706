"""The attack on a server: what counts, and a short run against a server in this process."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the tests' HTTP client is not installed")
pytest.importorskip("starlette", reason="the server extra is not installed")

from edgeinfer.apps.bench.serve_attack import Phase, attack, main, measure
from edgeinfer.apps.server.security import Security
from tests.apps.server.served import served
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

SECONDS = 1.5


def test_figures_of_a_phase() -> None:
    phase = Phase([5.0, 1.0, 3.0], ["status 503", "status 503"], [(0.0, 10), (0.1, 30), (0.2, 20)])
    figures = phase.figures()
    assert figures["first_ms"] == {"p50": 3.0, "p99": 5.0, "p100": 5.0}
    assert (figures["replies"], figures["refused"], figures["refused_with"]) == (3, 2, ["status 503"])
    assert (figures["rss_most_bytes"], figures["rss_last_bytes"]) == (30, 20)
    assert Phase().figures()["first_ms"]["p50"] is None


@needs_builtin
def test_ordinary_clients_are_answered_under_attack() -> None:
    """Bodies that never end, huge ones and ordinary ones at once."""
    answers: dict[str, int] = {}
    with served(security=Security(refusal_seconds=0.01)) as server:

        def hostile() -> None:
            answers.update(asyncio.run(attack(server.url, seconds=SECONDS, unfinished=100)))

        attackers = threading.Thread(target=hostile)
        attackers.start()
        phase = asyncio.run(measure(server.url, os.getpid(), clients=2, seconds=SECONDS))
        attackers.join(timeout=TIME_LIMIT)
    assert not phase.refused
    assert phase.first_ms
    assert answers.get("413", 0) > 0
    assert answers.get("408", 0) > 0
    assert "500" not in answers


@pytest.mark.slow
@needs_builtin
def test_a_short_run_on_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attack.json"
    words = ["--seconds", "2", "--after", "1", "--unfinished", "100", "--clients", "2", "--out", str(out)]
    assert main([*words, "--", "--memory", "400MB", "-t", "1"]) in (0, 1)
    figures = json.loads(out.read_text())
    assert figures["attacked"]["refused"] == 0
    assert figures["attacked"]["rss_most_bytes"] < 400_000_000
    assert "A server under attack" in capsys.readouterr().out
