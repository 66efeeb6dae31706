"""Replies made at once: their pace, also llama.cpp's, and gaps between tokens while a prompt arrives.

    python -m tests.tools.batch_speed -m BUNDLE --gguf FILE --threads 1 --part pace --out pace.json

Prompts are random tokens that share nothing, so the texts mean nothing; all replies have their full length. Runs
alternate, and each is measured in seconds and in seconds of the processor, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.benchmark import numbers
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.core.errors import BackendError
from tests.tools.figures import percentile, script_json

Prompts = list[list[int]]
_GREEDY: dict[str, Any] = {"ignore_eos": True, "speculation": "off"}
# Ids below are control tokens of most vocabularies.
_FIRST_ID = 300


class Tokens:
    """Prompts of random tokens, none of them twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._last = vocab_size - _FIRST_ID

    def prompt(self, length: int) -> list[int]:
        """A new prompt."""
        return [self._draw.randrange(_FIRST_ID, self._last) for _ in range(length)]


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class LlamaBatch:
    """llama.cpp with all sequences in each `llama_decode`, as in its server: prompts first, then step by step."""

    def __init__(self, path: Path, threads: int, sequences: int, context: int) -> None:
        lib = self._lib = llama_library()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = context * sequences, sequences
        options.n_threads = options.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, options) if self._model else None
        if not self._context:
            raise BackendError(f"llama.cpp cannot load {path}.")
        self._size = int(lib.llama_n_batch(self._context))
        self._batch = lib.llama_batch_init(self._size, 0, 1)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def generate(self, prompts: Prompts, tokens: int) -> None:
        """Continue prompts of one length greedily."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        last: list[int] = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            for start in range(0, len(rows), self._size):
                found = self._decode(rows[start : start + self._size])
            last += found
        for step in range(tokens - 1):
            at = len(prompts[0]) + step
            last = self._decode([(token, at, sequence, True) for sequence, token in enumerate(last)])

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The most likely tokens after the rows whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._lib.llama_decode(self._context, batch) != 0:
            raise BackendError("llama.cpp could not decode.")
        count = sum(wanted for *_, wanted in rows)
        if not count:
            return []
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape=(count, self._vocab_size))
        found: list[int] = logits.argmax(axis=1).tolist()
        return found

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def measure_pace(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by number of clients, evaluation of their prompts included; for llama.cpp too."""
    most, context = max(args.clients), args.prompt + args.tokens + 1
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with edgeinfer.load(args.model, context=context, threads=args.threads, parallel=most, remember=False) as model:
        tokens = Tokens(args.vocabulary, args.seed)
        engines: dict[str, Callable[[Prompts], object]] = {
            "edgeinfer": lambda prompts: model.generate_batch(
                prompts, parallel=len(prompts), max_tokens=args.tokens, **_GREEDY
            )
        }
        theirs = None if args.gguf is None else LlamaBatch(args.gguf, args.threads, most, context)
        if theirs is not None:
            engines["llama.cpp"] = lambda prompts: theirs.generate(prompts, args.tokens)
        for generate in engines.values():
            generate([tokens.prompt(args.prompt)])
        for _ in range(args.repeats):
            for clients in args.clients:
                for name, generate in engines.items():
                    prompts = [tokens.prompt(args.prompt) for _ in range(clients)]
                    times.setdefault((name, clients), []).append(_timed(partial(generate, prompts)))
        if theirs is not None:
            theirs.close()
    return {
        f"{name} {clients}": {
            "tokens_per_s": median(clients * args.tokens / wall for wall, _ in each),
            "tokens_per_cpu_s": median(clients * args.tokens / cpu for _, cpu in each),
        }
        for (name, clients), each in times.items()
    }


def measure_gaps(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds between tokens of running replies, while a long prompt arrives and without."""
    options: dict[str, Any] = {"context": args.late + args.prompt + args.tokens, "threads": args.threads}
    options |= {"parallel": 8, "remember": False, "inter_token_latency": args.inter_token_latency}
    gaps = dict[str, list[float]]()
    with edgeinfer.load(args.model, **options) as model:
        tokens = Tokens(args.vocabulary, args.seed)
        for _ in range(args.repeats):
            for name in ("without", "with"):
                found, clients = gaps.setdefault(name, []), max(args.clients)
                prompts = [tokens.prompt(args.prompt) for _ in range(clients)]
                late = tokens.prompt(args.late) if name == "with" else None
                _run(model, prompts, late, args.tokens, found)
    return {name: {f"p{at}": percentile(each, at) for at in (50, 99, 100)} for name, each in gaps.items()}


def _run(model: edgeinfer.Model, prompts: Prompts, late: list[int] | None, tokens: int, gaps: list[float]) -> None:
    """Record gaps between tokens once all replies have started, while the late prompt is evaluated if there is one."""
    started, watched, since = 0, False, 0.0

    def reply(prompt: list[int]) -> Generator[edgeinfer.TokenStream, None, None]:
        streams.append(model.stream(prompt, max_tokens=tokens, **_GREEDY))
        yield streams[-1]

    def arrive() -> Generator[edgeinfer.TokenStream, None, None]:
        nonlocal watched
        yield model.stream(late or [], max_tokens=1)
        watched = False

    streams: list[edgeinfer.TokenStream] = []
    last = dict[int, float]()
    with closing(model.reply_batch(len(prompts) + 1)) as batch:
        for prompt in prompts:
            batch.add(reply(prompt))
        while batch.step():
            for place, stream in enumerate(streams):
                for _ in stream.take():
                    now = time.perf_counter()
                    if place not in last:
                        started += 1
                    elif watched and last[place] >= since:
                        gaps.append((now - last[place]) * 1e3)
                    last[place] = now
            if started == len(prompts):
                started, watched, since = 0, True, time.perf_counter()
                if late is not None:
                    batch.add(arrive())


_PARTS = {"pace": measure_pace, "gaps": measure_gaps}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="batch_speed", description=__doc__)
    parser.add_argument("-m", "--model", help="as for edgeinfer run; the built-in one without it")
    parser.add_argument("--part", choices=_PARTS, default="pace")
    parser.add_argument("--gguf", type=Path, help="the same shape for llama.cpp, which is left out without it")
    parser.add_argument("--clients", type=numbers, default=(1, 2, 4, 8))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each reply")
    parser.add_argument("--late", type=int, default=1500, help="tokens of the prompt that arrives late")
    parser.add_argument("--inter-token-latency", type=float, metavar="MS", help="as edgeinfer.load takes it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096, help="ids of prompts are below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(arguments)
    figures = _PARTS[args.part](args)
    rows = [[name, *(str(value) for value in each.values())] for name, each in figures.items()]
    print_table(Table(f"{args.part}, {args.threads} threads", ["", *next(iter(figures.values()))], rows))
    if args.out is not None:
        args.out.write_text(script_json("batch_speed", figures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
