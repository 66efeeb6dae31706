"""One engine in a process of its own, timed on request over pipes; knows nothing of other engines or statistics.

Run by path with whatever interpreter has the engine, so the standard library is all it imports before it is told which
engine to load. Each line of stdin is a JSON object: first the engine and its options, then methods of the engine and
their arguments; each is answered by one JSON line on stdout. The process ends with its input.
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

# Any ids do, as time does not depend on them; these lie inside every vocabulary and avoid its special tokens.
FIRST_TOKEN, TOKEN_SPAN = 3, 200


class Engine(Protocol):
    """What is timed, always after one untimed pass that warms the caches the engine before it has taken."""

    version: str

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """Milliseconds of each of `count` passes over `size` new tokens with all their logits."""

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """Milliseconds of each of so many greedy steps: one pass and the choice of the next token."""

    def prefill_times(self, tokens: int) -> list[float]:
        """Milliseconds, once, from an empty cache to the logits after a prompt of so many tokens."""


def token_ids(count: int) -> list[int]:
    """A fixed sequence of ordinary token ids."""
    return [FIRST_TOKEN + (index * 7) % TOKEN_SPAN for index in range(count)]


class EdgeInferEngine:
    """edgeinfer on a bundle; `options` are those of `edgeinfer.load`."""

    def __init__(self, path: str, **options: Any) -> None:
        self._model = import_module("edgeinfer").load(path, **options)
        self.version = str(import_module("edgeinfer").__version__)

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        times: list[float] = self._model.measure_passes([size], past=past, repeats=count)[size]
        return times

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """See Engine."""
        return list(self._model.measure_decode(tokens, past=past).total_ms)

    def prefill_times(self, tokens: int) -> list[float]:
        """See Engine."""
        return list(self._model.measure_prefill(tokens, repeats=1))

    def pass_work(self, size: int) -> dict[str, Any]:
        """Fields of a PassWork: a pass over `size` new tokens with all their logits."""
        return dict(vars(self._model.pass_work(size, size)))

    def prefill_work(self, tokens: int) -> dict[str, Any]:
        """Fields of a PassWork: the passes that take in a prompt, of which the last computes one row of logits."""
        chunk = self._model.plan.prefill_chunk
        last = (tokens - 1) // chunk * chunk
        work = self._model.pass_work(tokens - last, 1)
        for _ in range(0, last, chunk):
            work += self._model.pass_work(chunk, 0)
        return dict(vars(work))


class LlamaCppEngine:
    """llama.cpp on a GGUF file, through the low-level calls of llama-cpp-python; options not named are its defaults."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        # Silenced, and without the order of weights for AMX, with which builds of GCC end the process.
        lib = self._lib = import_module("edgeinfer.bundle.gguf.library").llama_library()
        self._np = import_module("numpy")
        self.version = version("llama-cpp-python")
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = context
        options.n_threads = options.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, options) if model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch_size = int(lib.llama_n_batch(self._context))
        self._batch = lib.llama_batch_init(self._batch_size, 0, 1)
        self._length = 0
        self._prompt: list[int] = []

    def generate(self, prompt: list[int], tokens: int, stop_ids: list[int], lookup: int) -> dict[str, Any]:
        """A greedy reply, drafted by the binding's own prompt lookup where `lookup` tokens are to be drafted at most.

        Answers token_ids, the milliseconds after the first of them, and the rounds that these took. A prompt that was
        the last one, too, is not taken in again.
        """
        draft = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        if prompt != self._prompt:
            self._truncate(0)
            for start in range(0, len(prompt) - 1, self._batch_size):
                self._forward(prompt[start : min(start + self._batch_size, len(prompt) - 1)], logits=0)
            self._prompt = prompt
        self._truncate(len(prompt) - 1)
        text = [*prompt, *self._choices(prompt[-1:])]
        end, rounds, started = len(prompt) + tokens, 0, time.perf_counter()
        while len(text) < end and text[-1] not in stop_ids:
            room = min(lookup, end - len(text) - 1)
            drafted = draft(self._np.array(text, self._np.intc))[:room].tolist() if room > 0 else []
            choices = self._choices([text[-1], *drafted])
            agreed = next((i for i, token in enumerate(drafted) if choices[i] != token), len(drafted))
            fresh = choices[: agreed + 1]
            ending = next((i for i, token in enumerate(fresh) if token in stop_ids), agreed)
            text += fresh[: ending + 1]
            self._truncate(len(text) - 1)
            rounds += 1
        return {"token_ids": text[len(prompt) :], "ms": (time.perf_counter() - started) * 1e3, "rounds": rounds}

    def _choices(self, tokens: list[int]) -> list[int]:
        """The likeliest token after each of these, which are taken in."""
        self._forward(tokens, logits=len(tokens))
        pointer = self._lib.llama_get_logits(self._context)
        rows = self._np.ctypeslib.as_array(pointer, shape=(len(tokens), self._vocab_size))
        choices: list[int] = rows.argmax(axis=1).tolist()
        return choices

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        tokens, times = token_ids(size), []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._forward(tokens, logits=size)
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
            self._forward([token], logits=1)
            pointer = self._lib.llama_get_logits(self._context)
            token = int(self._np.ctypeslib.as_array(pointer, shape=(self._vocab_size,)).argmax())
            times.append((time.perf_counter() - started) * 1e3)
        self._truncate(past)
        return times[1:]

    def prefill_times(self, tokens: int) -> list[float]:
        """See Engine."""
        self._truncate(0)
        started = time.perf_counter()
        self._take_in(tokens, last_logits=1)
        self._lib.llama_get_logits(self._context)
        return [(time.perf_counter() - started) * 1e3]

    def _prefill(self, past: int) -> None:
        if self._length == past:
            return
        self._truncate(0)
        self._take_in(past, last_logits=0)

    def _take_in(self, count: int, last_logits: int) -> None:
        tokens = token_ids(count)
        for start in range(0, count, self._batch_size):
            end = min(start + self._batch_size, count)
            self._forward(tokens[start:end], logits=last_logits if end == count else 0)

    def _forward(self, tokens: list[int], *, logits: int) -> None:
        """One call over the tokens, with logits of so many of the last of them."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self._length + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index >= len(tokens) - logits
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self._length += len(tokens)

    def _truncate(self, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot truncate its cache to {length} tokens")
        self._length = length
        if length < len(self._prompt) - 1:
            self._prompt = []


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

    def prefill_times(self, tokens: int) -> list[float]:
        """See Engine."""
        self._generator.rewind_to(0)
        started = time.perf_counter()
        self._prefill(tokens)
        return [(time.perf_counter() - started) * 1e3]

    def _prefill(self, past: int) -> None:
        if self._generator.token_count() == past:
            return
        self._generator.rewind_to(0)
        self._generator.append_tokens(self._np.array(token_ids(past), self._np.int32))


class OpenVinoEngine:
    """OpenVINO on a model of openvino_model.py; with its default options matrices take int8 activations."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        lib = self._lib = import_module("openvino")
        self._np = import_module("numpy")
        self.version = str(lib.get_version())
        core = lib.Core()
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(str(Path(path, "model.xml"))), "CPU", options)
        # Two, in turns: the keys and values that one put out are what the other takes in, without a copy.
        self._requests = [compiled.create_infer_request() for _ in range(2)]
        self._past = {
            port.any_name: port.partial_shape for port in compiled.inputs if port.any_name.startswith("past.")
        }
        self._length = -1

    def pass_times(self, size: int, past: int, count: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        return [self._timed(token_ids(size), size) for _ in range(count + 1)][1:]

    def decode_times(self, tokens: int, past: int) -> list[float]:
        """See Engine."""
        self._prefill(past)
        token, times = FIRST_TOKEN, []
        for _ in range(tokens + 1):
            started = time.perf_counter()
            self._timed([token], 1)
            token = int(self._requests[0].get_tensor("logits").data.argmax())
            self._step(1)
            times.append((time.perf_counter() - started) * 1e3)
        self._length = -1
        return times[1:]

    def prefill_times(self, tokens: int) -> list[float]:
        """See Engine."""
        self._forget()
        return [self._timed(token_ids(tokens), 1)]

    def _prefill(self, past: int) -> None:
        if self._length == past:
            return
        self._forget()
        self._timed(token_ids(past), 0)
        self._step(past)

    def _forget(self) -> None:
        for name, shape in self._past.items():
            sizes = [size.get_length() if size.is_static else 0 for size in shape]
            self._requests[0].set_tensor(name, self._lib.Tensor(self._np.zeros(sizes, self._np.float32)))
        self._length = 0

    def _timed(self, tokens: list[int], logits: int) -> float:
        """Milliseconds of a pass with logits of so many of the last tokens; `_step` keeps what it appends."""
        np, size, request = self._np, len(tokens), self._requests[0]
        started = time.perf_counter()
        mask = np.zeros((1, 1, size, self._length + size), np.float32)
        mask[0, 0, :, self._length :][np.triu(np.ones((size, size), np.bool_), 1)] = -np.inf
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": np.arange(self._length, self._length + size)[None],
            "mask": mask,
            "rows": np.arange(size - logits, size),
        }
        for name, array in inputs.items():
            request.set_tensor(name, self._lib.Tensor(array))
        request.infer()
        return (time.perf_counter() - started) * 1e3

    def _step(self, tokens: int) -> None:
        """Keeps what the last pass appended."""
        done, after = self._requests
        for name in self._past:
            after.set_tensor(name, done.get_tensor(name.replace("past", "present")))
        self._requests.reverse()
        self._length += tokens


ENGINES: dict[str, Callable[..., Engine]] = {
    "edgeinfer": EdgeInferEngine,
    "llamacpp": LlamaCppEngine,
    "genai": GenaiEngine,
    "openvino": OpenVinoEngine,
}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Load the engine of the first line, then answer each request until the input ends."""
    engine: Engine | None = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("kind")
        if engine is None:
            engine = ENGINES[kind](**request)
            answer: Any = {"version": engine.version}
        else:
            answer = getattr(engine, kind)(**request)
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
