"""Scripts of `tests/tools` on the built-in model: a server under load, replies made at once, remote verification."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.tables import each_row

pytest.importorskip("httpx", reason="the tests' HTTP client is not installed")
pytest.importorskip("starlette", reason="the server extra is not installed")

import httpx

from edgeinfer.runtime.native.library import LIBRARY
from tests.speculation import needs_builtin
from tests.tools import batch_speed, remote_speed, serve_load
from tests.tools.serve_load import LoadOutcome, Question, ask

QUESTION = Question({"messages": [], "stream": True}, "abc")


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def outcome_of(body: str, status: int = 200, leave_after: int | None = None) -> LoadOutcome:
    """The outcome of a made-up answer."""
    outcome = LoadOutcome()

    async def run() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
        async with httpx.AsyncClient(transport=transport) as client:
            await ask(client, "http://localhost", QUESTION, leave_after, outcome)

    asyncio.run(run())
    return outcome


def test_streams_that_are_whole_or_left() -> None:
    outcome = outcome_of(": still here\n\n" + event("a") + event("") + event("bc") + "data: [DONE]\n\n")
    assert (outcome.complete, outcome.left, outcome.errors, outcome.tokens) == (1, 0, [], 2)
    assert len(outcome.ttft_ms) == len(outcome.gap_ms) == 1
    outcome = outcome_of(event("a") + event("b"), leave_after=1)
    assert (outcome.complete, outcome.left, outcome.errors) == (0, 1, [])


@each_row(
    ("body", "status", "leave_after", "says"),
    [
        (event("a") + event("b"), 200, None, "incomplete"),
        (event("abd") + "data: [DONE]\n\n", 200, None, "another's text"),
        (event("x"), 200, 1, "another's text"),
        (event("a") + 'data: {"error": {"message": "broken"}}\n\n', 200, None, "broken"),
        ("busy", 429, None, "status 429"),
    ],
)
def test_streams_with_errors(body: str, status: int, leave_after: int | None, says: str) -> None:
    outcome = outcome_of(body, status, leave_after)
    assert (outcome.complete, outcome.left, len(outcome.errors)) == (0, 0, 1)
    assert says in outcome.errors[0]


@pytest.mark.slow
@needs_builtin
def test_a_server_under_load(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    sizes = ["--clients", "3", "--seconds", "1", "--questions", "4", "--leaving", "0.3"]
    assert serve_load.main([*sizes, "--out", str(out), "--", "-t", "1", "--parallel", "2"]) == 0
    figures = json.loads(out.read_text())
    assert figures["errors"] == 0 and figures["requests"] == figures["complete"] + figures["disconnects"] >= 3
    assert figures["ttft_ms"]["p99"] >= figures["ttft_ms"]["p50"] > 0 < figures["rss_at_the_end_bytes"]


@pytest.mark.slow
@needs_builtin
@pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
def test_replies_made_at_once(tmp_path: Path) -> None:
    out, figures = tmp_path / "out.json", {}
    small = ["--clients", "1,2", "--prompt", "20", "--tokens", "4", "--late", "60", "--repeats", "1"]
    for part in ("pace", "gaps", "drafts"):
        assert batch_speed.main([*small, "--part", part, "--vocabulary", "1000", "--out", str(out)]) == 0
        figures[part] = json.loads(out.read_text())
    assert all(figures["pace"][f"edgeinfer {n}"]["tokens_per_cpu_s"] > 0 for n in (1, 2))
    assert {"with", "without"} <= figures["gaps"].keys() and figures["drafts"]["2"]["cpu"] > 0


@pytest.mark.slow
@needs_builtin
def test_remote_verification(tmp_path: Path) -> None:
    out = tmp_path / "remote.json"
    few = ["--links", "1", "--repeats", "1", "--tokens", "6", "--devices", "1", "2"]
    assert remote_speed.main([*few, "--out", str(out)]) == 0
    figures = json.loads(out.read_text("utf-8"))
    (cell,) = figures["cells"]
    assert cell["tokens_per_second"].keys() == {"drafts", "streams", "local"} and cell["predicted"] > 0
    ways = [("drafts", 1), ("drafts", 2), ("streams", 1), ("streams", 2)]
    assert [(row["way"], row["devices"]) for row in figures["devices"]] == ways
