"""A server under load: many clients whose streams must be whole and their own, gaps between tokens, memory over time.

    python -m tests.tools.serve_load --clients 32 --seconds 300 --out load.json

Starts `edgeinfer serve` in a process of its own. Each client asks one question after another of a fixed set, which a
model alone has answered before; some clients hang up in the middle. Options after `--` go to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

import edgeinfer
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.errors import BackendError, UsageError
from edgeinfer.options import format_size
from tests.tools.figures import percentile, script_json

_NAMES = ("Tom", "Lily", "a little dog", "the old tree", "a red ball", "Sam and Ben", "the moon", "a brave mouse")
_PLACES = ("in the park", "at the sea", "in a big forest", "at school", "on a farm", "in the snow")
_FILLER = "They walked for a long time and saw many things on the way. "
# The share of the time in which the first requests fill caches.
_WARM_SHARE = 0.1


@dataclass(frozen=True)
class Question:
    """A request and the text that answers it."""

    body: dict[str, Any]
    expected: str


@dataclass
class LoadOutcome:
    """The requests of a run: streams that were complete or left by their client, pieces of text, errors, times to the
    first piece, gaps between pieces, and the server's bytes at seconds since the start."""

    complete: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def figures(self, seconds: float, clients: int) -> dict[str, Any]:
        """As JSON."""
        warm = next((size for at, size in self.rss if at >= seconds * _WARM_SHARE), 0)
        return {
            "clients": clients,
            "seconds": round(seconds, 1),
            "requests": self.complete + self.left + len(self.errors),
            "complete": self.complete,
            "disconnects": self.left,
            "errors": len(self.errors),
            "first_errors": self.errors[:10],
            "pieces_per_second": self.tokens / seconds,
            "ttft_ms": _percentiles(self.ttft_ms),
            "gap_ms": _percentiles(self.gap_ms),
            "rss_at_a_tenth_bytes": warm,
            "rss_at_the_end_bytes": self.rss[-1][1] if self.rss else 0,
            "rss_most_bytes": max((size for _, size in self.rss), default=0),
            "rss_bytes": [[round(at, 1), size] for at, size in self.rss[:: max(1, len(self.rss) // 60)]],
        }


def make_questions(model: edgeinfer.Model, count: int, seed: int) -> list[Question]:
    """Questions of many lengths, greedy and sampled, with the answers of the model alone without drafts."""
    draw = random.Random(seed)
    questions = []
    for _ in range(count):
        about = f"{draw.choice(_NAMES)} {draw.choice(_PLACES)}"
        content = f"{_FILLER * draw.choice((0, 0, 2, 20))}Tell me a story about {about}."
        messages = [{"role": "user", "content": content}]
        options: dict[str, Any] = {"max_tokens": draw.choice((8, 32, 64, 150))}
        if draw.random() < 0.7:
            options |= {"temperature": 0.8, "top_p": 0.95, "seed": draw.randrange(1000)}
        result = model.stream_chat(messages, speculation="off", **options).complete()
        questions.append(Question({"messages": messages, "stream": True} | options, result.text))
    return questions


async def ask(
    client: httpx.AsyncClient, url: str, question: Question, leave_after: int | None, into: LoadOutcome
) -> None:
    """Ask one question and check its answer; hang up after `leave_after` pieces of text, if that is a number."""
    started = last = time.perf_counter()
    text, pieces, ended = "", 0, False
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=question.body) as answer:
            if answer.status_code != 200:
                into.errors.append(f"status {answer.status_code}: {(await answer.aread())[:200].decode()}")
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                piece = _piece(json.loads(line.removeprefix("data: ")))
                if not piece:
                    continue
                now = time.perf_counter()
                (into.gap_ms if pieces else into.ttft_ms).append((now - last) * 1e3)
                last, text, pieces = now, text + piece, pieces + 1
                if pieces == leave_after:
                    break
    except (httpx.HTTPError, BackendError) as error:
        into.errors.append(f"after {time.perf_counter() - started:.1f} s: {type(error).__name__}: {error}")
        return
    into.tokens += pieces
    _judge(question, text, ended, pieces == leave_after, into)


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise BackendError(str(event["error"]))
    return event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""


def _judge(question: Question, text: str, ended: bool, left: bool, into: LoadOutcome) -> None:
    if left and question.expected.startswith(text):
        into.left += 1
    elif ended and text == question.expected:
        into.complete += 1
    else:
        kind = "another's text" if ended or left else "incomplete"
        into.errors.append(f"{kind}: {text[-60:]!r} is not of {question.expected[:60]!r}")


async def load_server(
    url: str, pid: int, questions: Sequence[Question], *, clients: int, seconds: float, leaving: float, seed: int
) -> LoadOutcome:
    """Have clients ask for some time."""
    outcome = LoadOutcome()
    started = time.perf_counter()

    async def one(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while time.perf_counter() - started < seconds:
            leave_after = draw.randrange(1, 20) if draw.random() < leaving else None
            await ask(client, url, draw.choice(questions), leave_after, outcome)

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        watching = asyncio.create_task(watch_memory(pid, outcome.rss))
        await asyncio.gather(*(one(number) for number in range(clients)))
        watching.cancel()
    return outcome


async def watch_memory(pid: int, sizes: list[tuple[float, int]]) -> None:
    """Record seconds and the bytes of a process in memory, until cancelled."""
    server, started = psutil.Process(pid), time.perf_counter()
    while True:
        sizes.append((time.perf_counter() - started, server.memory_info().rss))
        await asyncio.sleep(1)


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """URL and process id of a server."""
    command = [sys.executable, "-m", "edgeinfer.apps.cli.main", "serve", "--port", "0", "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UsageError("The server did not start.", "It says why on stderr.")
            yield json.loads(line)["url"], process.pid
        finally:
            process.terminate()


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values, default=None)}


def _show(figures: dict[str, Any]) -> None:
    def times(name: str) -> str:
        return " / ".join("-" if value is None else f"{value:.0f}" for value in figures[name].values())

    memory = [format_size(figures[f"rss_{when}_bytes"]) for when in ("at_a_tenth", "at_the_end", "most")]
    header = ["clients", "requests", "errors", "left", "pieces/s", "first ms p50/p99/max", "gap ms p50/p99/max"]
    row = [
        *(str(figures[name]) for name in ("clients", "requests", "errors", "disconnects")),
        f"{figures['pieces_per_second']:.0f}",
        times("ttft_ms"),
        times("gap_ms"),
    ]
    title = f"{figures['seconds']:.0f} s under load"
    print_table(Table(title, [*header, "memory at 10%", "at the end", "most"], [[*row, *memory]]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 if a request went wrong."""
    parser = argparse.ArgumentParser(prog="serve_load", description=__doc__)
    parser.add_argument("-m", "--model", help="as for edgeinfer serve; the built-in one without it")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--questions", type=int, default=48, help="different requests")
    parser.add_argument("--leaving", type=float, default=0.1, help="share of requests whose client hangs up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("server", nargs="*", help="options of edgeinfer serve, behind --")
    args = parser.parse_args(arguments)
    with edgeinfer.load(args.model) as model:
        questions = make_questions(model, args.questions, args.seed)
    chosen = [] if args.model is None else ["-m", args.model]
    with running_server([*chosen, *args.server]) as (url, pid):
        started = time.perf_counter()
        load = load_server(
            url, pid, questions, clients=args.clients, seconds=args.seconds, leaving=args.leaving, seed=args.seed
        )
        outcome = asyncio.run(load)
        seconds = time.perf_counter() - started
    figures = outcome.figures(seconds, args.clients)
    _show(figures)
    if args.out is not None:
        args.out.write_text(script_json("serve_load", figures), "utf-8")
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main())
