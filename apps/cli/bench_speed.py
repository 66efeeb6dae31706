"""`edgeinfer bench speed`: prompts and replies in llama-bench's words; knows nothing of how they are timed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import numbers, require_place, write_text
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import progress_bar
from edgeinfer.apps.cli.parser import add_command, command_line

if TYPE_CHECKING:
    from edgeinfer.apps.bench.speed import SpeedConfig
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_speed_parser"]

_DESCRIPTION = """\
Time prompts and replies as llama-bench does, and in its words: pp512 takes in 512 tokens, tg128 decodes 128 plainly,
and "@ d4096" does so behind 4096 others. Tests take turns; the first visit to each warms up and is not counted.

examples:
  edgeinfer bench speed -m BUNDLE -t 1
  edgeinfer bench speed -m BUNDLE -p 512 -n 128 -pg 512,128 -d 0,2048 -o json
"""


def add_speed_parser(kinds: Subparsers) -> None:
    """Adds the benchmark."""
    parser = add_command(kinds, "speed", _execute, "prompts and replies, as llama-bench times them", _DESCRIPTION)
    add_load_options(parser)
    group = parser.add_argument_group("tests")
    text = "lengths of prompts, separated by commas; 0 for none (default: 512)"
    group.add_argument("-p", "--n-prompt", type=numbers, default=(512,), metavar="LIST", help=text)
    text = "lengths of replies; 0 for none (default: 128)"
    group.add_argument("-n", "--n-gen", type=numbers, default=(128,), metavar="LIST", help=text)
    text = "a prompt and a reply timed together; may be given several times"
    group.add_argument("-pg", dest="both", action="append", type=_pair, default=[], metavar="P,N", help=text)
    text = "tokens that are there before, in tests of their own each (default: 0)"
    group.add_argument("-d", "--n-depth", type=numbers, default=(0,), metavar="LIST", help=text)
    group.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="of each test (default: 5)")
    text = "md, csv, json or jsonl (default: md)"
    group.add_argument("-o", "--output", choices=("md", "csv", "json", "jsonl"), default="md", help=text)
    group.add_argument("--out", type=Path, metavar="FILE", help="write to a file instead of stdout")


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.speed import run_speed
    from edgeinfer.apps.bench.speed_report import speed_text

    config = _config(args)
    require_place(args.out)
    options = {"context": config.context} | load_options(args)
    with load_model(args.model, options) as model, progress_bar() as bar:

        def told(done: int, total: int) -> None:
            if bar:
                bar("timing", done, total)

        results = run_speed(model, config, told, command_line())
    text = speed_text(results, args.output)
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_text(args.out, text)
    return 0


def _config(args: argparse.Namespace) -> SpeedConfig:
    from edgeinfer.apps.bench.speed import SpeedConfig

    return SpeedConfig(args.n_prompt, args.n_gen, tuple(args.both), args.n_depth, args.repetitions)


def _pair(text: str) -> tuple[int, int]:
    prompt, reply = numbers(text)
    return prompt, reply
