"""The benchmark commands run from end to end on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench import compare as compare_module
from edgeinfer.apps.bench import footprint
from edgeinfer.apps.bench.artifacts import Artifacts
from edgeinfer.apps.bench.compare import CompareConfig
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.shapes import SHAPES
from edgeinfer.errors import BackendError, UsageError

pytest.importorskip("onnx", reason="needs the export extra")
TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def _compare(work: Path, out: Path, engines: str, *more: str) -> dict[str, Any]:
    sizes = ["--past", "16", "--repeats", "2", "--burst", "2", "--decode-tokens", "3", "--sizes", "1,2,4"]
    files = ["--work", str(work), "--json", str(out)]
    assert compare_module.main(["--shape", "tiny", "--engines", engines, *sizes, *files, *more]) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    return data


@pytest.mark.skipif(find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="needs the gguf extra")
def test_compare_times_both_engines_on_every_size(work: Path, tmp_path: Path) -> None:
    data = _compare(work, tmp_path / "out.json", "edgeinfer,llamacpp")
    assert set(data["engines"]) == {"edgeinfer g32 exact", "edgeinfer g32 fast", "llama.cpp Q4_0"}
    for engine in data["engines"].values():
        assert set(engine["ms"]) == {"decode", "1", "2", "4"}
        assert [len(burst) for burst in engine["samples"]["decode"]] == [3, 3]
        assert [len(burst) for burst in engine["samples"]["4"]] == [2, 2]
        assert all(spread["p25"] > 0 for spread in engine["ms"].values())


@pytest.mark.skipif(find_spec("onnxruntime_genai") is not None, reason="onnxruntime-genai is installed")
def test_compare_says_why_it_skips_an_engine(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _compare(work, tmp_path / "out.json", "edgeinfer,genai", "--exact", "on", "--group-sizes", "64")
    assert set(data["engines"]) == {"edgeinfer g64 exact"}
    assert "--genai-python" in data["skipped"]["genai"]
    assert "genai: skipped:" in capsys.readouterr().out


def test_model_files_are_built_once_and_left_whole(work: Path) -> None:
    artifacts = Artifacts(work, TINY)
    before = artifacts.checkpoint().stat().st_mtime_ns
    assert Artifacts(work, TINY).checkpoint().stat().st_mtime_ns == before
    assert not list((work / "tiny").glob("*.partial"))


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "absent"), "threads": 1, "context": 64, "exact": True}
    with pytest.raises(BackendError, match="absent"):
        Worker("edgeinfer", options)


@pytest.mark.parametrize(
    "change",
    [{"threads": 0}, {"sizes": (65,)}, {"sizes": (0,)}, {"engines": ("vllm",)}, {"group_sizes": (48,)}, {"past": 999}],
)
def test_comparisons_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompareConfig(TINY, **{"past": 64, **change})


def test_an_unknown_shape_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_module.main(["--shape", "huge"]) == 2
    assert capsys.readouterr().err.startswith("error: Unknown shape 'huge'.")


def _footprint(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> dict[str, Any]:
    assert footprint.main([*arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_footprint_of_an_export(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _footprint(capsys, ["export", "--shape", "tiny", "--work", str(work)])
    assert data["peak_rss_bytes"] > 20e6
    assert data["seconds"] > 0
    assert sorted(path.name for path in work.iterdir()) == ["tiny"]


def test_footprint_of_a_chat_that_fills_the_context(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _footprint(capsys, ["chat", "--shape", "tiny", "--work", str(work), "-c", "256"])
    assert data["turns"] >= 1
    assert 100 <= data["context_tokens"] <= data["context"] == 256
    assert data["peak_rss_bytes"] >= data["anonymous_bytes"] > 0


def test_overhead_is_what_the_session_call_leaves_of_a_step(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(Artifacts(work, TINY).bundle(32))
    data = _footprint(capsys, ["overhead", "-m", bundle, "--tokens", "8", "--past", "16"])
    assert 0 < data["overhead_ms"]["median"] < data["total_ms"]["median"]


def test_chatting_ends_before_the_context_does(work: Path) -> None:
    with edgeinfer.load(Artifacts(work, TINY).bundle(32), context=256) as model:
        length = footprint.chat_until_full(model, reply_tokens=8, message_tokens=24)
    assert length.turns > 2
    assert length.context_tokens > 200
