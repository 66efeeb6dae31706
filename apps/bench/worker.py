"""One engine in a process of its own, timed on request over pipes; knows nothing of other engines or statistics.

Run by path with whatever interpreter has the engine, so the standard library is all it imports before it is told which
engine to load. Each line of stdin is a JSON object: first the engine and its options, then requests; each is answered
by one JSON line on stdout. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Protocol

PREFILL_CHUNK = 64
# Any ids do, as time does not depend on them; these lie inside every vocabulary and avoid its special tokens.
FIRST_TOKEN, TOKEN_SPAN = 3, 200


class Engine(Protocol):
    """What is timed, always after one untimed pass that warms the caches the engine before it has taken."""

    version: str

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """Milliseconds of each of `count` passes over `size` new tokens with all their logits."""

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """Milliseconds of each of so many greedy steps: one pass and the choice of the next token."""


def token_ids(count: int) -> list[int]:
    """A fixed sequence of ordinary token ids."""
    return [FIRST_TOKEN + (index * 7) % TOKEN_SPAN for index in range(count)]


class EdgeInferEngine:
    """edgeinfer on a bundle."""

    def __init__(self, path: str, threads: int, context: int, exact: bool) -> None:
        self._model = import_module("edgeinfer").load(path, threads=threads, context=context, exact=exact)
        self.version = str(import_module("edgeinfer").__version__)

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        times: list[float] = self._model.measure_passes([size], past=past, repeats=count)[size]
        return times

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """See Engine."""
        return list(self._model.measure_decode(tokens, past=past).total_ms)


class LlamaCppEngine:
    """llama.cpp on a GGUF file, through the low-level calls of llama-cpp-python; options not named are its defaults."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = self._lib = import_module("llama_cpp")
        self._np = import_module("numpy")
        self.version = version("llama-cpp-python")
        # The callback must outlive the library's use of it.
        self._log = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = PREFILL_CHUNK
        options.n_threads = options.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, options) if model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(PREFILL_CHUNK, 0, 1)
        self._length = 0

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        tokens, times = token_ids(size), []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._forward(tokens, logits=True)
            self._lib.llama_get_logits(self._context)
            times.append((time.perf_counter() - started) * 1e3)
            self._truncate(past)
        return times[1:]

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        token, times = FIRST_TOKEN, []
        for _ in range(tokens + 1):
            started = time.perf_counter()
            self._forward([token], logits=True)
            pointer = self._lib.llama_get_logits(self._context)
            token = int(self._np.ctypeslib.as_array(pointer, shape=(self._vocab_size,)).argmax())
            times.append((time.perf_counter() - started) * 1e3)
        self._truncate(past)
        return times[1:]

    def _prefill(self, past: int) -> None:
        if self._length == past:
            return
        self._truncate(0)
        tokens = token_ids(past)
        for start in range(0, past, PREFILL_CHUNK):
            self._forward(tokens[start : start + PREFILL_CHUNK], logits=False)

    def _forward(self, tokens: list[int], *, logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self._length + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = logits
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self._length += len(tokens)

    def _truncate(self, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot truncate its cache to {length} tokens")
        self._length = length


class GenaiEngine:
    """onnxruntime-genai on a model of its own builder, whose head computes the logits of every row."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = import_module("onnxruntime_genai")
        self._np = import_module("numpy")
        self.version = str(lib.__version__)
        config = lib.Config(path)
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = lib.Model(config)
        params = lib.GeneratorParams(self._model)
        # The least length keeps a random model from ending its text early.
        params.set_search_options(max_length=context, min_length=context, do_sample=False)
        self._generator = lib.Generator(self._model, params)

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        tokens, times = self._np.array(token_ids(size), self._np.int32), []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._generator.append_tokens(tokens)
            times.append((time.perf_counter() - started) * 1e3)
            self._generator.rewind_to(past)
        return times[1:]

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        self._generator.append_tokens(self._np.array([FIRST_TOKEN], self._np.int32))
        # The first step only chooses from the logits of the append; each later one runs the model and chooses.
        self._generator.generate_next_token()
        times = []
        for _ in range(tokens):
            started = time.perf_counter()
            self._generator.generate_next_token()
            times.append((time.perf_counter() - started) * 1e3)
        self._generator.rewind_to(past)
        return times

    def _prefill(self, past: int) -> None:
        if self._generator.token_count() == past:
            return
        self._generator.rewind_to(0)
        tokens = self._np.array(token_ids(past), self._np.int32)
        for start in range(0, past, PREFILL_CHUNK):
            self._generator.append_tokens(tokens[start : start + PREFILL_CHUNK])


ENGINES: dict[str, Callable[..., Engine]] = {
    "edgeinfer": EdgeInferEngine,
    "llamacpp": LlamaCppEngine,
    "genai": GenaiEngine,
}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Load the engine of the first line, then answer each request until the input ends."""
    engine: Engine | None = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("kind")
        if engine is None:
            engine = ENGINES[kind](**request)
            answer: dict[str, Any] = {"version": engine.version}
        elif kind == "passes":
            answer = {"ms": engine.pass_times(**request)}
        elif kind == "decode":
            answer = {"ms": engine.decode_times(**request)}
        else:
            raise ValueError(f"unknown request {kind!r}")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve on stdin and stdout; what the engine's libraries print goes to stderr instead."""
    # Running by path puts this folder first, where its modules would hide others of the same name.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
