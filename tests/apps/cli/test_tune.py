"""`edgeinfer tune`: what it prints, keeps and forgets, also for models that cannot skip layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import main
from edgeinfer.tools import devices
from tests.edgeinfer.conftest import made_up_stopwatch
from tests.gguf_models import random_gguf

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("cache", "told_costs")


@pytest.fixture
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which prompts run faster in chunks of 128."""
    fast = made_up_stopwatch(lambda way: 0.5 if way.prefill_chunk == 128 else 1.0)
    monkeypatch.setattr(devices, "Stopwatch", fast)


def run(capsys: Capture, *arguments: str | Path, code: int = 0) -> str:
    assert main([*map(str, arguments)]) == code
    return capsys.readouterr().out


@pytest.mark.usefixtures("long_chunks")
def test_what_tuning_prints_and_keeps(capsys: Capture, small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ("-m", small_bundle)
    monkeypatch.setattr(devices, "load_average", lambda: 7.25)
    table = run(capsys, "tune", *model, "--evaluations", "1")
    assert "kept 7.2 threads busy" in table
    for line in (
        "on this device",
        "default",
        "2.00x",
        "prefill chunk 128",
        "next load on",
        "not better",
        "exit after layer",
    ):
        assert line in table
    assert "128 (tuned)" in run(capsys, "plan", "-v", *model)
    assert "(tuned)" not in run(capsys, "plan", "-v", *model, "--profile", "off")
    assert "(tuned)" not in run(capsys, "plan", "-v", *model, "--prefill-chunk", "32")
    assert json.loads(run(capsys, "tune", *model, "--forget", "--json")) == {"forgotten": True}
    assert run(capsys, "tune", *model, "--forget") == ""
    assert "(tuned)" not in run(capsys, "plan", "-v", *model)


@pytest.mark.usefixtures("long_chunks")
def test_settings_in_a_file(capsys: Capture, small_bundle: Path, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "mine.json"
    found = json.loads(run(capsys, "tune", "-m", small_bundle, "--quick", "--evaluations", "1", "--out", out, "--json"))
    device = found["device"]
    assert device["settings"] == {"threads": None, "affinity": "", "prefill_chunk": 128, "weights": None}
    assert device["path"] == str(out) and device["rejected"] is None and device["seconds"] > 0
    assert device["busy"] is None or device["busy"] >= 0
    assert device["parts"]["prompt"]["ratio"] == pytest.approx(2.0, rel=0.02)
    outcomes = {(each["name"], each["value"]): each["outcome"] for each in device["attempts"]}
    assert outcomes["prefill_chunk", 128] == "better"
    assert not (cache / "edgeinfer" / "tuned").exists()
    assert "128 (tuned)" in run(capsys, "plan", "-v", "-m", small_bundle, "--profile", out)
    text = run(capsys, "run", "-m", small_bundle, "-p", "Once", "-n", "4", "--profile", out)
    assert text == run(capsys, "run", "-m", small_bundle, "-p", "Once", "-n", "4")


def test_bad_requests_are_refused_before_anything_is_measured(
    capsys: Capture, small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(devices, "Stopwatch", measured)
    (tmp_path / "blank").write_text(" \n")
    for says, options in (
        ("default settings", ("--profile", "off")),
        ("default settings", ("--profile", tmp_path / "x.json")),
        ("must be at least 1", ("--evaluations", "0")),
        ("contains no prompts", ("--text", tmp_path / "blank")),
        ("contains no prompts", ("--drafters", "--text", tmp_path / "blank")),
        ("missing.txt", ("--drafters", "--text", tmp_path / "missing.txt")),
        ("--cache and --steering cannot", ("--cache", "--steering", "story")),
        ("--steering learns from a text", ("--steering", "story")),
    ):
        assert main(["tune", "-m", str(small_bundle), *map(str, options)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and says in err and err.count("\n") == 1


@pytest.mark.slow
def test_drafters_are_tuned_on_texts(capsys: Capture, small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("Once upon a time\n\nThe little dog\n")
    arguments = ("tune", "-m", small_bundle, "-t", "1", "--drafters", "--text", tmp_path / "texts")
    table = run(capsys, *arguments)
    assert all(word in table for word in ("on 2 texts", "recycle", "speedup", "auto uses", "no bits"))
    found = json.loads(run(capsys, *arguments, "--json"))
    assert found["texts"] == 2 and {"copy", "recycle"} <= {gain["drafters"] for gain in found["gains"]}
    assert set(found["gains"][0]) >= {"acceptance", "guess_ms", "pass_ratio", "speedup", "least_speedup", "pays"}
    assert set(found["kept"]) <= {gain["drafters"] for gain in found["gains"]}


@pytest.mark.gguf
@pytest.mark.usefixtures("brisk")
def test_a_gguf_model_is_tuned_without_its_layers(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    model = random_gguf(tmp_path, kind="Q8_0", hidden_size=64, max_position_embeddings=512)
    found = json.loads(run(capsys, "tune", "-m", model, "--backend", "llamacpp", "--json"))
    assert set(found) == {"device"}
    assert "prefill_chunk" in {each["name"] for each in found["device"]["attempts"]}
    assert "affinity" not in {each["name"] for each in found["device"]["attempts"]}
    assert "cannot skip layers" in run(capsys, "tune", "-m", model, "--backend", "llamacpp")
