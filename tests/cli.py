"""Runs the `edgeinfer` command as a user does: in this process where that is enough, or in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.cli.main import main

__all__ = ["TIME_LIMIT", "command", "contents", "edgeinfer", "edgeinfer_process", "environment", "refuses", "start"]

# Seconds after which a process that does not end has failed: far more than any needs, on however busy a machine.
TIME_LIMIT = 100
_ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: str | Path) -> list[str]:
    """The command line of `edgeinfer` with arguments."""
    return [sys.executable, "-m", "edgeinfer.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The child's environment: this checkout, warnings as errors, never the network."""
    return os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "error", "HF_HUB_OFFLINE": "1"}


def edgeinfer(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs the command in this process: what it answers is the same as in its own, within hundredths of a second."""
    out, errors = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True))
        patch.setattr(sys, "stderr", io.TextIOWrapper(errors, "utf-8", write_through=True))
        code = main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), errors.getvalue())


def edgeinfer_process(
    *arguments: str | Path, stdin: bytes = b"", before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs the command in a process of its own to its end, for what only a process has; `before` is called in it."""
    return subprocess.run(
        command(*arguments),
        env=environment(),
        input=stdin,
        capture_output=True,
        check=False,
        preexec_fn=before,
        timeout=TIME_LIMIT,
    )


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Starts the command with its output piped."""
    # A file that is being opened when the command is interrupted is closed by nobody.
    child = environment() | {"PYTHONWARNINGS": "error,ignore::ResourceWarning"}
    return subprocess.Popen(command(*arguments), env=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def refuses(code: int, says: str, done: subprocess.CompletedProcess[bytes]) -> None:
    """Checks that a command failed as users are promised: this exit code, one line that holds `says`, no output."""
    line = done.stderr.decode("utf-8")
    assert done.returncode == code, line
    assert says in line
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert "error: unexpected " not in line
    assert done.stdout == b""


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file under a folder with its bytes, every directory with None."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
