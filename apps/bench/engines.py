"""Engines that `peers` and `curve` time, each served over pipes by a process of its own.

Run by path with whatever interpreter has the engine, so only the standard library is imported at the top. Each line
of stdin is a JSON object: first an engine and its options, then methods of the engine and their arguments. Each is
answered by one JSON line, {"answer": ...} or, before the process ends for that reason, {"error": ...}.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

_FOLDER = Path(__file__).resolve().parent
# Ids of ordinary tokens of every vocabulary.
_ORDINARY, _FIRSTS = 5, 200


def _timed(work: Callable[..., object], *arguments: Any) -> float:
    """Milliseconds that a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - started) * 1e3


class EdgeInferEngine:
    """edgeinfer on a bundle; options are those of `edgeinfer.load`. Times do not depend on the tokens."""

    def __init__(self, path: str, **options: Any) -> None:
        self._package = import_module("edgeinfer")
        self._model = self._package.load(path, **options)
        self.version = str(self._package.__version__)

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """Milliseconds of each of `count` passes over new tokens, with all their logits, after past ones."""
        size = len(tokens)
        return list(self._package.tools.measure_passes(self._model, [size], past=len(past), repeats=count)[size])

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """Milliseconds of each of `tokens` greedy steps after past tokens."""
        return list(self._package.tools.measure_decode(self._model, tokens, past=len(past)))

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """Milliseconds, once, from an empty cache to the logits after a prompt."""
        return list(self._package.tools.measure_prefill(self._model, len(prompt), repeats=1))

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A plain greedy reply: its token_ids and the milliseconds after the first of them."""
        result = self._model.generate(prompt, max_tokens=tokens, speculation="off", ignore_eos=True)
        later = result.timings.per_token_ms * (len(result.token_ids) - 1)
        return {"token_ids": list(result.token_ids), "later_ms": later}


class GenaiEngine:
    """onnxruntime-genai, whose own generator chooses the tokens; methods as of `EdgeInferEngine`."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = import_module("onnxruntime_genai")
        self._np = import_module("numpy")
        self.version = str(lib.__version__)
        config = lib.Config(path)
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = lib.Model(config)
        params = lib.GeneratorParams(self._model)
        # The minimum length keeps a text from ending early.
        params.set_search_options(max_length=context, min_length=context, do_sample=False)
        self._generator = lib.Generator(self._model, params)

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        self._restart(past)
        times = []
        for _ in range(count + 1):
            times.append(_timed(self._append, tokens))
            self._generator.rewind_to(len(past))
        return times[1:]

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        self._restart(past)
        self._append(past[:1])
        # The first step only chooses from the logits of the append; each later one runs the model and chooses.
        self._generator.generate_next_token()
        return [_timed(self._generator.generate_next_token) for _ in range(tokens)]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        self._generator.rewind_to(0)
        return [_timed(self._append, prompt)]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        self._restart(prompt)
        self._generator.generate_next_token()
        later = sum(_timed(self._generator.generate_next_token) for _ in range(tokens - 1))
        ids = [int(token) for token in self._generator.get_sequence(0)[len(prompt) :]]
        return {"token_ids": ids, "later_ms": later}

    def _restart(self, past: list[int]) -> None:
        self._generator.rewind_to(0)
        self._append(past)

    def _append(self, tokens: list[int]) -> None:
        self._generator.append_tokens(self._np.array(tokens, self._np.int32))


class OpenVinoGenaiEngine:
    """OpenVINO GenAI with its own metrics; methods as of `EdgeInferEngine`, but no passes over several tokens. The
    pipeline keeps results for prompts that begin alike, so no two prompts that are timed begin alike."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = self._lib = import_module("openvino_genai")
        self._np, self._openvino = import_module("numpy"), import_module("openvino")
        self.version = str(lib.__version__)
        self._pipeline = lib.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        self._timed = 0

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        metrics = self._generate(self._fresh(past), tokens + 2).perf_metrics
        return [microseconds / 1e3 for microseconds in metrics.raw_metrics.m_durations][1:]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        return [float(self._generate(self._fresh(prompt), 1).perf_metrics.get_ttft().mean)]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        result = self._generate(prompt, tokens)
        later = sum(result.perf_metrics.raw_metrics.m_durations) / 1e3
        return {"token_ids": result.tokens[0], "later_ms": later}

    def _generate(self, prompt: list[int], tokens: int) -> Any:
        config = self._lib.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        ids = self._np.array([prompt], self._np.int64)
        return self._pipeline.generate(self._openvino.Tensor(ids), config)

    def _fresh(self, prompt: list[int]) -> list[int]:
        """A prompt of the same length with another first token than in earlier calls."""
        self._timed += 1
        return [_ORDINARY + self._timed % _FIRSTS, *prompt[1:]]


class SteppedEngine:
    """Times the passes of a subclass; methods as of `EdgeInferEngine`."""

    # Evaluates tokens after those in the cache, with the logits of the last `rows` of them.
    evaluate: Callable[[list[int], int], None]
    choices: Callable[[int], list[int]]  # the most likely token after each of the last pass's rows
    truncate: Callable[[int], None]  # cuts the cache to so many tokens

    def __init__(self) -> None:
        self._cached: list[int] = []

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        self._prefill(past)
        times = []
        for _ in range(count + 1):
            times.append(_timed(self._evaluate, tokens, len(tokens)))
            self._truncate(len(past))
        return times[1:]

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        self._prefill(past)
        text = past[:1]
        times = [_timed(self._step, text) for _ in range(tokens + 1)]
        self._truncate(len(past))
        return times[1:]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        self._truncate(0)
        return [_timed(self._evaluate, prompt, 1)]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        self._truncate(0)
        self._evaluate(prompt, 1)
        reply = self.choices(1)
        later = sum(_timed(self._step, reply) for _ in range(tokens - 1))
        return {"token_ids": reply, "later_ms": later}

    def _step(self, text: list[int]) -> None:
        self._evaluate(text[-1:], 1)
        text += self.choices(1)

    def _prefill(self, past: list[int]) -> None:
        if self._cached != past:
            self._truncate(0)
            self._evaluate(past, 0)

    def _evaluate(self, tokens: list[int], rows: int) -> None:
        self.evaluate(tokens, rows)
        self._cached += tokens

    def _truncate(self, length: int) -> None:
        self.truncate(length)
        del self._cached[length:]


def _llama_library() -> Any:
    """llama.cpp's bindings; edgeinfer's own loader also silences them and works around a fault of AMX builds."""
    try:
        return import_module("edgeinfer.bundle.gguf.library").llama_library()
    except ModuleNotFoundError:
        lib = import_module("llama_cpp.llama_cpp")
        lib.llama_backend_init()
        return lib


class LlamaCppEngine(SteppedEngine):
    """llama.cpp with its default options."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        lib = self._lib = _llama_library()
        self._np = import_module("numpy")
        self.version = version("llama-cpp-python")
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = context
        options.n_threads = options.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, options) if model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch_size = int(lib.llama_n_batch(self._context))
        self._batch = lib.llama_batch_init(self._batch_size, 0, 1)

    def evaluate(self, tokens: list[int], rows: int) -> None:
        batch, count = self._batch, len(tokens)
        for start in range(0, count, self._batch_size):
            part = tokens[start : start + self._batch_size]
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index], batch.pos[index] = token, len(self._cached) + start + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = start + index >= count - rows
            if (status := self._lib.llama_decode(self._context, batch)) != 0:
                raise RuntimeError(f"llama_decode returned {status}")
        if rows:
            self._lib.llama_get_logits(self._context)  # waits for them

    def choices(self, rows: int) -> list[int]:
        pointer = self._lib.llama_get_logits(self._context)
        logits = self._np.ctypeslib.as_array(pointer, shape=(rows, self._vocab_size))
        return list(logits.argmax(axis=1).tolist())

    def truncate(self, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot truncate its cache to {length} tokens")


class TransformersEngine(SteppedEngine):
    """transformers in float32, which also judges the replies of the others."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        torch = self._torch = import_module("torch")
        torch.set_num_threads(threads)
        library = import_module("transformers")
        library.logging.disable_progress_bar()
        self.version = str(library.__version__)
        load = library.AutoModelForCausalLM.from_pretrained
        self._model = load(path, dtype=torch.float32, local_files_only=True).eval()
        # transformers 5.24 renamed this argument.
        renamed = "cache" in inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        self._new_cache = partial(library.DynamicCache, config=self._model.config)
        self._cache: Any = self._new_cache()
        self._logits: Any = None

    def evaluate(self, tokens: list[int], rows: int) -> None:
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            # 0 would be all of them.
            out = self._model(ids, use_cache=True, logits_to_keep=max(rows, 1), **{self._cache_name: self._cache})
        self._logits = out.logits[0]

    def choices(self, rows: int) -> list[int]:
        return list(self._logits.argmax(dim=-1).tolist())

    def truncate(self, length: int) -> None:
        if length == 0:
            self._cache = self._new_cache()
        elif length < len(self._cached):
            # A negative number removes that many; a positive one no longer says how many to leave.
            self._cache.crop(length - len(self._cached))

    def judge(self, prompt: list[int], reply: list[int]) -> list[float]:
        """How far each token of a reply is from the most likely one: 0 is that token, 1 the mean of all tokens."""
        self._truncate(0)
        self._evaluate([*prompt, *reply[:-1]], len(reply))
        logits = self._logits.double()
        best, mean = logits.max(dim=-1).values, logits.mean(dim=-1)
        chosen = logits.gather(1, self._torch.tensor(reply)[:, None])[:, 0]
        found: list[float] = ((best - chosen) / (best - mean)).tolist()
        return found


ENGINES: dict[str, Callable[..., Any]] = {
    "edgeinfer": EdgeInferEngine,
    "llamacpp": LlamaCppEngine,
    "genai": GenaiEngine,
    "openvino": OpenVinoGenaiEngine,
    "transformers": TransformersEngine,
}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Load the engine of the first line, then answer each request."""
    engine: Any = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("kind")
        try:
            if engine is None:
                engine = ENGINES[kind](**request)
                answer: dict[str, Any] = {"answer": {"version": engine.version}}
            else:
                answer = {"answer": getattr(engine, kind)(**request)}
        except Exception as error:
            # Errors of edgeinfer carry their message apart from the hint.
            answer = {"error": str(getattr(error, "message", error)) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            raise SystemExit(str(answer["error"]))


def main() -> None:
    """Serve, with stdout for answers alone: what libraries print goes to stderr."""
    # Running by path puts this folder first, where its modules would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _FOLDER]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
