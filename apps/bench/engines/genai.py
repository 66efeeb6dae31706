"""onnxruntime-genai on a model of its own builder, whose head computes the logits of every row."""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

__all__ = ["GenaiEngine"]


class GenaiEngine:
    """Tokens are chosen by its own generator."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = import_module("onnxruntime_genai")
        self._np = import_module("numpy")
        self.version = str(lib.__version__)
        config = lib.Config(path)
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = lib.Model(config)
        params = lib.GeneratorParams(self._model)
        # The least length keeps a text from ending early.
        params.set_search_options(max_length=context, min_length=context, do_sample=False)
        self._generator = lib.Generator(self._model, params)
        self._past: list[int] = []

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        ids, times = self._ids(tokens), []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._generator.append_tokens(ids)
            times.append((time.perf_counter() - started) * 1e3)
            self._generator.rewind_to(len(past))
        return times[1:]

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        self._generator.append_tokens(self._ids(past[:1]))
        # The first step only chooses from the logits of the append; each later one runs the model and chooses.
        self._generator.generate_next_token()
        times = []
        for _ in range(tokens):
            started = time.perf_counter()
            self._generator.generate_next_token()
            times.append((time.perf_counter() - started) * 1e3)
        self._generator.rewind_to(len(past))
        return times

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        self._past = []
        self._generator.rewind_to(0)
        started = time.perf_counter()
        self._prefill(prompt)
        return [(time.perf_counter() - started) * 1e3]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        self._past = []
        self._generator.rewind_to(0)
        started = time.perf_counter()
        self._generator.append_tokens(self._ids(prompt))
        self._generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(tokens - 1):
            self._generator.generate_next_token()
        ended = time.perf_counter()
        reply = [int(token) for token in self._generator.get_sequence(0)[len(prompt) :]]
        return {"token_ids": reply, "first_ms": (first - started) * 1e3, "later_ms": (ended - first) * 1e3}

    def _prefill(self, past: list[int]) -> None:
        if self._past == past:
            return
        self._generator.rewind_to(0)
        self._generator.append_tokens(self._ids(past))
        self._past = past

    def _ids(self, tokens: list[int]) -> Any:  # (S,) int32
        return self._np.array(tokens, self._np.int32)
