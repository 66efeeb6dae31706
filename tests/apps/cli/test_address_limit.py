"""Commands under limits on addresses (`ulimit -v`): text, or one line of advice; never an abort, a trace or a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.apps.cli import main as cli
from edgeinfer.apps.cli import process
from edgeinfer.apps.cli.process import is_refused, refusal
from tests.cli import TIME_LIMIT, Child, command, interruptible_environment, refuses
from tests.speculation import needs_builtin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

RUN = ("run", "-p", "Once", "-n", "2", "--speculation", "off")
LOOSE = 4_000_000
LIMITS = (*range(100, 400, 30), *range(400, 1_001, 100))  # megabytes


def line(kilobytes: int, *arguments: str) -> list[str]:
    return ["sh", "-c", f'ulimit -v {kilobytes}; exec "$@"', "sh", *command(*arguments)]


def under(kilobytes: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with so many kilobytes of addresses."""
    return subprocess.run(
        line(kilobytes, *arguments), env=interruptible_environment(), capture_output=True, timeout=TIME_LIMIT
    )


def check(done: subprocess.CompletedProcess[bytes]) -> None:
    """Check that a command worked, or said in a line why not and what to do."""
    if done.returncode == 0:
        assert done.stdout
        return
    assert done.returncode in (4, 5), (done.returncode, done.stderr)
    refuses(done.returncode, "", done)
    assert b"-v" in done.stderr or b"Free memory" in done.stderr, done.stderr


@needs_builtin
def test_too_little_for_the_libraries() -> None:
    # Before: OpenBLAS gave up with a line of its own and code 1.
    done = under(100_000, *RUN, "-t", "1")
    refuses(4, "limits this process to 102.4 MB of address space", done)
    assert b"ulimit -v" in done.stderr


@needs_builtin
def test_what_aborted_or_hung_before() -> None:
    check(under(270_000, *RUN, "-t", "8"))


@pytest.mark.slow
def test_an_error_that_the_interpreter_lost_outside_of_all_handlers() -> None:
    script = (
        "import sys; from edgeinfer.apps.cli import main as cli\n"
        "def _execute(arguments): raise SystemError('error return without exception set')\n"
        "cli._execute = _execute; sys.exit(cli.main())"
    )
    argv = ["sh", "-c", f'ulimit -v {LOOSE}; exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(argv, env=interruptible_environment(), capture_output=True, timeout=TIME_LIMIT)
    refuses(4, "ulimit -v", done)


@pytest.mark.slow
@needs_builtin
@pytest.mark.parametrize("place", range(len(LIMITS)), ids=map(str, LIMITS))
def test_every_limit(place: int) -> None:
    # Threads take addresses, so that eight are refused where one is not.
    check(under(LIMITS[place] * 1_000, *RUN, "-t", ("1", "8")[place % 2]))


@pytest.mark.slow
@needs_builtin
@pytest.mark.parametrize("megabytes", [60, 180])
@pytest.mark.parametrize(
    "arguments", [("plan", "--memory", "100MB"), ("inspect",), ("devices",), ("chat", "--terminal"), ("run", "--help")]
)
def test_other_commands(arguments: tuple[str, ...], megabytes: int) -> None:
    done = under(megabytes * 1_000, *arguments)
    assert done.returncode in (0, 3, 4, 5), done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("run", "-m", "/nowhere", "-p", "x"), ("run",), ("nothing",)])
def test_codes_and_lines_are_those_of_the_command(arguments: tuple[str, ...]) -> None:
    loose = under(LOOSE, *arguments)
    free = subprocess.run(command(*arguments), env=interruptible_environment(), capture_output=True, timeout=TIME_LIMIT)
    assert (loose.returncode, loose.stdout, loose.stderr) == (free.returncode, free.stdout, free.stderr)


@pytest.mark.slow
@needs_builtin
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_work(number: int) -> None:
    arguments = ("run", "-p", "Once", "-n", "1000000", "-c", "1024", "--overflow", "window", "--speculation", "off")
    with Child(line(LOOSE, *arguments), interruptible_environment()) as child:
        assert child.stdout is not None
        assert child.stdout.read(8)
        os.kill(child.pid, number)
        child.stdout.read()
        assert child.wait(TIME_LIMIT) == (130 if number == signal.SIGINT else -signal.SIGTERM)


def test_an_error_that_a_module_in_c_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = SystemError("error return without exception set")
    assert not is_refused(lost)
    monkeypatch.setattr(process, "address_limit", lambda: 10**8)
    assert is_refused(lost) and not is_refused(SystemError("bad call"))


def test_what_other_libraries_say() -> None:
    for error in (
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("x.so: failed to map segment from shared object"),
        OSError("[Errno 12] Cannot allocate memory"),
    ):
        assert is_refused(error)
        assert cli._report([], error) == 4
    assert not is_refused(ValueError("out of memory of old"))
    assert "ulimit" in refusal(10**8).hint
    assert refusal(None).hint


def test_nothing_is_forked_without_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fork", None)
    monkeypatch.setattr(sys, "argv", ["edgeinfer", "--version"])
    assert cli.main() == 0
