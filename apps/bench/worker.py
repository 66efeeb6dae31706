"""One engine in a process of its own, timed on request over pipes.

Run by path with whatever interpreter has the engine, so the standard library is all it imports before it is told which
engine to load. Each line of stdin is a JSON object: first the engine and its options, then methods of the engine and
their arguments; each is answered by one JSON line on stdout, {"answer": ...} or, before it ends for that reason,
{"error": ...}. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

_FOLDER = Path(__file__).resolve().parent
_PACKAGE = "edgeinfer.apps.bench.engines"


class TimedEngine(Protocol):
    """What is timed, always after one untimed pass that warms the caches the engine before it has taken."""

    version: str

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """Milliseconds of each of `count` passes over new tokens, with all their logits, behind past ones."""

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """Milliseconds of each of so many greedy steps behind past tokens: a pass and the choice of the next token."""

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """Milliseconds, once, from an empty cache to the logits after a prompt."""

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A plain greedy reply of so many tokens, whatever they are: its token_ids, the milliseconds to the first of
        them (first_ms), and of all that come after it (later_ms)."""


def _make(module: str, name: str, **options: Any) -> TimedEngine:
    engine: TimedEngine = getattr(_load(module), name)(**options)
    return engine


def _load(module: str) -> ModuleType:
    """Loads a file of engines under its own name, but by path: the interpreter may have no edgeinfer."""
    name = f"{_PACKAGE}.{module}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, _FOLDER / "engines" / f"{module}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


ENGINES: dict[str, Callable[..., TimedEngine]] = {
    "edgeinfer": partial(_make, "pipelines", "EdgeInferEngine"),
    "llamacpp": partial(_make, "stepped", "LlamaCppEngine"),
    "genai": partial(_make, "pipelines", "GenaiEngine"),
    "openvino-genai": partial(_make, "pipelines", "OpenVinoGenaiEngine"),
    "openvino-passes": partial(_make, "stepped", "OpenVinoPassesEngine"),
    "transformers": partial(_make, "stepped", "TransformersEngine"),
}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Loads the engine of the first line, then answers each request until the input ends."""
    engine: TimedEngine | None = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("kind")
        try:
            if engine is None:
                engine = ENGINES[kind](**request)
                answer: Any = {"version": engine.version}
            else:
                answer = getattr(engine, kind)(**request)
        except Exception as error:
            # Errors of edgeinfer carry their message apart from the hint.
            _write(answers, {"error": str(getattr(error, "message", error)) or type(error).__name__})
            raise
        _write(answers, {"answer": answer})


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Serves on stdin and stdout; what the engine's libraries print goes to stderr instead."""
    # Running by path puts this folder first, where its modules would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _FOLDER]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
