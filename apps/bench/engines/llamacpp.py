"""llama.cpp on a GGUF file, through the low-level calls of llama-cpp-python; knows nothing of other engines."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

from edgeinfer.apps.bench.engines.stepped import SteppedEngine

__all__ = ["LlamaCppEngine"]


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

    def take(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine."""
        position, count = len(self._taken), len(tokens)
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
        the last one, too, is not taken in again.
        """
        draft = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        if prompt != self._prompt:
            self._truncate(0)
            self._take(prompt[:-1], 0)
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
        """The likeliest token after each of these, which are taken in."""
        self._take(tokens, len(tokens))
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
