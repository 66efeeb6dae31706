"""OpenVINO GenAI's LLMPipeline on a folder that it saved; knows nothing of other engines."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["OpenVinoGenaiEngine"]

# Tokens that every vocabulary has, for prompts to begin with: the first of them, and how many.
_ORDINARY, _FIRSTS = 5, 200


class OpenVinoGenaiEngine:
    """Times are those of its own PerfMetrics; options that are not named here are its defaults.

    The pipeline keeps what it computed for prompts that begin alike, so no two prompts that are timed begin alike.
    """

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = self._lib = import_module("openvino_genai")
        self._np, self._openvino = import_module("numpy"), import_module("openvino")
        self.version = str(lib.__version__)
        self._pipeline = lib.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        self._timed = 0

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        raise NotImplementedError("LLMPipeline has no passes over several tokens behind others")

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        metrics = self._generate(self._fresh(past), tokens + 2).perf_metrics
        return [microseconds / 1e3 for microseconds in metrics.raw_metrics.m_durations][1:]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        return [float(self._generate(self._fresh(prompt), 1).perf_metrics.get_ttft().mean)]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        result = self._generate(prompt, tokens)
        later = sum(result.perf_metrics.raw_metrics.m_durations) / 1e3
        return {"token_ids": result.tokens[0], "first_ms": result.perf_metrics.get_ttft().mean, "later_ms": later}

    def _generate(self, prompt: list[int], tokens: int) -> Any:
        config = self._lib.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        ids = self._np.array([prompt], self._np.int64)
        return self._pipeline.generate(self._openvino.Tensor(ids), config)

    def _fresh(self, prompt: list[int]) -> list[int]:
        """As many tokens, of which the first is another one than at the calls before."""
        self._timed += 1
        return [_ORDINARY + self._timed % _FIRSTS, *prompt[1:]]
