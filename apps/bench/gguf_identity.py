"""Whether greedy text of a GGUF file is llama.cpp's own, drafted or not; where it parts, how near the tie was.

    python -m edgeinfer.apps.bench.gguf_identity MODEL.gguf... --data DATA --per-category 8

The text of llama-cpp-python's `Llama`, decoding plainly, is compared with edgeinfer's, plain and drafted. A tie is the
difference between the two best logits at the first token that differs, in a plain pass. Knows nothing of speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.prompts import STORIES, builtin_prompts, load_prompts, tokenize_prompts
from edgeinfer.apps.bench.tables import print_table
from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.errors import EdgeInferError

__all__ = ["Agreement", "agreement", "main"]

_MODES = ("off", "auto", "copy,ngram,recycle")


@dataclass(frozen=True)
class Agreement:
    """How far a mode's replies are llama.cpp's own.

    Attributes:
        replies, tokens: that were compared.
        same: replies whose every token is the same.
        ties: of the others, the difference between the two best logits where they part.
        rechecked: choices that were taken again by a plain pass, as rounding might have decided them.
    """

    mode: str
    replies: int
    tokens: int
    same: int
    ties: tuple[float, ...]
    rechecked: int


def agreement(path: str, prompts: Sequence[Sequence[int]], *, context: int, tokens: int, kv: str) -> list[Agreement]:
    """Compares replies of so many tokens, in every mode.

    Raises:
        EdgeInferError: the file cannot be loaded.
    """
    with _llama(path, context, kv) as reference:
        expected = [_reply(reference, prompt, tokens) for prompt in prompts]
    found = []
    with edgeinfer.load(path, context=context, kv=kv, threads=1, remember=False) as model:
        for mode in _MODES:
            same, ties, rechecked = 0, list[float](), 0
            for prompt, wanted in zip(prompts, expected, strict=True):
                result = model.generate(prompt, max_tokens=tokens, ignore_eos=True, speculation=mode)
                rechecked += result.speculation.rechecked
                mine = list(result.token_ids)
                same += mine == wanted
                if mine != wanted:
                    place = next(i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b)
                    ties.append(_tie(model, [*prompt, *wanted[:place]]))
            found.append(Agreement(mode, len(prompts), len(prompts) * tokens, same, tuple(ties), rechecked))
    return found


@contextmanager
def _llama(path: str, context: int, kv: str) -> Iterator[Any]:
    # Takes AMX's order of weights off llama.cpp's list, with which builds of GCC end the process.
    lib = llama_library()
    kind = {"float32": lib.GGML_TYPE_F32, "float16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}[kv]
    options = {"type_k": kind, "type_v": kind, "flash_attn": kv == "q8_0"}
    model = import_module("llama_cpp").Llama(
        path, n_ctx=context, n_threads=1, n_threads_batch=1, verbose=False, **options
    )
    try:
        yield model
    finally:
        model.close()


def _reply(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    found: list[int] = []
    for token in model.generate(list(prompt), temp=0.0):
        found.append(token)
        if len(found) == tokens:
            return found
    return found


def _tie(model: edgeinfer.Model, ids: Sequence[int]) -> float:
    """How far the best logit after a text lies above the second."""
    last = np.zeros(2, np.float32)
    for rows in model.logits(ids):
        last = rows[-1].copy()
    second, best = np.partition(last, len(last) - 2)[-2:]
    return float(best - second)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; exit code 1 where a file cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--data", type=Path, help="folder of data sets (default: built-in dialogues)")
    parser.add_argument("--per-category", type=int, default=4, help="prompts of each (default: %(default)s)")
    parser.add_argument("-c", "--context", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("-n", "--tokens", type=int, default=100, help="of a reply (default: %(default)s)")
    parser.add_argument("--kv", nargs="+", default=["float16", "q8_0"], help="caches (default: %(default)s)")
    args = parser.parse_args(arguments)
    of, count, rows = list(STORIES), args.per_category, []
    try:
        prompts = load_prompts(args.data, count, categories=of) if args.data else builtin_prompts(count, of)
        for path in args.models:
            with edgeinfer.load(path, context=args.context, speculation="off", remember=False) as model:
                ids = [item.ids for item in tokenize_prompts(model, prompts, args.tokens)]
            for kv in args.kv:
                sizes = {"context": args.context, "tokens": args.tokens}
                for each in agreement(path, ids, kv=kv, **sizes):
                    ties = ", ".join(f"{tie:.3f}" for tie in sorted(each.ties)) or "none"
                    same = f"{each.same}/{each.replies}"
                    rows.append([Path(path).stem, kv, each.mode, same, str(each.tokens), str(each.rechecked), ties])
    except EdgeInferError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    header = ["file", "cache", "drafting", "same", "tokens", "taken again", "ties where they part"]
    print_table(
        "Greedy replies that are llama.cpp's own, token by token", header, rows, ["cache", "drafting", header[-1]]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
