"""A GGUF file in a process of its own, in edgeinfer or in llama-cpp-python's high-level `Llama`; knows no statistics.

Run by `driver.Worker`, which sends the engine with its options first and then questions, one JSON object a line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.worker import ENGINES, serve
from edgeinfer.bundle.gguf.library import llama_library

__all__ = ["EdgeInferReplies", "LlamaReplies"]


def _peak_rss() -> int:
    """Bytes this process had resident at most."""
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - one line of a pseudo-file
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


class _Replies:
    """Times the tokens of a reply as whoever reads them gets them."""

    def _tokens(self, prompt: Sequence[int], tokens: int) -> Iterator[Sequence[int]]:
        """Tokens of a greedy reply as they come."""
        raise NotImplementedError

    def reply(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A greedy reply: token_ids, milliseconds to the first of them, and of each after it."""
        begun = time.perf_counter()
        first, ids = 0.0, list[int]()
        for fresh in self._tokens(prompt, tokens):
            first = first or time.perf_counter()
            ids += fresh
        ended = time.perf_counter()
        per_token = (ended - first) * 1e3 / max(1, len(ids) - 1)
        return {"token_ids": ids, "ttft_ms": (first - begun) * 1e3, "per_token_ms": per_token}

    def peak_rss(self) -> int:
        """Bytes this process had resident at most."""
        return _peak_rss()


class EdgeInferReplies(_Replies):
    """edgeinfer; `options` are those of `edgeinfer.load`."""

    def __init__(self, path: str, **options: Any) -> None:
        self.version = edgeinfer.__version__
        begun = time.perf_counter()
        self._model = edgeinfer.load(path, **options)
        self._loaded_s = time.perf_counter() - begun

    def _tokens(self, prompt: Sequence[int], tokens: int) -> Iterator[Sequence[int]]:
        for chunk in self._model.stream(prompt, max_tokens=tokens):
            if chunk.token_ids:
                yield chunk.token_ids

    def facts(self) -> dict[str, Any]:
        """Seconds of loading, and what was planned."""
        plan = self._model.plan
        return {"load_s": self._loaded_s, "planned_bytes": plan.planned_bytes, "terms": plan.terms}

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        return self._model.tokenize_chat(messages)

    def stop_ids(self) -> list[int]:
        """Tokens that end a reply."""
        return list(self._model.end_ids)


class LlamaReplies(_Replies):
    """llama-cpp-python's `Llama`; its tokens are taken before it makes text of them, which only favours it.

    Args:
        lookup: tokens that `LlamaPromptLookupDecoding` drafts; 0 decodes plainly.
        stop_ids: tokens that end a reply.
    """

    def __init__(self, path: str, *, threads: int, context: int, lookup: int, stop_ids: list[int]) -> None:
        # Takes AMX's order of weights off llama.cpp's list, with which builds of GCC end the process.
        llama_library()
        lib = import_module("llama_cpp")
        self.version = str(lib.__version__)
        begun = time.perf_counter()
        draft = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding if lookup else None
        self._model = lib.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft(num_pred_tokens=lookup) if draft else None,
            # What its documentation says drafting needs.
            logits_all=lookup > 0,
            verbose=False,
        )
        self._loaded_s = time.perf_counter() - begun
        self._stop_ids = frozenset(stop_ids)

    def _tokens(self, prompt: Sequence[int], tokens: int) -> Iterator[Sequence[int]]:
        for count, token in enumerate(self._model.generate(list(prompt), temp=0.0), 1):
            if token in self._stop_ids:
                return
            yield (token,)
            if count == tokens:
                return

    def facts(self) -> dict[str, Any]:
        """Seconds of loading."""
        return {"load_s": self._loaded_s}


ENGINES |= {"edgeinfer-replies": EdgeInferReplies, "llama-replies": LlamaReplies}  # type: ignore[dict-item]


def main() -> None:
    """Serves on stdin and stdout; what the libraries print goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
