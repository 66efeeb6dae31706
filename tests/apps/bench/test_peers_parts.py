"""What `edgeinfer bench peers` is made of: engines driven pass by pass, limits, checkpoints of bundles, workers."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.bench.driver import WORKER_SCRIPT, Worker
from edgeinfer.apps.bench.engines.stepped import SteppedEngine
from edgeinfer.apps.bench.peers_engines import write_bundle_checkpoint
from edgeinfer.apps.bench.peers_limits import LimitedRun, can_enforce, run_limited, summary
from edgeinfer.apps.bench.synthetic import convert_checkpoint
from edgeinfer.apps.bench.watch import watch
from edgeinfer.apps.bench.worker import ENGINES, serve
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import BackendError
from edgeinfer.export.options import ExportConfig
from tests.apps.bench.here import Canned, read_tensors
from tests.cache import export_checkpoint
from tests.cli import TIME_LIMIT
from tests.factories import make_checkpoint
from tests.speculation import BUILTIN, needs_builtin

needs_groups = pytest.mark.skipif(bool(can_enforce()), reason=can_enforce() or "control groups")
OURS = {"path": str(BUILTIN), "threads": 1, "context": 256, "speculation": "off", "remember": False}


class Counting(SteppedEngine):
    """The next token is the number of tokens so far; notes every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[int, int, int]] = []

    def evaluate(self, tokens: list[int], rows: int) -> None:
        self.passes.append((len(self._cached), len(tokens), rows))

    def choices(self, rows: int) -> list[int]:
        return [len(self._cached)]

    def truncate(self, length: int) -> None:
        assert length <= len(self._cached)


def test_every_pass_stands_where_it_should() -> None:
    engine = Counting()
    assert engine.reply([7, 7, 7], 3)["token_ids"] == [3, 4, 5]
    assert engine.passes == [(0, 3, 1), (3, 1, 1), (4, 1, 1)]
    engine.passes.clear()
    # One pass more than is counted; the past is taken in once.
    assert len(engine.pass_times([1, 2], [7, 8], 2)) == 2
    assert len(engine.pass_times([1], [7, 8], 1)) == 1
    assert engine.passes == [(0, 2, 0), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 1, 1), (2, 1, 1)]
    engine.passes.clear()
    assert len(engine.decode_times(2, [7, 8])) == 2
    assert engine.passes == [(2, 1, 1), (3, 1, 1), (4, 1, 1)]
    engine.passes.clear()
    assert len(engine.prefill_times([4, 4])) == 1
    assert len(engine.pass_times([1], [7, 8], 1)) == 1
    assert engine.passes == [(0, 2, 1), (0, 2, 0), (2, 1, 1), (2, 1, 1)]


@needs_builtin
def test_a_worker_says_what_went_wrong() -> None:
    with pytest.raises(BackendError, match=r"The edgeinfer worker stopped: .*nowhere"):
        Worker("edgeinfer", OURS | {"path": "/nowhere"})
    with Worker("edgeinfer", OURS) as worker:
        assert worker.load_ms > 0
        reply = worker.ask("reply", prompt=[5, 6, 7], tokens=4)
        assert len(reply["token_ids"]) == 4 and reply["later_ms"] > 0
        if sys.platform == "linux":
            assert worker.peak_bytes() > 10_000_000
            assert any("python" in path.name for path in worker.mapped_files())
        with pytest.raises(BackendError, match="context"):
            worker.ask("prefill_times", prompt=[5] * 1000)


def test_a_worker_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "canned", Canned)
    asked = [
        {"kind": "canned", "path": str(tmp_path)},
        {"kind": "decode_times", "tokens": 2, "past": [5]},
        {"kind": "reply", "prompt": [5], "tokens": 3},
        {"kind": "whatever"},
        {"kind": "prefill_times", "prompt": [5]},
    ]
    answers = io.StringIO()
    with pytest.raises(AttributeError):
        serve(io.StringIO("".join(json.dumps(request) + "\n" for request in asked)), answers)
    version, times, reply, refused = map(json.loads, answers.getvalue().splitlines())
    assert (version, times) == ({"answer": {"version": "1.0"}}, {"answer": [2.0, 2.0]})
    assert reply["answer"]["token_ids"] == [6, 7, 8]
    assert "whatever" in refused["error"]


@pytest.mark.skipif(shutil.which("cat") is None, reason="needs cat")
def test_interpreters_that_are_none() -> None:
    with pytest.raises(BackendError, match="The edgeinfer worker stopped"):
        Worker("edgeinfer", OURS, python=shutil.which("cat"))
    with pytest.raises(BackendError, match="Cannot run /nowhere/python"):
        Worker("edgeinfer", OURS, python="/nowhere/python")


def test_engines_load_without_edgeinfer() -> None:
    """A foreign interpreter runs the worker by path; -S hides what is installed here, edgeinfer too."""
    asked = json.dumps({"kind": "genai", "path": "none", "threads": 1, "context": 16}) + "\n"
    command = [sys.executable, "-S", "-I", str(WORKER_SCRIPT)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert json.loads(done.stdout) == {"error": "No module named 'onnxruntime_genai'"}
    done = subprocess.run(
        command,
        input=asked.replace("genai", "transformers"),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert json.loads(done.stdout) == {"error": "No module named 'torch'"}


def test_what_takes_too_long_is_ended() -> None:
    """No time at all is over at the first look, at which this one has not ended."""
    ended = watch([sys.executable, "-c", "import threading; threading.Event().wait(600)"], seconds=0)
    assert ended.late and ended.returncode != 0
    assert ended.reason == ("killed" if os.name == "posix" else f"exit code {ended.returncode}")
    assert not watch([sys.executable, "-c", "pass"]).late


@needs_builtin
@needs_groups
def test_replies_within_limits() -> None:
    wanted = {"prompt": [5, 6, 7], "tokens": 8, "patience": 60.0}
    ample = run_limited("edgeinfer", OURS | {"memory": 400_000_000}, None, budget=400_000_000, **wanted)  # type: ignore[arg-type]
    assert ample.reason == "" and len(ample.token_ids) == 8 and ample.tokens_per_second > 0
    assert 0 < ample.peak_rss_bytes < 400_000_000
    refused = run_limited("edgeinfer", OURS | {"memory": 5_000_000}, None, budget=400_000_000, **wanted)  # type: ignore[arg-type]
    assert refused.reason.startswith("refused: ") and "5.0 MB" in refused.reason
    killed = run_limited("edgeinfer", OURS, None, budget=6_000_000, **wanted)  # type: ignore[arg-type]
    assert killed.reason == "killed"


def test_one_process_without_a_reply_speaks_for_all() -> None:
    good = [LimitedRun("", rate, peak) for rate, peak in ((10.0, 5), (30.0, 7), (20.0, 6))]
    assert summary(good).tokens_per_second == 20.0 and summary(good).peak_rss_bytes == 7
    assert summary([*good, LimitedRun("killed")]).reason == "killed"


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen2"])
def test_a_bundle_becomes_the_checkpoint_it_was_made_of(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    make_checkpoint(tmp_path / "checkpoint", architecture)
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=32))
    write_bundle_checkpoint(open_bundle(bundle), tmp_path / "again")
    before, after = (read_tensors(tmp_path / name) for name in ("checkpoint", "again"))
    assert set(after) == set(before)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    once_more = export_checkpoint(tmp_path / "again", tmp_path / "bundle2", ExportConfig(bits=32))
    ids = [3, 8, 20, 9, 4]
    logits = []
    for path in (bundle, once_more):
        with edgeinfer.load(path, threads=1, speculation="off", remember=False) as model:
            logits.append(np.concatenate([rows.copy() for rows in model.logits(ids)]))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama-tied")
    convert_checkpoint(tmp_path / "checkpoint", tmp_path / "half", "bfloat16")
    before, after = (read_tensors(tmp_path / name) for name in ("checkpoint", "half"))
    assert set(after) == set(before)
    for name in before:
        np.testing.assert_allclose(after[name], before[name], rtol=2**-7)
    assert (tmp_path / "half" / "tokenizer.json").read_bytes() == (
        tmp_path / "checkpoint" / "tokenizer.json"
    ).read_bytes()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
