"""Engines that are driven pass by pass: llama.cpp, transformers, and OpenVINO's runtime.

Run under interpreters that may have neither edgeinfer nor numpy, so only the standard library is imported at the top.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


class SteppedEngine:
    """Times what its subclass does: `evaluate`, `choices` and `truncate`.

    Nothing but the standard library may be imported here: it runs under interpreters that have neither edgeinfer nor
    numpy.
    """

    version = ""

    def __init__(self) -> None:
        self._cached: list[int] = []

    def evaluate(self, tokens: list[int], rows: int) -> None:
        """Evaluates tokens behind those in the cache and waits for the logits of so many of the last of them."""
        raise NotImplementedError

    def choices(self, rows: int) -> list[int]:
        """The likeliest token after each of the rows that the last pass computed logits of."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Forgets all but so many tokens of the cache."""
        raise NotImplementedError

    def pass_times(self, tokens: list[int], past: list[int], count: int) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        times = []
        for _ in range(count + 1):
            started = time.perf_counter()
            self._evaluate(tokens, len(tokens))
            times.append((time.perf_counter() - started) * 1e3)
            self._truncate(len(past))
        return times[1:]

    def decode_times(self, tokens: int, past: list[int]) -> list[float]:
        """See worker.Engine."""
        self._prefill(past)
        token, times = past[0], []
        for _ in range(tokens + 1):
            started = time.perf_counter()
            token = self._step(token)
            times.append((time.perf_counter() - started) * 1e3)
        self._truncate(len(past))
        return times[1:]

    def prefill_times(self, prompt: list[int]) -> list[float]:
        """See worker.Engine."""
        self._truncate(0)
        started = time.perf_counter()
        self._evaluate(prompt, 1)
        return [(time.perf_counter() - started) * 1e3]

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        self._truncate(0)
        started = time.perf_counter()
        self._evaluate(prompt, 1)
        reply = self.choices(1)
        first = time.perf_counter()
        while len(reply) < tokens:
            reply.append(self._step(reply[-1]))
        ended = time.perf_counter()
        return {"token_ids": reply, "first_ms": (first - started) * 1e3, "later_ms": (ended - first) * 1e3}

    def _step(self, token: int) -> int:
        self._evaluate([token], 1)
        return self.choices(1)[0]

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


def _library() -> Any:
    """The bindings, which any interpreter may have; edgeinfer's own way in also silences them, and leaves out the order
    of weights for AMX, with which builds of GCC end the process."""
    try:
        return import_module("edgeinfer.bundle.gguf.library").llama_library()
    except ModuleNotFoundError:
        lib = import_module("llama_cpp.llama_cpp")
        lib.llama_backend_init()
        return lib


class LlamaCppEngine(SteppedEngine):
    """Options that are not named here are llama.cpp's defaults."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        lib = self._lib = _library()
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
        self._prompt: list[int] = []

    def evaluate(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine."""
        position, count = len(self._cached), len(tokens)
        for start in range(0, count, self._batch_size):
            end = min(start + self._batch_size, count)
            self._forward(tokens[start:end], position + start, rows if end == count else 0)
        if rows:
            self._lib.llama_get_logits(self._context)

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        pointer = self._lib.llama_get_logits(self._context)
        logits = self._np.ctypeslib.as_array(pointer, shape=(rows, self._vocab_size))
        found: list[int] = logits.argmax(axis=1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if not self._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot truncate its cache to {length} tokens")
        if length < len(self._prompt) - 1:
            self._prompt = []

    def generate(self, prompt: list[int], tokens: int, stop_ids: list[int], lookup: int) -> dict[str, Any]:
        """A greedy reply, drafted by the binding's own prompt lookup where `lookup` tokens are to be drafted at most.

        Answers token_ids, the milliseconds after the first of them, and the rounds that these took. A prompt that was
        the last one, too, is not evaluated again.
        """
        draft = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        if prompt != self._prompt:
            self._truncate(0)
            self._evaluate(prompt[:-1], 0)
            self._prompt = prompt
        self._truncate(len(prompt) - 1)
        text = [*prompt, *self._choices_after(prompt[-1:])]
        end, rounds, started = len(prompt) + tokens, 0, time.perf_counter()
        while len(text) < end and text[-1] not in stop_ids:
            room = min(lookup, end - len(text) - 1)
            drafted = draft(self._np.array(text, self._np.intc))[:room].tolist() if room > 0 else []
            choices = self._choices_after([text[-1], *drafted])
            agreed = next((i for i, token in enumerate(drafted) if choices[i] != token), len(drafted))
            fresh = choices[: agreed + 1]
            ending = next((i for i, token in enumerate(fresh) if token in stop_ids), agreed)
            text += fresh[: ending + 1]
            self._truncate(len(text) - 1)
            rounds += 1
        return {"token_ids": text[len(prompt) :], "ms": (time.perf_counter() - started) * 1e3, "rounds": rounds}

    def _choices_after(self, tokens: list[int]) -> list[int]:
        """The likeliest token after each of these, which are evaluated."""
        self._evaluate(tokens, len(tokens))
        return self.choices(len(tokens))

    def _forward(self, tokens: list[int], position: int, rows: int) -> None:
        """One call over the tokens, with logits of so many of the last of them."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index >= len(tokens) - rows
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


class TransformersEngine(SteppedEngine):
    """In float32 also the judge of what the others say.

    Args:
        dtype: of weights and arithmetic, as torch calls it.
    """

    def __init__(self, path: str, threads: int, context: int, dtype: str = "float32") -> None:
        super().__init__()
        torch = self._torch = import_module("torch")
        torch.set_num_threads(threads)
        library = import_module("transformers")
        library.logging.disable_progress_bar()
        self.version = str(library.__version__)
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
        self._model = model.eval()
        # transformers 5.24 gave it another name.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        self._new_cache: Callable[[], Any] = partial(library.DynamicCache, config=model.config)
        self._cache = self._new_cache()
        self._logits: Any = None

    def evaluate(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine; it always computes a row at least."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            # 0 would be all of them.
            out = self._model(ids, use_cache=True, logits_to_keep=max(rows, 1), **{self._cache_name: self._cache})
        self._logits = out.logits[0]

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        found: list[int] = self._logits.argmax(dim=-1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if length == 0:
            self._cache = self._new_cache()
        elif length < len(self._cached):
            # Negative: so many less; the number that are to be left is no longer an argument.
            self._cache.crop(length - len(self._cached))

    def judge(self, prompt: list[int], reply: list[int]) -> list[float]:
        """How far each token of a reply is from the likeliest at its place: 0 is the likeliest, 1 no better than the
        mean of all tokens, more is worse."""
        self._truncate(0)
        self._evaluate([*prompt, *reply[:-1]], len(reply))
        logits = self._logits.double()
        best, mean = logits.max(dim=-1).values, logits.mean(dim=-1)
        chosen = logits.gather(1, self._torch.tensor(reply)[:, None])[:, 0]
        found: list[float] = ((best - chosen) / (best - mean)).tolist()
        return found


class OpenVinoPassesEngine(SteppedEngine):
    """The model keeps keys and values in a state of its own, which can be emptied but not cut."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        lib = import_module("openvino")
        self._np = import_module("numpy")
        self.version = str(lib.get_version())
        core = lib.Core()
        model = core.read_model(str(Path(path, "openvino_model.xml")))
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        self._request = core.compile_model(model, "CPU", options).create_infer_request()

    def evaluate(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine; the head computes every row, whatever is asked for."""
        np, past, size = self._np, len(self._cached), len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + size), np.int64),
            "position_ids": np.arange(past, past + size)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer(inputs)

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        found: list[int] = self._request.get_tensor("logits").data[0, -rows:].argmax(axis=-1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if length == len(self._cached):
            return
        kept, self._cached = self._cached[:length], []
        self._request.reset_state()
        if kept:
            self._evaluate(kept, 0)
