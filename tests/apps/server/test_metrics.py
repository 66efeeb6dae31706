"""/metrics: Prometheus' text format, and figures that agree with the replies."""

from __future__ import annotations

import re

import pytest

from edgeinfer.core.results import FinishReason, MemoryUse, ModelInfo, Result, SpeculationUse, Timings, Usage
from tests.apps.server.served import Local, chat_body
from tests.speculation import needs_builtin

pytest.importorskip("starlette", reason="the server extra is not installed")

from edgeinfer.apps.server.metrics import Load, Metrics
from tests.recorded import check_recorded

LINE = re.compile(r'edgeinfer:[a-z_]+(\{[a-z]+="([^"\\\n]|\\.)*"\})? -?\d+(\.\d+)?')


def result(reason: FinishReason = "length", prompt: int = 10, cached: int = 4, tokens: int = 5) -> Result:
    return Result(
        text="",
        token_ids=tuple(range(tokens)),
        finish_reason=reason,
        usage=Usage(prompt, tokens),
        timings=Timings(0, 600.0, 600.0, 400.0 / (tokens - 1), 0, 0, 0, cached),
        memory=MemoryUse(None, 0, 0, 0, 0, used={'a "term"': 7}),
        speculation=SpeculationUse("auto", rounds=3, drafted=6, accepted=2, accepted_per_position=(1, 1)),
        model=ModelInfo("m", "a", 1, 4.0, "onnx", "k"),
    )


def figures(text: str) -> dict[str, float]:
    """Values by name and labels; the text must be well formed."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name not in found
            found[name.removeprefix("edgeinfer:")] = float(value)
    return found


def test_sums() -> None:
    metrics = Metrics()
    metrics.finished(result())
    metrics.finished(result("stop", prompt=20, cached=0, tokens=3))
    metrics.answered(200)
    metrics.answered(200)
    metrics.answered(404)
    metrics.failed()
    metrics.disconnected()
    text = metrics.text(Load(2, 1, 64))
    # The first lines of each are types and help; the process's own memory is another each time.
    check_recorded("metrics", [line for line in text.splitlines() if "process_" not in line])
    assert figures(text)[r'memory_used_bytes{term="a \"term\""}'] == 7


@needs_builtin
def test_of_a_server(server: Local) -> None:
    server.get("/health")
    before = figures(server.get("/metrics").text)
    answer = server.post("/v1/chat/completions", chat_body(max_tokens=12, n=2))
    usage, timings = answer.json()["usage"], answer.json()["timings"]
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = figures(response.text)
    assert after["tokens_predicted_total"] - before["tokens_predicted_total"] == usage["completion_tokens"] == 24
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == timings["prompt_n"]
    assert after['requests_total{status="200"}'] > before['requests_total{status="200"}']
    planned = [value for name, value in after.items() if name.startswith("memory_planned_bytes{")]
    assert sum(planned) == after["memory_planned_total_bytes"]
    assert after["process_resident_bytes"] > 0
    assert after['memory_used_bytes{term="kv"}'] > 0
