"""A server under attack: how long ordinary clients wait, and how much memory the server has, before, during and after.

    python -m edgeinfer.apps.bench.serve_attack --seconds 30 --out attack.json -- --memory 400MB

Starts `edgeinfer serve` in a process of its own, and the attackers in another: requests with huge stop strings, with
huge prompts, and with bodies that never end. What stands behind `--` goes to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.apps.bench.serve_load import running_server, watch_memory
from edgeinfer.apps.bench.timing import percentile
from edgeinfer.config import format_size
from edgeinfer.errors import CapabilityError

try:
    import httpx
except ImportError as error:
    raise CapabilityError("This script asks servers with httpx.", "Install it: pip install httpx") from error


_BODY = {"messages": [{"role": "user", "content": "Tell me about a little dog."}], "max_tokens": 8, "stream": True}
_SAMPLE_S = 0.1
# Between two questions of an ordinary client.
_PAUSE_S = 0.2
# Between two looks of the attackers at the connections that the server has closed.
_AGAIN_S = 0.5
# Of the memory before the attack, by which it may have grown for good.
_LEVEL = 1.1


@dataclass
class Phase:
    """How ordinary clients were answered for a while, and the memory that the server had.

    Attributes:
        first_ms: from a request to the first of its text.
        refused: requests that were not answered with 200.
        rss: seconds since the phase began, and bytes then.
    """

    first_ms: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        sizes = [size for _, size in self.rss]
        return {
            "replies": len(self.first_ms),
            "refused": len(self.refused),
            "refused_with": sorted(set(self.refused))[:10],
            "first_ms": {f"p{percent}": percentile(self.first_ms, percent) for percent in (50, 99, 100)},
            "rss_most_bytes": max(sizes, default=0),
            "rss_last_bytes": sizes[-1] if sizes else 0,
        }


async def measure(url: str, pid: int, *, clients: int, seconds: float) -> Phase:
    """Lets ordinary clients ask for a while."""
    phase, started = Phase(), time.perf_counter()

    async def one(client: httpx.AsyncClient) -> None:
        while time.perf_counter() - started < seconds:
            await _ask(client, url, phase)
            await asyncio.sleep(_PAUSE_S)

    async with httpx.AsyncClient(timeout=120) as client:
        watching = asyncio.create_task(watch_memory(pid, phase.rss, _SAMPLE_S))
        await asyncio.gather(*(one(client) for _ in range(clients)))
        watching.cancel()
    return phase


async def _ask(client: httpx.AsyncClient, url: str, phase: Phase) -> None:
    started, first = time.perf_counter(), None
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=_BODY) as answer:
            if answer.status_code != 200:
                phase.refused.append(f"status {answer.status_code}")
                return
            async for line in answer.aiter_lines():
                if first is None and '"content":"' in line and '"content":""' not in line:
                    first = time.perf_counter() - started
    except httpx.HTTPError as error:
        phase.refused.append(type(error).__name__)
        return
    phase.first_ms.append((first or time.perf_counter() - started) * 1e3)


async def attack(url: str, *, seconds: float, unfinished: int) -> dict[str, int]:
    """Attacks a server for a while; how many hostile requests got which answer."""
    address, answers = urlsplit(url), dict[str, int]()
    stops = {"stop": [letter * 950_000 for letter in "abcd"], **_BODY, "stream": False, "max_tokens": 4}
    prompt = {**_BODY, "messages": [{"role": "user", "content": "once upon a time " * 211_000}], "stream": False}

    async def whole(body: bytes) -> None:
        while True:
            await _hostile(address.hostname, address.port, body, len(body), answers)

    async def unended() -> None:
        while True:
            await _hostile(address.hostname, address.port, b'{"messages": [', 1000, answers)
            await asyncio.sleep(_AGAIN_S)

    bodies = [json.dumps(body).encode() for body in (stops, prompt)]
    tasks = [asyncio.create_task(whole(body)) for body in bodies for _ in range(2)]
    tasks += [asyncio.create_task(unended()) for _ in range(unfinished)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def _hostile(host: str | None, port: int | None, body: bytes, announced: int, answers: dict[str, int]) -> None:
    """One request; its answer's status, or that there was none, is counted."""
    status = "none"
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {announced}\r\n\r\n"
            writer.write(head.encode() + body)
            line = await reader.readline()
            status = line.split()[1].decode() if line else status
        finally:
            writer.close()
    answers[status] = answers.get(status, 0) + 1


async def _attacked(url: str, pid: int, args: argparse.Namespace) -> Phase:
    command = [sys.executable, "-m", "edgeinfer.apps.bench.serve_attack", "--attack", url]
    command += ["--seconds", str(args.seconds), "--unfinished", str(args.unfinished)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attackers:
        assert attackers.stdout is not None
        attackers.stdout.readline()  # its start is no part of the attack
        phase = await measure(url, pid, clients=args.clients, seconds=args.seconds)
        told, _ = await asyncio.to_thread(attackers.communicate)
    print_table(
        Table("Answers to the attack", ["status", "requests"], [[s, str(n)] for s, n in json.loads(told).items()])
    )
    return phase


async def _afterwards(pid: int, seconds: float) -> Phase:
    phase = Phase()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(watch_memory(pid, phase.rss, _SAMPLE_S), seconds)
    return phase


def _show(phases: dict[str, dict[str, Any]]) -> None:
    header = ["", "replies", "refused", "first ms p50/p99/max", "memory at most", "at the end"]
    rows = []
    for name, figures in phases.items():
        times = " / ".join("-" if value is None else f"{value:.0f}" for value in figures["first_ms"].values())
        memory = [format_size(figures[f"rss_{when}_bytes"]) for when in ("most", "last")]
        rows.append([name, str(figures["replies"]), str(figures["refused"]), times, *memory])
    print_table(Table("A server under attack", header, rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve_attack", description=__doc__)
    parser.add_argument("--clients", type=int, default=4, help="ordinary ones")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--unfinished", type=int, default=290, help="bodies that are kept unfinished")
    parser.add_argument("--after", type=float, default=60.0, help="seconds that memory is watched afterwards")
    parser.add_argument("--attack", metavar="URL", help="attack a server, and measure nothing")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("server", nargs="*", help="options of edgeinfer serve, behind --")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where memory did not go back to its level."""
    args = _parser().parse_args(arguments)
    if args.attack is not None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        answers = asyncio.run(attack(args.attack, seconds=args.seconds, unfinished=args.unfinished))
        sys.stdout.write(json.dumps(answers) + "\n")
        return 0
    with running_server(args.server) as (url, pid):
        before = asyncio.run(measure(url, pid, clients=args.clients, seconds=args.seconds))
        during = asyncio.run(_attacked(url, pid, args))
        after = asyncio.run(_afterwards(pid, args.after))
        again = asyncio.run(measure(url, pid, clients=args.clients, seconds=args.seconds / 3))
    phases = {"undisturbed": before, "attacked": during, "afterwards": after, "undisturbed again": again}
    figures = {name: phase.figures() for name, phase in phases.items()}
    _show(figures)
    if args.out is not None:
        args.out.write_text(script_json("serve_attack", figures), "utf-8")
    level = figures["undisturbed"]["rss_most_bytes"] * _LEVEL
    return 1 if figures["afterwards"]["rss_last_bytes"] > level else 0


if __name__ == "__main__":
    sys.exit(main())
