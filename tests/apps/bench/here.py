"""What benchmarks start in processes of their own, run in this one: exports, jobs, and the workers of engines."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeinfer as edgeinfer_api
from edgeinfer.apps.bench.driver import WORKER_SCRIPT, Worker
from edgeinfer.apps.bench.watch import Ended, Watched
from edgeinfer.apps.bench.worker import ENGINES
from edgeinfer.errors import BackendError, EdgeInferError
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.results import DeviceLimits
from tests.cache import made
from tests.cli import edgeinfer


def read_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint."""
    with Checkpoint(folder) as tensors:
        return {name: tensors.read(name) for name in tensors.shapes}


def exports_here(patch: pytest.MonkeyPatch, *modules: str) -> None:
    """Lets modules of the benchmarks run the project's commands in this process, and take exports from the cache."""
    for name in modules:
        patch.setattr(f"edgeinfer.apps.bench.{name}.subprocess", SimpleNamespace(run=ran))


def known_limits(patch: pytest.MonkeyPatch) -> None:
    """The device can do what it is said to, which takes no time to find out."""
    limits = lambda threads=1: DeviceLimits("avx2", threads, 10e9, 20e9)  # noqa: E731
    patch.setattr(edgeinfer_api.tools, "measure_device", limits, raising=False)


def ran(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of the project that has been run in this process, as subprocess.run gives it, which runs the others."""
    module, *arguments = command[2:]
    if not module.startswith("edgeinfer."):
        return subprocess.run(command, **options)
    if module == "edgeinfer.apps.cli.main" and arguments[0] == "export":
        return _exported(Path(arguments[1]), Path(arguments[2]), arguments[3:])
    if module == "edgeinfer.apps.cli.main":
        done = edgeinfer(*arguments)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", io.StringIO())
        try:
            code = import_module(module).main(arguments) or 0
        except SystemExit as refused:  # argparse
            code = int(refused.code or 0)
        except EdgeInferError as error:
            return subprocess.CompletedProcess(command, error.exit_code, out.getvalue(), f"error: {error}\n")
    return subprocess.CompletedProcess(command, code, out.getvalue(), "")


def exported(source: Path, out: Path, *options: str) -> Path:
    """What `edgeinfer export` makes, from the cache."""
    done = _exported(source, out, options)
    assert done.returncode == 0, done.stderr
    return out


def _exported(source: Path, out: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    known_by = [_Contents(Path(option)) if Path(option).is_file() else option for option in options]
    try:
        folder = made(_export, _Contents(source), out.name, known_by)
    except _NotExportedError as failed:
        return failed.done
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / out.name, out)
    return subprocess.CompletedProcess([], 0, "", "")


def _export(folder: Path, source: _Contents, name: str, options: Sequence[str | _Contents]) -> None:
    words = [str(option.path) if isinstance(option, _Contents) else option for option in options]
    done = edgeinfer("export", source.path, folder / name, *words)
    if done.returncode != 0:
        raise _NotExportedError(
            subprocess.CompletedProcess([], done.returncode, done.stdout.decode(), done.stderr.decode())
        )


class _NotExportedError(Exception):
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(done.stderr)
        self.done = done


class _Contents:
    """A file or a folder that is known by what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        digest = hashlib.sha256(self.path.name.encode())
        files = [self.path] if self.path.is_file() else [p for p in self.path.rglob("*") if p.is_file()]
        for path in sorted(files):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()


def watch_here(peak: Callable[[dict[str, Any]], int]) -> Callable[..., Ended]:
    """A stand-in for `watch` that runs jobs in this process and makes up their memory.

    Args:
        peak: the most that a job had resident and anonymous, by what it found.
    """

    def watch(command: Sequence[str], env: Mapping[str, str] | None = None, *_: Any, **__: Any) -> Ended:
        module, job, arguments = command[-3:]
        found: dict[str, Any]
        try:
            found = import_module(module).JOBS[job](**json.loads(arguments))
        except EdgeInferError as error:
            return Ended(error.exit_code, str(error), None)
        found.pop("peak_rss_bytes", None)
        most = peak(found)
        told = json.dumps(found | {"peak_rss_bytes": 0})
        return Ended(0, "", Watched(told, 1.0, most, most // 2, most // 2, most))

    return watch


class Canned:
    """An engine whose times are made up: 2 ms a step, 1 ms and 3 ms a token a pass, 50 ms a prompt.

    The next token is the last and 1.

    Args:
        wrong: whether it says 2 more instead.
    """

    version = "1.0"

    def __init__(self, path: str, wrong: bool = False, **_: Any) -> None:
        if not Path(path).exists():
            raise BackendError(f"{path} is absent.")
        self._by = 2 if wrong else 1

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        return [1.0 + 3.0 * len(tokens)] * count

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        return [2.0] * tokens

    def prefill_times(self, prompt: list[int]) -> list[float]:
        return [50.0]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        ids = [prompt[-1] + self._by * (place + 1) for place in range(tokens)]
        return {"token_ids": ids, "first_ms": 50.0, "later_ms": 2.0 * (tokens - 1)}

    def judge(self, prompt: list[int], reply: list[int]) -> list[float]:
        """How far each token is from the one that this engine would have said."""
        whole = [prompt[-1], *reply]
        return [float(token != before + self._by) for before, token in zip(whole, reply, strict=False)]


class LocalWorker(Worker):
    """A worker whose engine is in this process; what it is asked and answers goes through JSON all the same.

    Attributes:
        engines: by kind, those that stand in for the real ones.
    """

    engines: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self, engine: str, options: Mapping[str, Any], python: str | None = None, script: Path = WORKER_SCRIPT
    ) -> None:
        self._engine = engine
        self._made: Any = None
        self.version = str(self._ask({"kind": engine, **options})["version"])
        self.load_ms = 7.0

    def peak_bytes(self) -> int:
        return 100_000_000

    def mapped_files(self) -> tuple[Path, ...]:
        return ()

    def close(self) -> None:
        if hasattr(self._made, "_model"):
            self._made._model.close()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        arguments = json.loads(json.dumps(request))
        kind = arguments.pop("kind")
        try:
            if self._made is None:
                # Nothing that is timed drafts, and what drafting costs takes a while to measure.
                arguments |= {"speculation": "off"} if kind == "edgeinfer" else {}
                self._made = (ENGINES | self.engines)[kind](**arguments)
                return {"version": self._made.version}
            return json.loads(json.dumps(getattr(self._made, kind)(**arguments)))
        except Exception as error:  # as the worker's process tells whatever went wrong
            reason = str(getattr(error, "message", error))
            raise BackendError(f"The {self._engine} worker stopped: {reason.rstrip('.')}.") from error
