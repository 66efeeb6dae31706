"""`edgeinfer bench peers` on a tiny model: figures, wrong answers, engines that are not there or fail, bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench import peers, peers_run
from edgeinfer.apps.bench.model_files import Artifacts
from edgeinfer.apps.bench.peers_engines import PEERS, builtin_model, shape_model
from edgeinfer.apps.bench.peers_figures import EngineFigures, PeersConfig, peers_json
from edgeinfer.apps.bench.peers_limits import LimitedRun
from edgeinfer.apps.bench.peers_run import PeersRun
from edgeinfer.apps.bench.render import section_markdown
from edgeinfer.apps.bench.synthetic import SHAPES
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import BackendError, UsageError
from tests.apps.bench.here import Canned, LocalWorker, exports_here
from tests.recorded import check_recorded
from tests.speculation import BUILTIN, needs_builtin

pytest.importorskip("onnx", reason="needs the export extra")
needs_llamacpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="needs the gguf extra"
)
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
SMALL = PeersConfig(context=256, prompt=40, reply=6, budgets=(), repeats=1, rounds=1)
SIZES = ["-c", "256", "-p", "40", "-n", "6", "--models", "tiny", "--quick"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        exports_here(patch, "model_files")
        yield tmp_path_factory.mktemp("peers")


@pytest.fixture
def canned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that take no time, and a reference that knows what they should say; "wrong" says something else."""
    monkeypatch.setattr(LocalWorker, "engines", {"edgeinfer": Canned, "transformers": Canned})
    monkeypatch.setattr(peers_run, "Worker", LocalWorker)
    ours = replace(PEERS["edgeinfer"], make=lambda model, python: tmp_path)
    reference = replace(PEERS["transformers"], make=lambda model, python: tmp_path)
    monkeypatch.setattr(peers_run, "missing", lambda peer, python, name: "")
    monkeypatch.setitem(PEERS, "edgeinfer", ours)
    monkeypatch.setitem(PEERS, "transformers", reference)
    monkeypatch.setitem(PEERS, "wrong", replace(ours, label="wrong", options={"wrong": True}))


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference, which takes seconds to start."""
    monkeypatch.setattr(peers_run, "missing", lambda peer, python, name: "it sleeps" if name == "transformers" else "")


def run(work: Path, *engines: str, **settings: Any) -> PeersRun:
    """A run of some engines on the tiny shape, done."""
    done = PeersRun(shape_model(work, "tiny"), replace(SMALL, engines=engines, **settings), lambda *_: None)
    done.run()
    return done


def shown(done: PeersRun, config: PeersConfig = SMALL) -> str:
    """What the command prints."""
    return section_markdown(peers.PEERS.section(peers_json([done.figures()], config)))


def found(done: PeersRun) -> dict[str, EngineFigures]:
    return {figures.engine: figures for figures in done.figures().engines}


@pytest.mark.usefixtures("canned")
def test_figures_of_engines(work: Path) -> None:
    done = run(work, "edgeinfer", "wrong", repeats=2)
    right, wrong = done.figures().engines
    assert (right.same_tokens, right.agreement, right.checked) == (True, 1.0, 6 * 16 + 64)
    assert right.load_ms is not None and right.load_ms.median == 7.0
    assert {name: spread.median for name, spread in right.rates.items()} == {"pp40": 800.0, "tg6": 500.0}
    assert {m: spread.median for m, spread in right.passes.items()} == {m: 1.0 + 3.0 * m for m in SMALL.sizes}
    assert right.peak_rss_bytes == 100_000_000 and not right.skipped
    # The speed of an engine that says something else does not count, however fast it is.
    assert (wrong.same_tokens, wrong.agreement) == (False, 0.0)
    assert not wrong.rates and not wrong.passes and wrong.load_ms is None
    text = shown(done)
    check_recorded("bench-peers", text.splitlines())
    assert "wrong: wrong" in text and "pp40 t/s" in text
    engines = peers_json([done.figures()], SMALL)["models"][0]["engines"]
    assert engines[0]["pp40"] == 800.0 and engines[0]["c"]["1"] == 4.0


@pytest.mark.usefixtures("canned")
def test_budgets_are_tried_until_one_fails(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def limited(kind: str, options: Any, python: str | None, *, budget: int, prompt: list[int], **_: Any) -> LimitedRun:
        tried.append(budget)
        assert options["memory"] == budget
        if budget < 300_000_000:
            return LimitedRun("killed")
        return LimitedRun("", 25.0, 250_000_000, tuple(Canned(options["path"]).reply(prompt, 64)["token_ids"]))

    monkeypatch.setattr(peers_run, "run_limited", limited)
    monkeypatch.setattr(peers_run, "can_enforce", lambda: "")
    settings = replace(SMALL, engines=("edgeinfer",), budgets=(400_000_000, 200_000_000), rounds=3)
    done = PeersRun(shape_model(work, "tiny"), settings, lambda *_: None)
    done.run()
    ours = found(done)["edgeinfer"]
    assert ours.budgets[400_000_000].tokens_per_second == 25.0 and ours.budgets[200_000_000].reason == "killed"
    assert tried.count(400_000_000) == 3 and tried.count(200_000_000) == 1
    text = shown(done, settings)
    assert "400.0 MB" in text and "killed" in text


@pytest.mark.slow
@pytest.mark.gguf
@needs_llamacpp
@needs_transformers
def test_engines_side_by_side(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "peers.json"
    engines = ["--engines", "edgeinfer,llamacpp,genai", "--budgets", "400"]
    assert main(["bench", "peers", *SIZES, *engines, "--work", str(work), "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["benchmark"] == "peers" and data["environment"]["cores"] >= 1 and data["command"]
    (model,) = data["models"]
    assert model["model"] == "tiny" and model["tests"] == ["pp40", "tg6"]
    ours, theirs, foreign = model["engines"]
    for engine in (ours, theirs):
        assert engine["skipped"] is None and engine["same_tokens"] is True
        assert engine["agreement"] > 0.9 and engine["checked_tokens"] == 6 * 16 + 64
        assert min(engine["load_ms"], engine["pp40"], engine["tg6"], engine["peak_rss_bytes"], engine["bytes"]) > 0
        assert set(engine["c"]) == {"1", "4"} and min(engine["c"].values()) > 0
    if find_spec("onnxruntime_genai") is None:
        assert "--python genai=PATH" in foreign["skipped"]
    text = capsys.readouterr().out
    assert "| engine" in text and "pp40 t/s" in text and "c(4) ms" in text
    assert "onnxruntime-genai: skipped:" in text or find_spec("onnxruntime_genai")
    if not model["limits"]:
        assert ours["budgets"]["400000000"]["tokens_per_second"] > 0
        assert "400.0 MB" in text
    page = tmp_path / "page.html"
    assert main(["bench", "report", str(out), "--out", str(page)]) == 0
    assert "Beside other engines" in page.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.gguf
@needs_builtin
@needs_llamacpp
@needs_transformers
def test_the_speed_of_a_wrong_engine_does_not_count(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of the same shape are as fast as the right ones."""
    other = Artifacts(work / "other", SHAPES["tales"])
    monkeypatch.setitem(PEERS, "llamacpp", replace(PEERS["llamacpp"], make=lambda model, python: other.gguf()))
    config = replace(SMALL, engines=("edgeinfer", "llamacpp"))
    done = PeersRun(builtin_model(work, BUILTIN), config, lambda *_: None)
    done.run()
    figures = found(done)
    assert figures["edgeinfer"].same_tokens is True and figures["edgeinfer"].rates
    wrong = figures["llama.cpp"]
    assert wrong.same_tokens is False and wrong.agreement is not None and wrong.agreement < 0.5
    assert not wrong.rates and not wrong.passes and not wrong.budgets and wrong.load_ms is None
    assert "llama.cpp: wrong" in shown(done)


@needs_transformers
def test_transformers_takes_part(work: Path, tmp_path: Path) -> None:
    from edgeinfer.apps.bench.engines.stepped import TransformersEngine

    engine = TransformersEngine(str(Artifacts(work, SHAPES["tiny"]).checkpoint()), threads=1, context=256)
    prompt = [5, 9, 70, 33]
    reply = engine.reply(prompt, 6)["token_ids"]
    assert engine.reply(prompt, 6)["token_ids"] == reply
    assert engine.judge(prompt, reply) == pytest.approx([0.0] * 6)
    worse = engine.judge(prompt, [(token + 1) % 500 for token in reply])
    assert max(worse) > 0.5
    assert len(engine.pass_times([1, 2], prompt, 2)) == len(engine.decode_times(2, prompt)) == 2
    # Whatever was timed in between, the cache holds what it should.
    assert engine.reply(prompt, 6)["token_ids"] == reply


@pytest.mark.usefixtures("canned")
def test_what_cannot_be_loaded_is_left_out(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)

    class Dying(Canned):
        def decode_times(self, tokens: int, past: list[int]) -> list[float]:
            raise BackendError("it died.")

    ours = PEERS["edgeinfer"]
    absent = replace(ours, label="absent", make=lambda model, python: tmp_path / "absent")
    monkeypatch.setitem(PEERS, "absent", absent)
    monkeypatch.setitem(PEERS, "dying", replace(ours, label="dying", kind="dying"))
    monkeypatch.setitem(LocalWorker.engines, "dying", Dying)
    done = run(work, "edgeinfer", "absent", "dying")
    figures = found(done)
    assert figures["edgeinfer"].rates and not figures["edgeinfer"].skipped
    assert figures["absent"].skipped and not figures["absent"].rates
    assert "stopped: it died" in (figures["dying"].skipped or "")
    assert figures["edgeinfer"].same_tokens is None
    text = shown(done)
    assert "Replies were not checked: it sleeps." in text and "dying: skipped:" in text
    json.dumps(peers_json([done.figures()], SMALL))


@pytest.mark.slow
def test_engines_that_fail_in_their_processes(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    broken = tmp_path / "broken"
    broken.mkdir()
    ours = PEERS["edgeinfer"]
    monkeypatch.setitem(PEERS, "broken", replace(ours, label="broken", make=lambda model, python: broken))
    monkeypatch.setitem(PEERS, "dying", replace(ours, label="dying", options={"native": "neither"}))
    figures = found(run(work, "edgeinfer", "broken", "dying"))
    assert figures["edgeinfer"].rates and not figures["edgeinfer"].skipped
    assert figures["broken"].skipped and not figures["broken"].rates
    assert "stopped" in (figures["dying"].skipped or "")


@pytest.mark.skipif(find_spec("onnxruntime_genai") is not None, reason="onnxruntime-genai is installed")
def test_an_interpreter_without_the_engine(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    figures = found(run(work, "genai", pythons={"genai": sys.executable}))
    assert "onnxruntime_genai" in (figures["onnxruntime-genai"].skipped or "")


@pytest.mark.usefixtures("canned")
def test_no_limits_no_column(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_run, "can_enforce", lambda: "there is no such thing here")
    done = run(work, "edgeinfer", budgets=(400_000_000,))
    assert not found(done)["edgeinfer"].budgets
    text = shown(done, replace(SMALL, budgets=(400_000_000,)))
    assert "not measured: there is no such thing here" in text and "400.0 MB" not in text


@pytest.mark.usefixtures("canned")
def test_the_command_writes_what_the_report_shows(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "peers.json", tmp_path / "page.html"
    arguments = [*SIZES, "--engines", "edgeinfer", "--budgets", "none", "--work", str(work), "--json", str(out)]
    assert main(["bench", "peers", *arguments]) == 0
    data = json.loads(out.read_text())
    assert data["benchmark"] == "peers" and data["environment"]["cores"] >= 1 and data["command"]
    (model,) = data["models"]
    assert model["model"] == "tiny" and model["tests"] == ["pp40", "tg6"]
    text = capsys.readouterr().out
    assert "| edgeinfer" in text and "c(4) ms" in text
    assert main(["bench", "report", str(out), "--out", str(page)]) == 0
    assert "Beside other engines" in page.read_text("utf-8")


@pytest.mark.usefixtures("canned")
def test_interrupted_it_keeps_what_was_done(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: PeersRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PeersRun, "_time_tasks", interrupt)
    out = tmp_path / "peers.json"
    arguments = [*SIZES, "--engines", "edgeinfer", "--budgets", "none", "--work", str(work), "--json", str(out)]
    assert main(["bench", "peers", *arguments]) == 130
    (engine,) = json.loads(out.read_text())["models"][0]["engines"]
    assert engine["load_ms"] == 7.0 and "tg6" not in engine
    captured = capsys.readouterr()
    assert "| edgeinfer" in captured.out and "Interrupted" in captured.err


BAD_INPUT = (
    (["--engines", "edgeinfer,warp"], "Unknown engine 'warp'"),
    (["--python", "warp=/bin/true"], "Unknown engine 'warp'"),
    (["--python", "genai"], "does not name an engine"),
    (["--python", "genai=/bin/echo"], "/bin/echo is no Python interpreter"),
    (["--python", "genai=/nowhere/python"], "Cannot run /nowhere/python"),
    (["--budgets", "lots"], "'lots' is not a positive size"),
    (["--budgets", "0"], "is not a positive size"),
    (["--models", "grand"], "Unknown model 'grand'"),
    (["--checkpoint", "/nowhere"], "/nowhere is no checkpoint"),
    (["-c", "100"], "A context of 100 tokens is too small"),
    (["-t", "0"], "--threads 0 is out of range"),
    (["--repeats", "0"], "--repeats 0 is out of range"),
    (["--patience", "0"], "--patience 0.0 is out of range"),
    (["--json", "/nowhere/peers.json"], "there is no such folder"),
)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in BAD_INPUT:
        assert main(["bench", "peers", "--work", str(tmp_path), *arguments]) in (2, 3, 5)
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and says in captured.err and not captured.out
        assert not list(tmp_path.iterdir())


def test_a_model_shorter_than_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tiny holds 256 tokens"):
        PeersRun(shape_model(tmp_path, "tiny"), PeersConfig(), lambda *_: None)


def test_prompts_of_random_weights_are_as_long_and_differ(tmp_path: Path) -> None:
    prompts = shape_model(tmp_path, "tiny").prompts()
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) > 1
