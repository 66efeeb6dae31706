"""The load on a server: what counts as a whole stream, and a short run against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tables import each_row

pytest.importorskip("httpx", reason="the tests' HTTP client is not installed")
pytest.importorskip("starlette", reason="the server extra is not installed")

import httpx

from edgeinfer.apps.bench import serve_load
from edgeinfer.apps.bench.serve_load import LoadOutcome, Question, ask, main
from edgeinfer.errors import CapabilityError
from tests.apps.server.served import served
from tests.speculation import needs_builtin

QUESTION = Question({"messages": [], "stream": True}, "abc")


@each_row("script", ("serve_load", "serve_attack"))
def test_without_httpx_scripts_say_what_to_install(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"edgeinfer.apps.bench.{script}"
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(CapabilityError) as refusal:
        importlib.import_module(name)
    assert "pip install httpx" in str(refusal.value.hint)


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def outcome_of(body: str, status: int = 200, leave_after: int | None = None) -> LoadOutcome:
    """What a made-up answer counts as."""
    outcome = LoadOutcome()

    async def run() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
        async with httpx.AsyncClient(transport=transport) as client:
            await ask(client, "http://localhost", QUESTION, leave_after, outcome)

    asyncio.run(run())
    return outcome


def test_a_whole_stream() -> None:
    outcome = outcome_of(": still here\n\n" + event("a") + event("") + event("bc") + "data: [DONE]\n\n")
    assert (outcome.complete, outcome.left, outcome.errors, outcome.tokens) == (1, 0, [], 2)
    assert len(outcome.ttft_ms) == len(outcome.gap_ms) == 1


def test_a_stream_that_was_left() -> None:
    outcome = outcome_of(event("a") + event("b"), leave_after=1)
    assert (outcome.complete, outcome.left, outcome.errors) == (0, 1, [])


@each_row(
    ("body", "status", "leave_after", "says"),
    [
        (event("a") + event("b"), 200, None, "incomplete"),
        (event("abc"), 200, None, "incomplete"),
        (event("abd") + "data: [DONE]\n\n", 200, None, "another's text"),
        (event("ab") + "data: [DONE]\n\n", 200, None, "another's text"),
        (event("x"), 200, 1, "another's text"),
        (event("a") + 'data: {"error": {"message": "broken"}}\n\n', 200, None, "broken"),
        ("busy", 429, None, "status 429"),
    ],
)
def test_what_is_an_error(body: str, status: int, leave_after: int | None, says: str) -> None:
    outcome = outcome_of(body, status, leave_after)
    assert (outcome.complete, outcome.left) == (0, 0)
    assert len(outcome.errors) == 1
    assert says in outcome.errors[0]


def check_run(figures: dict[str, Any]) -> None:
    assert figures["errors"] == 0
    assert figures["requests"] == figures["complete"] + figures["disconnects"] >= 3
    assert figures["rss_most_bytes"] >= figures["rss_at_the_end_bytes"] > 0
    assert figures["ttft_ms"]["p99"] >= figures["ttft_ms"]["p50"] > 0


WORDS = ["--clients", "3", "--seconds", "1", "--questions", "4", "--leaving", "0.3"]


@pytest.mark.slow
@needs_builtin
def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A server in this process, by a clock that tells a hundredth of a second more whenever it is asked."""
    out, clock = tmp_path / "load.json", itertools.count()

    @contextlib.contextmanager
    def running(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
        assert arguments == ["-t", "1", "--parallel", "2"]
        with served(parallel=2) as server:
            yield server.url, os.getpid()

    monkeypatch.setattr(serve_load, "running_server", running)
    monkeypatch.setattr(serve_load, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 100))
    assert main([*WORDS, "--out", str(out), "--", "-t", "1", "--parallel", "2"]) == 0
    check_run(json.loads(out.read_text()))
    assert "under load" in capsys.readouterr().out


@pytest.mark.slow
@needs_builtin
def test_a_short_run_on_a_server_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    assert main([*WORDS, "--out", str(out), "--", "-t", "1", "--parallel", "2"]) == 0
    check_run(json.loads(out.read_text()))
