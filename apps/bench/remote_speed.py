"""A model elsewhere: its pace over links of many kinds, many devices on one server, and whether all texts are its own.

    python -m edgeinfer.apps.bench.remote_speed --checkpoint CHECKPOINTS/tales --out docs/results/remote.json

Starts `edgeinfer serve`, which drafts nothing, in a process of its own; links are shaped in this one. Each cell of
`speed` alternates between drafts, the same server streaming over /v1/completions, and the larger model in this process.
`devices` are processes, one after the other with drafts and streaming; the server's processor time tells what passes
that it shares are worth, as devices take processors from it here. `texts` cuts connections at random, and compares each
reply with the model's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import edgeinfer
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.link import Link
from edgeinfer.apps.bench.model_files import BundleKind, TrainedArtifacts, default_folder
from edgeinfer.apps.bench.render import Table, print_table
from edgeinfer.apps.bench.serve_load import running_server
from edgeinfer.apps.bench.synthetic import find_shape
from edgeinfer.remote_options import RemoteApi
from edgeinfer.results import Result

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
SHAPE = "qwen2.5-0.5b"
_WAYS = ("drafts", "streams", "local")
_LIMIT_S = 600.0
# Tokens in which a governor learns what a way takes.
_LEARNING = 64


def measure_speed(
    server: str,
    drafter: str | None,
    large: edgeinfer.Model,
    *,
    links: Sequence[tuple[float, float]],
    tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """The pace of each way over each link, and what the link without delay foretells of it."""
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
    """Tokens a second of the better way, had each round and each stream taken the delay longer than without it."""
    further = (cell["rtt_ms"] - near["rtt_ms"]) / 1e3
    tokens = near["tokens_per_second"]["drafts"] * near["seconds"]["drafts"]
    drafting = near["seconds"]["drafts"] + further * near["rounds"] / near["replies"]
    return float(max(tokens / drafting, tokens / (near["seconds"]["streams"] + further)))


def measure_devices(
    server: str, process: int, drafter: str | None, *, counts: Sequence[int], tokens: int
) -> Iterator[dict[str, Any]]:
    """What so many devices together get, each with a prompt of its own, and what a token costs the server."""
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


def measure_texts(server: str, drafter: str | None, own: edgeinfer.Model, *, count: int, seed: int) -> dict[str, Any]:
    """Of so many replies, greedy and drawn in turns, over links that delay and cut at random, those that are the
    server's own.
    """
    draw, same, retries, rounds, streamed = random.Random(seed), 0, 0, 0, 0
    words = [word.strip(".") for prompt in PROMPTS for word in prompt.split()]
    for start in range(0, count, 10):
        # Within headers, within events, and later. More than six in a row would end the reply.
        cuts = iter([10_000 if at % 5 == 4 else draw.choice((0, 40, 300, 900, 2_500)) for at in range(60)])
        link = Link(
            int(server.rpartition(":")[2]), rtt_ms=draw.uniform(0, 20), mbits=draw.choice((1, 10, 100)), cuts=cuts
        )
        with link, edgeinfer.load(drafter, remote=link.url, remote_api="edgeinfer", threads=1) as model:
            for number in range(start, min(start + 10, count)):
                prompt = " ".join(draw.choices(words, k=draw.randrange(2, 12)))
                options: dict[str, Any] = {"max_tokens": draw.randrange(8, 64)}
                if number % 2:
                    options |= {"temperature": draw.uniform(0.5, 1.2), "seed": number}
                reply = model.generate(prompt, **options)
                same += reply.token_ids == own.generate(prompt, **options, speculation="off").token_ids
                if reply.remote is not None:
                    retries += reply.remote.retries
                    rounds, streamed = rounds + reply.remote.rounds, streamed + reply.remote.streamed
    return {"replies": count, "same": same, "sent_again": retries, "rounds": rounds, "streamed": streamed}


def links_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Tokens a second over each link, where they were measured."""
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


def company_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """What devices got together, where that was measured."""
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
    text = "the built-in model's checkpoint, which is expanded to the cost of a 0.5B as the server's model"
    parser.add_argument("--checkpoint", type=Path, help=text)
    parser.add_argument("--drafter", help="the devices'; the built-in one without it")
    parser.add_argument("--part", choices=("all", "speed", "devices", "texts"), default="all")
    parser.add_argument("--links", type=int, default=len(LINKS), help="how many of the links")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--count", type=int, default=200, help="replies of --part texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a text was not the server's."""
    args = _parser().parse_args(arguments)
    model, figures = args.model, dict[str, Any]()
    if args.checkpoint is not None:
        model = str(TrainedArtifacts(default_folder(), args.checkpoint, find_shape(SHAPE)).bundle(BundleKind()))
    chosen = ["-t", "1", "--speculation", "off", *([] if model is None else ["-m", model])]
    with running_server(chosen) as (url, process):
        if args.part in ("all", "devices"):
            measured = measure_devices(url, process, args.drafter, counts=args.devices, tokens=args.tokens)
            figures["devices"] = list(measured)
        if args.part in ("all", "speed", "texts"):
            with edgeinfer.load(model, threads=1, speculation="off") as large:
                if args.part == "texts":
                    figures |= measure_texts(url, args.drafter, large, count=args.count, seed=args.seed)
                else:
                    links, sizes = LINKS[: args.links], {"tokens": args.tokens, "repeats": args.repeats}
                    figures["cells"] = list(measure_speed(url, args.drafter, large, links=links, **sizes))
    for table in (*links_table(figures), *company_table(figures)):
        print_table(table)
    if args.part == "texts":
        print(figures)
    if args.out is not None:
        args.out.write_text(script_json("remote_speed", {"part": args.part, **figures}), "utf-8")
    return 1 if figures.get("same", 0) != figures.get("replies", 0) else 0


if __name__ == "__main__":
    sys.exit(main())
