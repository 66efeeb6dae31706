"""Measures memory of exporting and of chatting, and the engine's time around each session call.

python -m edgeinfer.apps.bench.footprint export|chat|overhead [--json]

What is measured runs in a fresh process of its own; knows the public face and commands, nothing below.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.artifacts import Artifacts, default_folder, export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.shapes import SHAPES, find_shape
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.apps.bench.vocabulary import pseudo_text
from edgeinfer.apps.bench.watch import Watched, run_watched
from edgeinfer.config import format_size
from edgeinfer.errors import EdgeInferError

__all__ = ["ChatLength", "Overhead", "chat_until_full", "main", "measure_overhead"]

REPLY_TOKENS = 64
MESSAGE_TOKENS = 300


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


def chat_until_full(model: Any, reply_tokens: int = REPLY_TOKENS, message_tokens: int = MESSAGE_TOKENS) -> ChatLength:
    """Chats with long messages until no further turn would fit; a random model's replies are noise, which is fine."""
    conversation = model.chat(system="You answer at length.")
    turns = used = 0
    # A turn also costs its template's markup, and a reply may come back as a few more tokens than it was made of.
    margin = 2 * reply_tokens
    while model.context - used > reply_tokens + margin + 16:
        wanted = min(message_tokens, model.context - used - reply_tokens - margin)
        result = conversation.send(_message(model, wanted, turns), max_tokens=reply_tokens, ignore_eos=True)
        used = result.usage.total_tokens
        turns += 1
    return ChatLength(turns, model.context, used)


def _message(model: Any, tokens: int, seed: int) -> str:
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


def _export(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint = _artifacts(args).checkpoint()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        options = {"--bits": args.bits, "--group-size": args.group_size, "--head-bits": args.head_bits}
        command = export_command(checkpoint, Path(folder) / "bundle", options, symmetric=True)
        watched = run_watched(command, child_environment())
    return {"shape": args.shape, "source_bytes": (checkpoint / "model.safetensors").stat().st_size, **_memory(watched)}


def _chat(args: argparse.Namespace) -> dict[str, Any]:
    bundle = args.model or str(_artifacts(args).bundle(args.group_size, head_bits=args.head_bits))
    request = {"model": bundle, "context": args.context, "threads": args.threads, "memory": args.memory}
    watched = _in_child("chat", request)
    return {"model": bundle, **json.loads(watched.stdout), **_memory(watched)}


def _overhead(args: argparse.Namespace) -> dict[str, Any]:
    request = {"model": args.model, "threads": args.threads, "tokens": args.tokens, "past": args.past}
    found: dict[str, Any] = json.loads(_in_child("overhead", request).stdout)
    return found


def _artifacts(args: argparse.Namespace) -> Artifacts:
    return Artifacts(args.work, find_shape(args.shape), rebuild=args.rebuild)


def _memory(watched: Watched) -> dict[str, Any]:
    return {name: value for name, value in asdict(watched).items() if name != "stdout"}


def _in_child(job: str, request: dict[str, Any]) -> Watched:
    """Runs one of `_CHILDREN` in a fresh process, whose memory is then its own."""
    command = [sys.executable, "-m", "edgeinfer.apps.bench.footprint", "child", job, json.dumps(request)]
    return run_watched(command, child_environment())


def _child_chat(model: str, context: int, threads: int, memory: str | None) -> None:
    import edgeinfer

    with edgeinfer.load(model, context=context, threads=threads, memory=memory) as loaded:
        print(json.dumps({**asdict(chat_until_full(loaded)), "planned_bytes": loaded.plan.planned_bytes}))


def _child_overhead(model: str | None, threads: int, tokens: int, past: int) -> None:
    import edgeinfer

    with edgeinfer.load(model, threads=threads) as loaded:
        print(json.dumps(asdict(measure_overhead(loaded, tokens, past))))


_CHILDREN: dict[str, Callable[..., None]] = {"chat": _child_chat, "overhead": _child_overhead}


def _parser() -> argparse.ArgumentParser:
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.footprint", description=description)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    export = commands.add_parser("export", help="peak memory of exporting a random checkpoint")
    chat = commands.add_parser("chat", help="peak memory of a chat that fills the context")
    overhead = commands.add_parser("overhead", help="engine time around the session call, per token")
    export.add_argument("--bits", type=int, choices=(2, 4, 8, 32), default=4)
    for command in (export, chat):
        command.add_argument("--shape", default="qwen2.5-0.5b", help=f"one of {', '.join(SHAPES)}")
        command.add_argument("--group-size", type=int, choices=(32, 64, 128), default=128)
        command.add_argument("--head-bits", type=int, choices=(2, 4, 8), default=4)
        command.add_argument("--work", type=Path, default=default_folder(), help="model files, kept (%(default)s)")
        command.add_argument("--rebuild", action="store_true", help="export the bundle again")
    chat.add_argument("-c", "--context", type=int, default=2048)
    chat.add_argument("--memory", help="budget to load with, such as 430MB")
    overhead.add_argument("--tokens", type=int, default=64, help="decoded tokens")
    overhead.add_argument("--past", type=int, default=128, help="tokens in the cache before them")
    for command in (chat, overhead):
        command.add_argument("-m", "--model", help="bundle (default: chat: made from --shape; overhead: built-in)")
        command.add_argument("-t", "--threads", type=int, default=1)
    for command, execute in ((export, _export), (chat, _chat), (overhead, _overhead)):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(execute=execute)
    return parser


def _print(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            text = f"{value['median']:.3f} [{value['p25']:.3f}-{value['p75']:.3f}]"
        elif name.endswith("_bytes"):
            text = format_size(value)
        else:
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
        print(f"{name:<22} {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["child"]:
            _CHILDREN[arguments[1]](**json.loads(arguments[2]))
            return 0
        args = _parser().parse_args(arguments)
        found = args.execute(args)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
