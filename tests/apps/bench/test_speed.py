"""Speed in llama-bench's words: which tests there are, that what is timed is what was asked for, and its formats."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench.speed import FORMATS, SpeedConfig, run_speed
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import BackendError, UsageError
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.tuning.measure import WorkTimes
from tests.apps.bench.here import known_limits
from tests.factories import make_bigram_bundle
from tests.speculation import needs_builtin
from tests.tables import each_row


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    known_limits(monkeypatch)


def test_names_are_llama_bench_s() -> None:
    config = SpeedConfig((512, 64), (128,), ((512, 128),), (0, 4096))
    names = ["pp512", "pp64", "tg128", "pp512+tg128"]
    assert [str(test) for test in config.tests] == names + [f"{name} @ d4096" for name in names]
    assert config.context == 4096 + 512 + 128 + 1
    assert [str(test) for test in SpeedConfig((0,), (16,)).tests] == ["tg16"]


@each_row("options", [{"prompts": (0,), "replies": (0,)}, {"prompts": (-1,)}, {"repeats": 0}, {"both": ((0, 0),)}])
def test_nothing_to_time(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SpeedConfig(**options)


class Watched:
    """Numbers of tokens of a model's passes."""

    def __init__(self, model: edgeinfer.Model) -> None:
        self.sizes: list[int] = []
        backend = model._parts.backend
        forward = backend.forward

        def watched(passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
            self.sizes += [len(batch.tokens) for _, batch in passes]
            return forward(passes)

        backend.forward = watched  # type: ignore[method-assign]


@each_row(("prompt", "reply", "past"), [(20, 0, 0), (0, 7, 0), (20, 7, 0), (20, 7, 30), (0, 7, 30)])
def test_what_is_timed_is_what_was_asked_for(tmp_path: Path, prompt: int, reply: int, past: int) -> None:
    with edgeinfer.load(make_bigram_bundle(tmp_path / "bigrams"), context=64, speculation="off") as model:
        watched = Watched(model)
        first = edgeinfer.tools.measure_work(model, prompt, reply, past=past)
        fed = sum(watched.sizes)
        watched.sizes.clear()
        again = edgeinfer.tools.measure_work(model, prompt, reply, past=past)
        assert first.token_ids == again.token_ids and first.ms > 0
        assert len(first.token_ids) == (reply + 1 if prompt else reply) if reply else 1
        # As many passes over one token as the reply has, the prompt in chunks, and the past once.
        assert watched.sizes.count(1) >= reply
        assert sum(watched.sizes) == prompt + reply
        assert fed == sum(watched.sizes) + (past if prompt else max(past - 1, 0))


def results(model: edgeinfer.Model) -> list[dict[str, Any]]:
    return run_speed(model, SpeedConfig((16,), (8,), ((16, 8),), (0, 10), repeats=3), lambda done, total: None)


@needs_builtin
def test_figures_and_formats() -> None:
    with edgeinfer.load(context=64, threads=1) as model:
        rows = results(model)
    assert [row["test"] for row in rows][:3] == ["pp16", "tg8", "pp16+tg8"]
    for data in rows:
        assert len(data["samples_ns"]) == 3 and min(data["samples_ns"]) > 0
        tokens = data["n_prompt"] + data["n_gen"]
        assert data["samples_ts"][0] == pytest.approx(tokens * 1e9 / data["samples_ns"][0])
        assert min(data["samples_ts"]) <= data["median_ts"] <= max(data["samples_ts"])
    floors = {row["test"]: row["floor_ns"] for row in rows}
    # A prompt reads the weights once, each token of a reply again; behind others there is a cache to read as well.
    assert 0 < floors["pp16"] < floors["tg8"]
    assert floors["tg8"] < floors["tg8 @ d10"] < 1.1 * floors["tg8"]
    assert floors["pp16+tg8"] == pytest.approx(floors["pp16"] + floors["tg8"], rel=0.01)
    parsed = json.loads(FORMATS["json"](rows))
    assert parsed == rows
    assert [json.loads(line) for line in FORMATS["jsonl"](rows).splitlines()] == parsed
    read = list(csv.DictReader(io.StringIO(FORMATS["csv"](rows))))
    assert [row["test"] for row in read] == [data["test"] for data in parsed]
    lines = FORMATS["md"](rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and "| t" not in lines[1]
    assert all(f" {data['test']} |" in line for data, line in zip(parsed, lines[2:], strict=True))


def test_a_wrong_answer_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edgeinfer.load(make_bigram_bundle(tmp_path / "bigrams"), context=64) as model:
        answers = iter(WorkTimes(1.0, (n,)) for n in range(9))
        monkeypatch.setattr(edgeinfer.tools, "measure_work", lambda *args, **kwargs: next(answers), raising=False)
        with pytest.raises(BackendError, match="other tokens"):
            results(model)


@needs_builtin
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "speed", "-p", "16", "-n", "4", "-pg", "8,4", "-r", "1", "-t", "1"]
    assert main([*line, "-o", "jsonl"]) == 0
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == ["pp16", "tg4", "pp8+tg4"]
    assert main([*line, "--out", str(tmp_path / "speed.md")]) == 0
    assert (tmp_path / "speed.md").read_text().count("\n") == 5
    assert main([*line, "--out", str(tmp_path / "no" / "speed.md")]) == 5
    for wrong in (["-p", "x"], ["-pg", "3"], ["-r", "0"], ["-p", "0", "-n", "0"], ["-d", "100000"]):
        capsys.readouterr()
        assert main(["bench", "speed", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
