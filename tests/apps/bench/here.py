"""Stand-ins for the processes that benchmarks start: commands, jobs and engines that run in this one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeinfer as edgeinfer_api
from edgeinfer.apps.bench.engines import ENGINES
from edgeinfer.apps.bench.jobs import JOBS
from edgeinfer.apps.bench.processes import Finished, Worker
from edgeinfer.core.errors import BackendError, EdgeInferError
from edgeinfer.core.results import DeviceLimits
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.cli import edgeinfer


def read_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint."""
    with Checkpoint(folder) as tensors:
        return {name: tensors.read(name) for name in tensors.shapes}


def commands_here(patch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have modules run the project's commands in this process."""

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if list(command[1:3]) != ["-m", "edgeinfer"]:
            return subprocess.run(command, **options)
        done = edgeinfer(*command[3:])
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())

    for name in modules:
        patch.setattr(f"{name}.subprocess", SimpleNamespace(run=run))


def known_limits(patch: pytest.MonkeyPatch) -> None:
    """Limits of the device that take no time to measure."""
    limits = lambda threads=1: DeviceLimits("avx2", threads, 10e9, 20e9)  # noqa: E731
    patch.setattr(edgeinfer_api.tools, "measure_device", limits, raising=False)


def watch_here(peak: Callable[[dict[str, Any]], int]) -> Callable[..., Finished]:
    """A stand-in for `watch` that runs jobs in this process, with a made-up peak for what each found."""

    def watch(command: Sequence[str], env: Mapping[str, str] | None = None, *_: Any, **__: Any) -> Finished:
        job, arguments = command[-2:]
        try:
            found = JOBS[job](**json.loads(arguments))
        except EdgeInferError as error:
            return Finished(error.exit_code, str(error))
        most = peak(found)
        return Finished(0, "", json.dumps(found | {"peak_rss_bytes": 0}), most, most // 2)

    return watch


class Canned:
    """An engine with made-up times: 2 ms a step, 1 ms and 3 ms a token a pass, 50 ms a prompt. The next token is the
    last and 1, or the last and 2 if it is `wrong`."""

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
        return {"token_ids": ids, "later_ms": 2.0 * (tokens - 1)}

    def judge(self, prompt: list[int], reply: list[int]) -> list[float]:
        whole = [prompt[-1], *reply]
        return [float(token != before + self._by) for before, token in zip(whole, reply, strict=False)]


class LocalWorker(Worker):
    """A worker whose engine is in this process; requests and answers go through JSON all the same."""

    engines: ClassVar[dict[str, Callable[..., Any]]] = {}  # stand-ins for the real ones, by kind

    def __init__(self, engine: str, options: Mapping[str, Any], python: str | None = None) -> None:
        self._engine = engine
        self._made: Any = None
        self.version = str(self.ask(engine, **options)["version"])
        self.load_ms = 7.0

    def peak_bytes(self) -> int:
        return 100_000_000

    def mapped_files(self) -> list[Path]:
        return []

    def close(self) -> None:
        """Nothing is left to end."""

    def ask(self, kind: str, **arguments: Any) -> Any:
        arguments = json.loads(json.dumps(arguments))
        try:
            if self._made is None:
                self._made = (ENGINES | self.engines)[kind](**arguments)
                return {"version": self._made.version}
            return json.loads(json.dumps(getattr(self._made, kind)(**arguments)))
        except Exception as error:  # as the worker's process reports any error
            reason = str(getattr(error, "message", error))
            raise BackendError(f"The {self._engine} worker stopped: {reason.rstrip('.')}.") from error
