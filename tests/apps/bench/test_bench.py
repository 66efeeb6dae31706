"""The benchmark commands run from end to end on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench import compare as compare_module
from edgeinfer.apps.bench import footprint
from edgeinfer.apps.bench.artifacts import Artifacts, BundleKind
from edgeinfer.apps.bench.contenders import CompareConfig
from edgeinfer.apps.bench.jobs import chat_until_full, measure_loading, measure_overhead
from edgeinfer.apps.bench.shapes import SHAPES
from edgeinfer.errors import NativeUnavailableError, UsageError
from edgeinfer.runtime.native.library import native_kernel
from tests.apps.bench.here import LocalWorker, exports_here, known_limits, watch_here

pytest.importorskip("onnx", reason="needs the export extra")
TINY = SHAPES["tiny"]
PORTABLE = BundleKind("portable", group_size=32)


def _has_kernel() -> bool:
    try:
        native_kernel()
    except NativeUnavailableError:
        return False
    return True


needs_kernel = pytest.mark.skipif(not _has_kernel(), reason="needs the native kernel")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        exports_here(patch, "model_files")
        yield tmp_path_factory.mktemp("work")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run in this process, on a device of which the limits are known."""
    monkeypatch.setattr(compare_module, "Worker", LocalWorker)
    known_limits(monkeypatch)


def _compare(work: Path, out: Path, engines: str, *more: str) -> dict[str, Any]:
    sizes = ["--past", "16", "--repeats", "2", "--burst", "2", "--decode-tokens", "3", "--sizes", "1,2,4"]
    files = ["--work", str(work), "--json", str(out)]
    arguments = ["--shape", "tiny", "--engines", engines, "--prefill", "70", *sizes, *files, *more]
    assert compare_module.main(arguments) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    return data


@pytest.mark.slow
@pytest.mark.gguf
@pytest.mark.skipif(find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="needs the gguf extra")
def test_compare_times_both_engines_on_every_task(work: Path, tmp_path: Path) -> None:
    data = _compare(work, tmp_path / "out.json", "edgeinfer,llamacpp", "--layouts", "portable", "--exact", "both")
    labels = {"edgeinfer MatMulNBits g128 exact", "edgeinfer MatMulNBits g128 fast", "llama.cpp Q4_0"}
    assert set(data["engines"]) == labels
    for engine in data["engines"].values():
        assert set(engine["ms"]) == {"decode", "1", "2", "4", "prefill"}
        assert [len(burst) for burst in engine["samples"]["decode"]] == [3, 3]
        assert [len(burst) for burst in engine["samples"]["4"]] == [2, 2]
        assert [len(burst) for burst in engine["samples"]["prefill"]] == [1, 1]
        assert all(spread["p25"] > 0 for spread in engine["ms"].values())


@needs_kernel
@pytest.mark.usefixtures("here")
def test_compare_sets_layouts_and_bits_side_by_side(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _compare(work, tmp_path / "out.json", "edgeinfer", "--bits", "4,2", "--group-sizes", "32")
    native, portable = "edgeinfer native 4-bit g32 exact", "edgeinfer MatMulNBits 4-bit g32 exact"
    fewer = "edgeinfer native 2-bit g32 exact"
    assert set(data["engines"]) == {native, portable, fewer, "edgeinfer MatMulNBits 2-bit g32 exact"}
    assert set(data["engines"][fewer]["speedup_vs"]) == {native, portable}
    assert f"times faster than {portable}" in capsys.readouterr().out
    # Limits are measured beside every task of every repeat.
    assert {task: len(many) for task, many in data["limits"]["samples"].items()} == dict.fromkeys(
        ("decode", "1", "2", "4", "prefill"), 2
    )
    floors = data["engines"][native]["floors"]
    assert floors["4"]["multiply_adds"] == 4 * floors["1"]["multiply_adds"]
    assert (
        floors["4"]["weight_bytes"]
        == floors["1"]["weight_bytes"]
        > data["engines"][fewer]["floors"]["1"]["weight_bytes"]
    )
    # 70 tokens take two passes, of which one computes one row of logits.
    head = TINY.vocab_size * TINY.hidden
    layers = floors["1"]["multiply_adds"] - head
    assert floors["prefill"]["multiply_adds"] == 70 * layers + head
    assert floors["prefill"]["weight_bytes"] < 2 * floors["1"]["weight_bytes"]
    assert all(floor["times"]["median"] > 0 for floor in floors.values())


def test_compare_goes_on_without_the_kernel(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_module, "Worker", LocalWorker)
    monkeypatch.setenv("EDGEINFER_NATIVE", "0")
    data = _compare(work, tmp_path / "out.json", "edgeinfer", "--prefill", "0")
    (engine,) = data["engines"].values()
    assert set(data["engines"]) == {"edgeinfer MatMulNBits g128 exact"}
    assert data["limits"] is None and "floors" not in engine and "prefill" not in engine["ms"]
    assert "EDGEINFER_NATIVE" in data["skipped"]["edgeinfer native"]
    assert "edgeinfer native: skipped: EDGEINFER_NATIVE=0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("onnxruntime_genai") is not None, reason="onnxruntime-genai is installed")
def test_compare_says_why_it_skips_an_engine(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _compare(work, tmp_path / "out.json", "edgeinfer,genai", "--layouts", "portable", "--group-sizes", "64")
    assert set(data["engines"]) == {"edgeinfer MatMulNBits g64 exact"}
    assert "--genai-python" in data["skipped"]["genai"]
    assert "genai: skipped:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
def test_compare_times_openvino(work: Path, tmp_path: Path) -> None:
    data = _compare(work, tmp_path / "out.json", "openvino")
    (engine,) = data["engines"].values()
    assert all(spread["p25"] > 0 for spread in engine["ms"].values())


def test_model_files_are_built_once_and_left_whole(work: Path) -> None:
    artifacts = Artifacts(work, TINY)
    before = artifacts.checkpoint().stat().st_mtime_ns
    assert Artifacts(work, TINY).checkpoint().stat().st_mtime_ns == before
    assert not list((work / "tiny").glob("*.partial"))


def test_comparisons_that_make_no_sense_are_refused() -> None:
    changes: list[dict[str, Any]] = [
        *({"threads": 0}, {"sizes": (65,)}, {"sizes": (0,)}, {"engines": ("vllm",)}, {"group_sizes": (48,)}),
        *({"layouts": ("tiled",)}, {"bits": ()}, {"past": 999}, {"prefill": 512}, {"prefill": -1}),
    ]
    for change in changes:
        with pytest.raises(UsageError):
            CompareConfig(TINY, **{"past": 64, "prefill": 64, **change})


def test_an_unknown_shape_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_module.main(["--shape", "huge"]) == 2
    assert capsys.readouterr().err.startswith("error: Unknown shape 'huge'.")


def _footprint(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> dict[str, Any]:
    assert footprint.main([*arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.slow
def test_footprint_of_an_export(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _footprint(capsys, ["export", "--shape", "tiny", "--work", str(work)])
    assert data["peak_rss_bytes"] > 20e6
    assert data["seconds"] > 0
    assert sorted(path.name for path in work.iterdir()) == ["tiny"]


def _jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What footprint measures runs in this process, and takes 80 MB at most."""
    watch = watch_here(lambda found: 80_000_000)
    monkeypatch.setattr(footprint, "run_watched", lambda command, env: watch(command, env).watched)


def test_footprint_of_a_chat_that_fills_the_context(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _jobs_here(monkeypatch)
    data = _footprint(capsys, ["chat", "--shape", "tiny", "--layout", "portable", "--work", str(work), "-c", "256"])
    assert data["turns"] >= 1
    assert 100 <= data["context_tokens"] <= data["context"] == 256
    assert (data["peak_rss_bytes"], data["anonymous_bytes"]) == (80_000_000, 40_000_000)


def test_overhead_is_what_the_session_call_leaves_of_a_step() -> None:
    class Stopwatch:
        info = SimpleNamespace(name="made up")

        def measure_decode(self, tokens: int, past: int) -> Any:
            assert (tokens, past) == (3, 16)
            return SimpleNamespace(session_ms=[5.0, 4.0, 6.0], total_ms=[5.5, 6.0, 6.75])

    found = measure_overhead(Stopwatch(), 3, past=16)
    assert (found.session_ms.median, found.total_ms.median, found.overhead_ms.median) == (5.0, 6.0, 0.75)


def test_footprint_of_overhead(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _jobs_here(monkeypatch)
    bundle = str(Artifacts(work, TINY).bundle(PORTABLE))
    assert footprint.main(["overhead", "-m", bundle, "--tokens", "8", "--past", "16"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("session_ms", "total_ms", "overhead_ms", " - "))


def test_footprint_of_loading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"libraries_bytes": 30, "loaded_bytes": 20, "tokenizer_bytes": 5, "prefilled_bytes": 40}
    runs = [{"load_ms": ms, "tokenizer_ms": 1.0, **sizes} for ms in (900.0, 9.0, 12.0, 10.0)]

    def load(command: Sequence[str], env: Any) -> Any:
        assert command[-2] == "load" and json.loads(command[-1])["prompt"] == 200
        return SimpleNamespace(stdout=json.dumps(runs.pop(0)))

    monkeypatch.setattr(footprint, "run_watched", load)
    data = _footprint(capsys, ["load", "-m", "a/bundle", "-c", "256", "--prompt", "200", "--repeats", "3"])
    # The first run, in which nothing was in the system's cache yet, does not count.
    assert (data["load_ms"]["median"], data["load_without_tokenizer_ms"]["median"]) == (10.0, 9.0)
    assert (data["loaded_bytes"]["median"], data["prefilled_bytes"]["median"]) == (20, 40)


@linux_only
@pytest.mark.slow
def test_footprint_of_loading_in_processes(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["load", "--shape", "tiny", "--layout", "portable", "--work", str(work)]
    data = _footprint(capsys, [*arguments, "-c", "256", "--prompt", "200", "--repeats", "2"])
    assert data["load_without_tokenizer_ms"]["median"] > 0
    assert data["loaded_bytes"]["median"] > 0 and data["prefilled_bytes"]["median"] > 0
    assert data["libraries_bytes"]["median"] > 10e6


@needs_kernel
@linux_only
def test_two_processes_share_the_weights(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _footprint(capsys, ["share", "--shape", "tiny", "--work", str(work)])
    alone = data["alone_proportional_bytes"]
    assert 0 < alone <= data["alone_resident_bytes"]
    for who in ("first_of_two", "second_of_two"):
        assert data[f"{who}_proportional_bytes"] < 0.6 * alone
        assert data[f"{who}_private_bytes"] < 0.1 * alone


def test_loading_is_split_into_its_parts(work: Path) -> None:
    found = measure_loading(str(Artifacts(work, TINY).bundle(PORTABLE)), 20, context=64)
    assert 0 < found.tokenizer_ms < found.load_ms
    if sys.platform == "linux":
        assert found.libraries_bytes > 10e6


def test_chatting_ends_before_the_context_does(work: Path) -> None:
    with edgeinfer.load(Artifacts(work, TINY).bundle(PORTABLE), context=256, speculation="off") as model:
        length = chat_until_full(model, reply_tokens=8, message_tokens=24)
    assert length.turns > 2
    assert length.context_tokens > 200
