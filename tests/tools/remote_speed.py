"""Remote verification: speed over links of many kinds, and of many devices on one server.

    python -m tests.tools.remote_speed -m EXPANDED --out docs/results/remote.json

Starts `edgeinfer serve`, which drafts nothing, in a process of its own; links are simulated in this one. `speed`
alternates between drafts, the same server streaming over /v1/completions, and the larger model in this process.
`devices` are processes that draft and then stream; the server's processor time shows the gain of shared passes, as the
devices use processors of this machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import edgeinfer
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import RemoteApi
from edgeinfer.core.results import Result
from tests.tools.figures import script_json
from tests.tools.link import Link

PROMPTS = (
    "Once upon a time there was a little dog named Spot.",
    "Lily and Tom went to the park.",
    "The old tree was sad because",
    "One day, a girl found a red ball.",
    "Mom said to Ben that it was time to",
)
# Round trips in milliseconds, and millions of bits in a second.
LINKS = (
    *((rtt, 100.0) for rtt in (0.0, 1.0, 5.0, 20.0, 50.0, 200.0)),
    *((5.0, rate) for rate in (1.0, 10.0)),
    (50.0, 1.0),
)
_WAYS = ("drafts", "streams", "local")
_LIMIT_S = 600.0
# Tokens in which the costs of a way are learnt.
_LEARNING = 64


@contextmanager
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


def measure_speed(
    server: str,
    drafter: str | None,
    large: edgeinfer.Model,
    *,
    links: Sequence[tuple[float, float]],
    tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """The speed of each way over each link, and the speed predicted from the first link."""
    before: dict[str, Any] | None = None
    for rtt, rate in links:
        with ExitStack() as stack:
            link = stack.enter_context(Link(int(server.rpartition(":")[2]), rtt_ms=rtt, mbits=rate))
            drafts = stack.enter_context(edgeinfer.load(drafter, remote=link.url, threads=1))
            streams = stack.enter_context(edgeinfer.load(drafter, remote=link.url, remote_api="openai", threads=1))
            models = {"drafts": drafts, "streams": streams, "local": large}
            seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
            replies: list[Result] = []
            for model in (drafts, streams):
                _timed(model, PROMPTS[0], max(tokens, _LEARNING))
            for repeat in range(repeats):
                for way in _WAYS[repeat % 3 :] + _WAYS[: repeat % 3]:
                    took, result = _timed(models[way], PROMPTS[1 + repeat % (len(PROMPTS) - 1)], tokens)
                    seconds[way].append(took)
                    if way == "drafts":
                        replies.append(result)
        figures = _cell(rtt, rate, tokens, seconds, replies)
        before = before or figures
        yield figures | {"predicted": _predicted(before, figures)}


def _timed(model: edgeinfer.Model, prompt: str, tokens: int) -> tuple[float, Result]:
    started = time.perf_counter()
    result = model.generate(prompt, max_tokens=tokens, ignore_eos=True, speculation="off")
    return time.perf_counter() - started, result


def _cell(
    rtt: float, rate: float, tokens: int, seconds: dict[str, list[float]], replies: Sequence[Result]
) -> dict[str, Any]:
    uses = [reply.remote for reply in replies if reply.remote is not None]
    rounds = sum(use.rounds for use in uses)
    return {
        "rtt_ms": rtt,
        "mbits": rate,
        "tokens_per_second": {way: tokens / median(taken) for way, taken in seconds.items()},
        # Runs of a repeat lie side by side in time, so other work disturbs a ratio less.
        "drafts_to_streams": median(b / a for a, b in zip(seconds["drafts"], seconds["streams"], strict=True)),
        "drafts_to_local": median(b / a for a, b in zip(seconds["drafts"], seconds["local"], strict=True)),
        "rounds": rounds,
        "drafted": sum(use.drafted for use in uses),
        "accepted": sum(use.accepted for use in uses),
        "streamed": sum(use.streamed for use in uses),
        "replies": len(uses),
        "seconds": {way: median(taken) for way, taken in seconds.items()},
    }


def _predicted(near: dict[str, Any], cell: dict[str, Any]) -> float:
    """Tokens per second of the better way, if each round and each stream takes the further delay."""
    further = (cell["rtt_ms"] - near["rtt_ms"]) / 1e3
    tokens = near["tokens_per_second"]["drafts"] * near["seconds"]["drafts"]
    drafting = near["seconds"]["drafts"] + further * near["rounds"] / near["replies"]
    return float(max(tokens / drafting, tokens / (near["seconds"]["streams"] + further)))


def measure_devices(
    server: str, process: int, drafter: str | None, *, counts: Sequence[int], tokens: int
) -> Iterator[dict[str, Any]]:
    """Tokens per second of several devices, each with its own prompt, and the server's processor time per token."""
    context, watched = multiprocessing.get_context("spawn"), psutil.Process(process)
    ways: tuple[tuple[str, RemoteApi], ...] = (("drafts", "edgeinfer"), ("streams", "openai"))
    for way, api in ways:
        for count in counts:
            together = context.Barrier(count + 1)
            given = [(server, api, drafter, number, tokens, together) for number in range(count)]
            devices = [context.Process(target=_device, args=each, daemon=True) for each in given]
            for device in devices:
                device.start()
            together.wait(_LIMIT_S)
            started, before = time.perf_counter(), watched.cpu_times()
            together.wait(_LIMIT_S)
            seconds, after = time.perf_counter() - started, watched.cpu_times()
            for device in devices:
                device.join(_LIMIT_S)
            spent = after.user - before.user + after.system - before.system
            figures = {
                "tokens_per_second": count * tokens / seconds,
                "server_ms_per_token": spent * 1e3 / tokens / count,
            }
            yield {"way": way, "devices": count, **figures}


def _device(server: str, api: RemoteApi, drafter: str | None, number: int, tokens: int, together: Barrier) -> None:
    """One device, in a process of its own."""
    with edgeinfer.load(drafter, remote=server, remote_api=api, threads=1, remember=False) as model:
        _timed(model, PROMPTS[0], 2 * _LEARNING)
        together.wait(_LIMIT_S)
        _timed(model, f"{PROMPTS[number % len(PROMPTS)]} {number}", tokens)
        together.wait(_LIMIT_S)


def links_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Tokens per second over each link, if measured."""
    header = ["RTT ms", "Mbit/s", *_WAYS, "predicted", "to streams", "to local", "accepted"]
    rows = [
        [
            f"{cell['rtt_ms']:g}",
            f"{cell['mbits']:g}",
            *(f"{cell['tokens_per_second'][way]:.1f}" for way in _WAYS),
            f"{cell['predicted']:.1f}",
            f"{cell['drafts_to_streams']:.2f}",
            f"{cell['drafts_to_local']:.2f}",
            f"{cell['accepted']}/{cell['drafted']}",
        ]
        for cell in figures.get("cells", ())
    ]
    if rows:
        yield Table("Tokens a second", header, rows)


def devices_together(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Speed of several devices, if measured."""
    header = ["devices", "way", "tokens/s", "server's processor, ms a token"]
    rows = [
        [str(row["devices"]), row["way"], f"{row['tokens_per_second']:.1f}", f"{row['server_ms_per_token']:.2f}"]
        for row in figures.get("devices", ())
    ]
    if rows:
        yield Table("Devices together", header, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="remote_speed", description=__doc__)
    parser.add_argument("-m", "--model", help="the server's; the built-in one without it")
    parser.add_argument("--drafter", help="the devices'; the built-in one without it")
    parser.add_argument("--part", choices=("all", "speed", "devices"), default="all")
    parser.add_argument("--links", type=int, default=len(LINKS), help="how many of the links")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    model, figures = args.model, dict[str, Any]()
    chosen = ["-t", "1", "--speculation", "off", *([] if model is None else ["-m", model])]
    with running_server(chosen) as (url, process):
        if args.part in ("all", "devices"):
            measured = measure_devices(url, process, args.drafter, counts=args.devices, tokens=args.tokens)
            figures["devices"] = list(measured)
        if args.part in ("all", "speed"):
            with edgeinfer.load(model, threads=1, speculation="off") as large:
                links, sizes = LINKS[: args.links], {"tokens": args.tokens, "repeats": args.repeats}
                figures["cells"] = list(measure_speed(url, args.drafter, large, links=links, **sizes))
    for table in (*links_table(figures), *devices_together(figures)):
        print_table(table)
    if args.out is not None:
        args.out.write_text(script_json("remote_speed", {"part": args.part, **figures}), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
