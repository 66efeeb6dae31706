"""`bench peers`: figures, wrong answers, engines that are missing or fail; engines served over pipes, inside limits."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.apps.bench import peers, peers_engines
from edgeinfer.apps.bench.devices import write_bundle_checkpoint
from edgeinfer.apps.bench.engines import ENGINES, SteppedEngine, serve
from edgeinfer.apps.bench.peers import PeersRun
from edgeinfer.apps.bench.peers_engines import PEERS, PeerModel, PeersOptions, run_limited
from edgeinfer.apps.bench.processes import ENGINES_SCRIPT, Enclosure, Worker, enclosure, watch
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import BackendError, UsageError
from edgeinfer.export.options import ExportConfig
from tests.apps.bench.here import Canned, LocalWorker, commands_here, read_tensors
from tests.cache import export_checkpoint
from tests.cli import TIME_LIMIT
from tests.factories import make_checkpoint
from tests.speculation import BUILTIN, needs_builtin
from tests.tools.random_models import SHAPES, write_random_checkpoint

pytest.importorskip("onnx", reason="needs the export extra")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
SMALL = PeersOptions(context=256, prompt=40, reply=6, budgets=(), repeats=1, rounds=1, tolerance=0.5)
SIZES = ["-c", "256", "-p", "40", "-n", "6", "--quick"]
OURS = {"path": str(BUILTIN), "threads": 1, "context": 256, "speculation": "off", "remember": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerModel]:
    """A model of random weights."""
    folder = tmp_path_factory.mktemp("peers")
    with pytest.MonkeyPatch.context() as patch:
        commands_here(patch, "edgeinfer.apps.bench.peers_engines")
        write_random_checkpoint(folder / "tiny", SHAPES["tiny"])
        yield PeerModel(folder / "work", folder / "tiny", False)


@pytest.fixture
def canned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that take no time, and a reference that knows what they should say; "wrong" says something else."""
    engines = dict.fromkeys(("edgeinfer", "wrong", "transformers"), Canned)
    monkeypatch.setattr(LocalWorker, "engines", engines)
    for module in (peers, peers_engines):
        monkeypatch.setattr(module, "Worker", LocalWorker)
    monkeypatch.setattr(PeersOptions, "missing", lambda self, name: "")
    monkeypatch.setattr(PeerModel, "prompts", lambda self: [[5, 6, 7 + n] * 20 for n in range(6)])
    ours = replace(PEERS["edgeinfer"], make=lambda model, python: tmp_path)
    monkeypatch.setitem(PEERS, "edgeinfer", ours)
    monkeypatch.setitem(PEERS, "wrong", replace(ours, label="wrong", options={"wrong": True}))


def run(model: PeerModel, *engines: str, **settings: Any) -> dict[str, Any]:
    """Figures of some engines, and what is shown of them."""
    options = replace(SMALL, engines=engines, **settings)
    done = PeersRun(model, options, lambda *_: None)
    done.run()
    return json.loads(json.dumps(done.figures()))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("canned")
def test_figures_of_engines(tiny: PeerModel) -> None:
    found = run(tiny, "edgeinfer", "wrong", repeats=2)
    right, wrong = found["engines"]
    assert (right["same_tokens"], right["agreement"], right["checked_tokens"]) == (True, 1.0, 6 * 16 + 64)
    assert (right["load_ms"], right["pp40"], right["tg6"], right["c"]) == (7.0, 800.0, 500.0, {"1": 4.0, "4": 13.0})
    assert right["peak_rss_bytes"] == 100_000_000 and not right["skipped"]
    # The speed of an engine that says something else does not count, however fast it is.
    assert (wrong["same_tokens"], wrong["agreement"]) == (False, 0.0) and "pp40" not in wrong and "load_ms" not in wrong
    assert found["tests"] == ["pp40", "tg6"] and "read by transformers" in found["check"]


@pytest.mark.usefixtures("canned")
def test_budgets_are_tried_until_one_fails(tiny: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def limited(name: str, options: Any, python: str | None, budget: int, prompt: Any, patience: float) -> Any:
        tried.append(budget)
        assert options["memory"] == budget
        reply = {"token_ids": Canned(options["path"]).reply(prompt, 64)["token_ids"], "later_ms": 126.0}
        return ("killed", {}, 0) if budget < 300_000_000 else ("", reply, 250_000_000)

    monkeypatch.setattr(peers, "run_limited", limited)
    monkeypatch.setattr(peers, "enclosure", lambda: enclosed("cgroup"))
    (ours,) = run(tiny, "edgeinfer", budgets=(400_000_000, 200_000_000), rounds=3)["engines"]
    assert ours["budgets"]["400000000"] == {"tokens_per_second": 500.0, "reason": "", "peak_rss_bytes": 250_000_000}
    assert ours["budgets"]["200000000"]["reason"] == "killed"
    assert tried.count(400_000_000) == 3 and tried.count(200_000_000) == 1
    monkeypatch.setattr(peers, "enclosure", lambda: enclosed("rlimit"))
    found = run(tiny, "edgeinfer", budgets=(400_000_000,))
    assert "no control group" in found["limits"] and not found["engines"][0]["budgets"]


class enclosed(Enclosure):  # noqa: N801 (a context manager like `enclosure`)
    """A place of this kind."""

    def __enter__(self) -> Enclosure:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.usefixtures("canned")
def test_engines_that_fail_are_left_out(tiny: PeerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Canned):
        def decode_times(self, tokens: int, past: list[int]) -> list[float]:
            raise BackendError("it died.")

    monkeypatch.setattr(PeersOptions, "missing", lambda self, name: "it sleeps" if name == "transformers" else "")
    ours = PEERS["edgeinfer"]
    monkeypatch.setitem(PEERS, "absent", replace(ours, label="absent", make=lambda model, python: tmp_path / "absent"))
    monkeypatch.setitem(PEERS, "dying", replace(ours, label="dying"))
    monkeypatch.setattr(LocalWorker, "engines", LocalWorker.engines | {"dying": Dying, "absent": Canned})
    found = run(tiny, "edgeinfer", "absent", "dying")
    right, absent, dying = found["engines"]
    assert right["pp40"] and right["same_tokens"] is None and found["check"] == "Replies were not checked: it sleeps."
    assert "absent" in absent["skipped"] and "stopped: it died" in dying["skipped"]


@pytest.mark.slow
@pytest.mark.gguf
@needs_builtin
@pytest.mark.skipif(find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="needs the gguf extra")
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_engines_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "peers.json"
    engines = ["--engines", "edgeinfer,llamacpp,genai,transformers", "--budgets", "400", "--work", str(tmp_path)]
    assert main(["bench", "peers", *SIZES, *engines, "--json", str(out)]) == 0
    ours, theirs, foreign, reference = json.loads(out.read_text())["models"][0]["engines"]
    for engine in (ours, theirs, reference):
        assert engine["skipped"] is None and engine["same_tokens"] is True and engine["agreement"] > 0.9
        assert min(engine["load_ms"], engine["pp40"], engine["tg6"], engine["peak_rss_bytes"], engine["bytes"]) > 0
        assert set(engine["c"]) == {"1", "4"} and min(engine["c"].values()) > 0
    assert find_spec("onnxruntime_genai") or "--python genai=PATH" in foreign["skipped"]
    assert "c(4) ms" in capsys.readouterr().out


BAD_INPUT = (
    (["--engines", "edgeinfer,warp"], "Unknown engine 'warp'"),
    (["--python", "warp=/bin/true"], "Unknown engine 'warp'"),
    (["--python", "genai"], "does not name an engine"),
    (["--budgets", "lots"], "'lots' is not a positive size"),
    (["--models", "/nowhere"], "/nowhere is no checkpoint"),
    (["-c", "100"], "A context of 100 tokens is too small"),
    (["-t", "0"], "--threads 0 is out of range"),
    (["--patience", "0"], "--patience 0.0 is out of range"),
)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in BAD_INPUT:
        assert main(["bench", "peers", "--work", str(tmp_path), *arguments]) in (2, 3, 5)
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and says in captured.err and not captured.out
        assert not list(tmp_path.iterdir())


def test_a_model_shorter_than_the_work(tiny: PeerModel) -> None:
    with pytest.raises(UsageError, match="tiny holds 256 tokens"):
        PeersRun(tiny, PeersOptions(), lambda *_: None)


class Counting(SteppedEngine):
    """The next token is the number of tokens so far; records every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[int, int, int]] = []

    def evaluate(self, tokens: list[int], rows: int) -> None:
        self.passes.append((len(self._cached), len(tokens), rows))

    def choices(self, rows: int) -> list[int]:
        return [len(self._cached)]

    def truncate(self, length: int) -> None:
        assert length <= len(self._cached)


def test_stepped_engines_warm_up_once_and_keep_the_past() -> None:
    engine = Counting()
    assert engine.reply([7, 7, 7], 3)["token_ids"] == [3, 4, 5]
    assert engine.passes == [(0, 3, 1), (3, 1, 1), (4, 1, 1)]
    engine.passes.clear()
    assert len(engine.pass_times([1, 2], [7, 8], 2)) == 2 and len(engine.pass_times([1], [7, 8], 1)) == 1
    assert engine.passes == [(0, 2, 0), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 1, 1), (2, 1, 1)]
    engine.passes.clear()
    assert len(engine.decode_times(2, [7, 8])) == 2 and len(engine.prefill_times([4, 4])) == 1
    assert engine.passes == [(2, 1, 1), (3, 1, 1), (4, 1, 1), (0, 2, 1)]


def test_engines_are_served_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "canned", Canned)
    asked = [
        {"kind": "canned", "path": str(tmp_path)},
        {"kind": "decode_times", "tokens": 2, "past": [5]},
        {"kind": "whatever"},
        {"kind": "prefill_times", "prompt": [5]},
    ]
    answers = io.StringIO()
    with pytest.raises(SystemExit):
        serve(io.StringIO("".join(json.dumps(request) + "\n" for request in asked)), answers)
    version, times, refused = map(json.loads, answers.getvalue().splitlines())
    assert (version, times) == ({"answer": {"version": "1.0"}}, {"answer": [2.0, 2.0]}) and "whatever" in refused[
        "error"
    ]


def test_engines_load_without_edgeinfer() -> None:
    """A foreign interpreter runs the script by path; -S hides the packages of this one, edgeinfer too."""
    asked = json.dumps({"kind": "genai", "path": "none", "threads": 1, "context": 16}) + "\n"
    command = [sys.executable, "-S", "-I", str(ENGINES_SCRIPT)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert json.loads(done.stdout) == {"error": "No module named 'onnxruntime_genai'"}


@needs_builtin
def test_a_worker_reports_errors() -> None:
    with pytest.raises(BackendError, match=r"The edgeinfer worker stopped: .*nowhere"):
        Worker("edgeinfer", OURS | {"path": "/nowhere"})
    with pytest.raises(BackendError, match="Cannot run /nowhere/python"):
        Worker("edgeinfer", OURS, python="/nowhere/python")
    with Worker("edgeinfer", OURS) as worker:
        reply = worker.ask("reply", prompt=[5, 6, 7], tokens=4)
        assert worker.load_ms > 0 and len(reply["token_ids"]) == 4 and reply["later_ms"] > 0
        if sys.platform == "linux":
            assert worker.peak_bytes() > 10_000_000 and any("python" in path.name for path in worker.mapped_files())
        with pytest.raises(BackendError, match="context"):
            worker.ask("prefill_times", prompt=[5] * 1000)


@linux_only
@pytest.mark.parametrize("kind", ["cgroup", "rlimit"])
def test_limits_are_enforced(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "grow.py"
    script.write_text(
        "import json, sys\nfrom edgeinfer.apps.bench.processes import set_limit\n"
        "set_limit(json.loads(sys.argv[1]), 60_000_000)\nblock = bytearray(int(sys.argv[2]))\n"
    )
    with enclosure() as place:
        if kind == "cgroup" and place.kind != kind:
            pytest.skip("no control group can be made here")
        place = place if kind == "cgroup" else Enclosure("rlimit")
        commands = [[sys.executable, str(script), json.dumps(place.limit), size] for size in ("1000000", "200000000")]
        small, large = (watch(place.command(command), dict(os.environ)) for command in commands)
        assert small.returncode == 0 and small.peak_rss > 10e6 and large.returncode != 0
        assert kind != "cgroup" or (place.killed() and place.times_full() > 0)
    assert place.group is None or not place.group.exists()


@linux_only
@pytest.mark.slow
@needs_builtin
def test_replies_inside_limits() -> None:
    with enclosure() as place:
        if place.kind != "cgroup":
            pytest.skip("no control group can be made here")
    reason, reply, peak = run_limited("edgeinfer", OURS, None, 400_000_000, [5, 6, 7], 300.0)
    assert reason == "" and len(reply["token_ids"]) == 64 and peak > 10e6
    refused = run_limited("edgeinfer", OURS | {"memory": 5_000_000}, None, 400_000_000, [5, 6, 7], 300.0)
    assert refused[0].startswith("refused: ")
    assert run_limited("edgeinfer", OURS, None, 6_000_000, [5, 6, 7], 300.0)[0] == "killed"
    assert run_limited("edgeinfer", OURS, None, 400_000_000, [5, 6, 7], 0.0)[0] == "over 0 s"


def test_a_bundle_becomes_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    make_checkpoint(tmp_path / "checkpoint", "qwen2")
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32))
    write_bundle_checkpoint(open_bundle(bundle), tmp_path / "again")
    before, after = (read_tensors(tmp_path / name) for name in ("checkpoint", "again"))
    assert set(after) == set(before)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
