"""`edgeinfer run` with a real model, or in a process of its own: pipes, signals, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import TIME_LIMIT, command, edgeinfer_process, environment, refuses, start
from tests.cli import edgeinfer as run
from tests.speculation import needs_builtin


@pytest.mark.slow
def test_a_pipe_that_stays_silent_is_named() -> None:
    with start("run", "-p", "Hi", "-c", "0x", stdin=subprocess.PIPE) as process:  # refused before it is read
        assert process.wait(TIME_LIMIT) == 2
    with start("run", "-m", "no-such-model", "-p", "Hi", stdin=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdin is not None
        assert process.stderr.readline().startswith(b"Reading more of the prompt from stdin")
        process.stdin.close()
        assert process.wait(TIME_LIMIT) == 3


def test_the_package_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "edgeinfer", "run", "--context", "no"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--context" in done.stderr


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command("run", "--help"), env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=TIME_LIMIT
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@needs_builtin
@pytest.mark.slow
def test_builtin_model_tells_a_story() -> None:
    """The same in another process."""
    story = ("run", "-p", "Once upon a time", "-n", "16")
    first = run(*story)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 5
    assert edgeinfer_process(*story).stdout == first.stdout


@needs_builtin
def test_builtin_model_answers_in_json() -> None:
    done = run("run", "-p", "Once upon a time", "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["usage"]["completion_tokens"] == len(data["token_ids"]) == 8
    assert data["memory"]["peak_rss_bytes"] > 0


@needs_builtin
def test_builtin_model_in_too_small_a_budget() -> None:
    refuses(4, "MB", run("run", "-p", "Once upon a time", "--memory", "1MB"))


@needs_builtin
@pytest.mark.slow
def test_ctrl_c_in_a_real_process() -> None:
    # The reference backend is slow enough for the signal to come before the end.
    with start(
        "run", "-p", "Once upon a time", "-n", "400", "--backend", "reference", "--speculation", "off"
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err == b"[stopped]\n"


@pytest.mark.slow
@needs_builtin
def test_context_files_are_read_before_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [tmp_path / f"{name}.txt" for name in ("dog", "cat")]
    for file in files:
        file.write_text(f"Tom had a {file.stem}. It was very old.", "utf-8")
    given = [part for file in files for part in ("--context-file", str(file))]
    evaluated = []
    for _ in range(2):
        result = run("run", "--raw", *given, "-p", "One day,", "-n", "4", "--json")
        assert result.returncode == 0, result.stderr
        contexts = json.loads(result.stdout)["contexts"]
        assert contexts["contexts"] == 2
        assert not contexts["lossless"]
        evaluated.append(contexts["evaluated"])
    assert evaluated[0] > evaluated[1] == 0
    refuses(2, "is not a file", run("run", "--context-file", str(tmp_path / "none"), "-p", "One day,"))
