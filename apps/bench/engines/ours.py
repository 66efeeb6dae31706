"""edgeinfer itself as an engine to be timed; knows nothing of other engines."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["EdgeInferEngine"]


class EdgeInferEngine:
    """edgeinfer on a bundle; `options` are those of `edgeinfer.load`. What is timed does not depend on the tokens."""

    def __init__(self, path: str, **options: Any) -> None:
        self._model = import_module("edgeinfer").load(path, **options)
        self.version = str(import_module("edgeinfer").__version__)

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        size = len(tokens)
        times: list[float] = self._model.measure_passes([size], past=len(past), repeats=count)[size]
        return times

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        return list(self._model.measure_decode(tokens, past=len(past)).total_ms)

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        return list(self._model.measure_prefill(len(prompt), repeats=1))

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        result = self._model.generate(prompt, max_tokens=tokens, speculation="off", ignore_eos=True)
        timings = result.timings
        later = timings.per_token_ms * (len(result.token_ids) - 1)
        return {"token_ids": list(result.token_ids), "first_ms": timings.ttft_ms, "later_ms": later}
