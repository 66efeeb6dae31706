"""Starts engine workers and runs them strictly one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import edgeinfer
from edgeinfer.apps.bench.watch import mapped_files, peak_bytes
from edgeinfer.errors import BackendError

WORKER_SCRIPT = Path(__file__).with_name("worker.py")
# Any ids do, as time does not depend on them; these lie inside every vocabulary and avoid its special tokens.
_FIRST_TOKEN, _TOKEN_SPAN = 3, 200


def token_ids(count: int) -> list[int]:
    """A fixed sequence of ordinary token ids."""
    return [_FIRST_TOKEN + (index * 7) % _TOKEN_SPAN for index in range(count)]


def child_environment() -> dict[str, str]:
    """This process's environment, with edgeinfer importable from where it was imported here."""
    home = str(Path(edgeinfer.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": home + (os.pathsep + inherited if inherited else "")}


def engine_environment(python: str | None) -> dict[str, str]:
    """The environment of an engine's process: a foreign interpreter has its own packages, and must not see those of
    this one; None is this one."""
    if python is None:
        return child_environment()
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class Worker:
    """One engine in its own process, suspended except while it answers.

    Suspending matters with several threads: pools of idle engines spin for a while and would take the cores. `load_ms`
    is the time from the start of the process until the engine was ready, its libraries imported.

    Args:
        engine: a key of worker.ENGINES.
        options: arguments of that engine.
        python: the interpreter that has the engine; None is this one.
        script: that serves it.

    Raises:
        BackendError: the engine could not be loaded.
    """

    def __init__(
        self, engine: str, options: Mapping[str, Any], python: str | None = None, script: Path = WORKER_SCRIPT
    ) -> None:
        self._engine = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=engine_environment(python),
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise BackendError(f"Cannot run {python}: {error.strerror}.", "Give a Python interpreter.") from error
        self._suspended = False
        try:
            self.version = str(self._ask({"kind": engine, **options})["version"])
            self.load_ms = (time.perf_counter() - started) * 1e3
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int], lookup: int) -> dict[str, Any]:
        """A greedy reply: its token_ids, the ms after the first of them, and the rounds these took; llama.cpp only."""
        request = {"kind": "generate", "prompt": list(prompt), "tokens": tokens, "stop_ids": list(stop_ids)}
        answer: dict[str, Any] = self._ask({**request, "lookup": lookup})
        return answer

    def peak_bytes(self) -> int:
        """The most that the process had resident so far."""
        return peak_bytes(self._process.pid)

    def mapped_files(self) -> tuple[Path, ...]:
        """Files that the process maps now: libraries, and models that are used in place."""
        return mapped_files(self._process.pid)

    def ask(self, kind: str, **arguments: Any) -> Any:
        """What a method of the engine answers."""
        return self._ask({"kind": kind, **arguments})

    def close(self) -> None:
        """End the process."""
        self._resume()
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._resume()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            answer = {"error": "it does not run Python"}
        if "error" in answer:
            self._process.kill()
            raise self._died(answer["error"])
        psutil.Process(self._process.pid).suspend()
        self._suspended = True
        return answer["answer"]

    def _resume(self) -> None:
        if self._suspended:
            psutil.Process(self._process.pid).resume()
            self._suspended = False

    def _died(self, reason: str = "") -> BackendError:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        reason = reason or (lines[-1] if lines else f"exit code {self._process.returncode}")
        message = f"The {self._engine} worker stopped: {reason.rstrip('.')}."
        return BackendError(message, "Check that the engine is installed and its model file is whole.")
