"""Runs the `edgeinfer` command as a user does: in this process where that is enough, or in one of its own."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pytest

from edgeinfer.apps.cli.main import main

# Seconds after which a process that does not end has failed: far more than any needs, on however busy a machine.
TIME_LIMIT = 100
_ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: str | Path) -> list[str]:
    """The command line of `edgeinfer` with arguments."""
    return [sys.executable, "-m", "edgeinfer.apps.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The child's environment: this checkout, warnings as errors, never the network."""
    return os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "error", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def handling(number: signal.Signals, action: signal.Handlers | None = None) -> Iterator[None]:
    """Set the action of a signal, Python's default if None, in the block and in processes started there, even if the
    tests run under nohup."""
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, default if action is None else action)
    try:
        yield
    finally:
        signal.signal(number, before)


def edgeinfer(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs the command in this process: what it answers is the same as in its own, within hundredths of a second."""
    out, errors = io.BytesIO(), io.BytesIO()
    # A file, as a shell's `<` gives it.
    with (
        tempfile.TemporaryFile() as piped,
        io.TextIOWrapper(piped, "utf-8") as text,
        pytest.MonkeyPatch.context() as patch,
        handling(signal.SIGINT),
    ):
        piped.write(stdin)
        piped.seek(0)
        patch.setattr(sys, "stdin", text)
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True))
        patch.setattr(sys, "stderr", io.TextIOWrapper(errors, "utf-8", write_through=True))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        # Without pytest's own, warnings go to stderr, as they do in a process that sets up no logging.
        patch.setattr(logging.getLogger(), "handlers", [])
        code = main([str(argument) for argument in arguments])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), errors.getvalue())


def edgeinfer_process(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs the command in a process of its own to its end, for what only a process has."""
    return subprocess.run(
        command(*arguments), env=environment(), input=stdin, capture_output=True, check=False, timeout=TIME_LIMIT
    )


def python(code: str, *arguments: str | Path, **variables: str) -> str:
    """Runs code in a process of its own, which must end well and warn of nothing; returns what it prints.

    Args:
        variables: of its environment.
    """
    line = [sys.executable, "-c", code, *map(str, arguments)]
    env = environment() | variables
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


class Child(subprocess.Popen[bytes]):
    """A process with its output piped that does not outlive its `with`, and for which nothing waits without end."""

    def __init__(self, line: list[str], env: Mapping[str, str], stdin: int | None = None) -> None:
        with handling(signal.SIGINT):
            super().__init__(line, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(TIME_LIMIT if timeout is None else timeout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.kill()


@dataclass
class Logged:
    """A command that runs in a process of its own until it is stopped."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Stop it by a signal, as Ctrl-C does, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=TIME_LIMIT)


def start(*arguments: str | Path, stdin: int | None = None) -> Child:
    """Starts the command with its output piped."""
    return Child(command(*arguments), interruptible_environment(), stdin)


def interruptible_environment() -> dict[str, str]:
    """The environment of a child that is interrupted, without warnings about files it was opening."""
    return environment() | {"PYTHONWARNINGS": "error,ignore::ResourceWarning"}


def refuses(code: int, says: str, done: subprocess.CompletedProcess[bytes]) -> None:
    """Checks that a command failed as users are promised: this exit code, one line that holds `says`, no output."""
    line = done.stderr.decode("utf-8")
    assert done.returncode == code, line
    assert says in line
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert "error: unexpected " not in line
    assert done.stdout == b""


def leave_out(module: str, needed_by: str, patch: pytest.MonkeyPatch) -> None:
    """Have imports of modules whose names begin with `needed_by` fail for want of a module."""
    real = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name.startswith(needed_by):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(name, *others, **more)

    patch.setattr(builtins, "__import__", without)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file under a folder with its bytes, every directory with None."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
