"""Engines that decode by a loop of their own: edgeinfer, onnxruntime-genai, OpenVINO GenAI.

Run under interpreters that may have neither edgeinfer nor numpy, so only the standard library is imported at the top.
Run as a script, this has OpenVINO GenAI make its model of a GGUF file: python pipelines.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

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


class EdgeInferEngine:
    """edgeinfer on a bundle; `options` are those of `edgeinfer.load`. What is timed does not depend on the tokens."""

    def __init__(self, path: str, **options: Any) -> None:
        self._package = import_module("edgeinfer")
        self._model = self._package.load(path, **options)
        self.version = str(self._package.__version__)

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        size = len(tokens)
        times = self._package.tools.measure_passes(self._model, [size], past=len(past), repeats=count)
        return list(times[size])

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        return list(self._package.tools.measure_decode(self._model, tokens, past=len(past)))

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        return list(self._package.tools.measure_prefill(self._model, len(prompt), repeats=1))

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        result = self._model.generate(prompt, max_tokens=tokens, speculation="off", ignore_eos=True)
        timings = result.timings
        later = timings.per_token_ms * (len(result.token_ids) - 1)
        return {"token_ids": list(result.token_ids), "first_ms": timings.ttft_ms, "later_ms": later}


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


def save_openvino_model(source: Path, folder: Path) -> None:
    """Has OpenVINO GenAI's pipeline make an OpenVINO model of a GGUF file, and keeps it.

    The pipeline saves what it makes beside the file, so it is shown a link to it in the folder.
    """
    link = folder / source.name
    link.symlink_to(source)
    import_module("openvino_genai").LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    if not (folder / "openvino_model.xml").is_file():
        raise SystemExit(f"OpenVINO GenAI saved nothing in {folder}")


if __name__ == "__main__":
    save_openvino_model(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
