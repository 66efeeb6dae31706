"""What footprint measures inside a fresh process, whose memory is then its own; knows nothing of other processes.

python -m edgeinfer.apps.bench.jobs NAME ARGUMENTS

Arguments are a JSON object, and so is what it prints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.apps.bench.vocabulary import pseudo_text
from edgeinfer.apps.bench.watch import anonymous_bytes

__all__ = [
    "JOBS",
    "ChatLength",
    "Loading",
    "Overhead",
    "chat_until_full",
    "measure_loading",
    "measure_overhead",
    "message_text",
]

REPLY_TOKENS = 64
MESSAGE_TOKENS = 300
# What a process that runs models has imported whatever the model.
LIBRARIES = ("numpy", "onnxruntime", "tokenizers", "jinja2", "edgeinfer.api")


@dataclass(frozen=True)
class ChatLength:
    """How far a conversation got."""

    turns: int
    context: int
    context_tokens: int


@dataclass(frozen=True)
class Overhead:
    """Milliseconds per decoded token: in the session call, in all, and the difference."""

    model: str
    session_ms: Spread
    total_ms: Spread
    overhead_ms: Spread


@dataclass(frozen=True)
class Loading:
    """What a model cost a process that had its libraries imported.

    Attributes:
        load_ms: the whole call, tokenizer included; of which tokenizer_ms are the tokenizer's.
        libraries_bytes: anonymous memory before the call.
        loaded_bytes: what the call added to it, of which tokenizer_bytes are the tokenizer's.
        prefilled_bytes: what there is above `libraries_bytes` after a prompt was taken in.
    """

    load_ms: float
    tokenizer_ms: float
    libraries_bytes: int
    loaded_bytes: int
    tokenizer_bytes: int
    prefilled_bytes: int


def chat_until_full(model: Any, reply_tokens: int = REPLY_TOKENS, message_tokens: int = MESSAGE_TOKENS) -> ChatLength:
    """Chats with long messages until no further turn would fit; a random model's replies are noise, which is fine."""
    conversation = model.chat(system="You answer at length.")
    turns = used = 0
    # A turn also costs its template's markup, and a reply may come back as a few more tokens than it was made of.
    margin = 2 * reply_tokens
    while model.context - used > reply_tokens + margin + 16:
        wanted = min(message_tokens, model.context - used - reply_tokens - margin)
        result = conversation.send(message_text(model, wanted, turns), max_tokens=reply_tokens, ignore_eos=True)
        used = result.usage.total_tokens
        turns += 1
    return ChatLength(turns, model.context, used)


def message_text(model: Any, tokens: int, seed: int) -> str:
    """Text of about so many tokens, never more."""
    words = pseudo_text(tokens, seed).split()
    taken: list[str] = []
    count = 0
    for word in words:
        count += len(model.tokenize(" " + word))
        if count > tokens:
            break
        taken.append(word)
    return " ".join(taken)


def measure_overhead(model: Any, tokens: int, past: int) -> Overhead:
    """Decodes greedily and splits each token's time."""
    times = model.measure_decode(tokens, past=past)
    around = [total - session for total, session in zip(times.total_ms, times.session_ms, strict=True)]
    return Overhead(model.info.name, Spread.of(times.session_ms), Spread.of(times.total_ms), Spread.of(around))


def measure_loading(model: str, prompt: int, **options: Any) -> Loading:
    """Loads a bundle and takes in a prompt of `prompt` tokens; `options` are those of `edgeinfer.load`."""
    for library in LIBRARIES:
        import_module(library)
    pid = os.getpid()
    libraries = anonymous_bytes(pid)
    with edgeinfer.load(model, **options) as loaded:
        after_load = anonymous_bytes(pid)
        loaded.measure_prefill(prompt, repeats=1)
        costs = loaded.load_costs
        return Loading(
            load_ms=costs.total_ms,
            tokenizer_ms=costs.tokenizer_ms,
            libraries_bytes=libraries,
            loaded_bytes=after_load - libraries,
            tokenizer_bytes=costs.tokenizer_bytes,
            prefilled_bytes=anonymous_bytes(pid) - libraries,
        )


def _chat(model: str, **options: Any) -> dict[str, Any]:
    with edgeinfer.load(model, **options) as loaded:
        return {**asdict(chat_until_full(loaded)), "planned_bytes": loaded.plan.planned_bytes}


def _overhead(model: str | None, tokens: int, past: int, **options: Any) -> dict[str, Any]:
    with edgeinfer.load(model, **options) as loaded:
        return asdict(measure_overhead(loaded, tokens, past))


def _load(model: str, prompt: int, **options: Any) -> dict[str, Any]:
    return asdict(measure_loading(model, prompt, **options))


def _hold(model: str, **options: Any) -> dict[str, Any]:
    """Uses every weight once, says so, and keeps the model until the input ends."""
    with edgeinfer.load(model, **options) as loaded:
        loaded.measure_decode(1, past=1)
        print("holding", flush=True)
        sys.stdin.read()
    return {}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"chat": _chat, "overhead": _overhead, "load": _load, "hold": _hold}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
