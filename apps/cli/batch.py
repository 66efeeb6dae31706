"""`edgeinfer batch`: answers a file of requests, several at once, and resumes after a kill."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.inputs import prepared
from edgeinfer.apps.cli.options import add_load_options, add_options, given_options, load_options
from edgeinfer.apps.cli.output import print_json, print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.reply import ReplyOptions

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers
    from edgeinfer.tools.batch import BatchInput


_DESCRIPTION = """\
Answer a file of requests, one JSON object a line, and write a line for each in the same order. A line is a request of
OpenAI's batch API (custom_id, method, url, body), or its body alone: {"messages": [...]} is answered, {"prompt": "..."}
continued. Requests share passes of the model; what their prompts begin with in common is evaluated once.

A run that was killed or interrupted goes on where it was when the same command is given again. A line that cannot be
answered gets one that says why.

example:
  edgeinfer batch prompts.jsonl -o replies.jsonl -m qwen2.5-0.5b -n 256
"""
# Defaults for fields that requests leave out.
_DEFAULTS = ("max_tokens", "temperature")
# Invalid lines listed on stderr.
_MOST_SHOWN = 10


def add_batch(commands: Subparsers) -> None:
    parser = add_command(commands, "batch", execute, _DESCRIPTION)
    group = parser.add_argument_group("batch")
    group.add_argument("requests", type=Path, metavar="FILE", help="requests, one JSON object a line")
    text = "file for the replies; FILE.partial holds them until all are there"
    group.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help=text)
    text = "number of replies made at once, if --memory has room for them (default: 8)"
    group.add_argument("--parallel", type=int, default=8, metavar="N", help=text)
    group.add_argument("--force", action="store_true", help="replace the output of a former run")
    add_load_options(parser)
    help = {
        "max_tokens": "maximum number of tokens of replies whose requests do not say it",
        "temperature": "sampling temperature of replies whose requests do not say it (default: the model's, or 0)",
    }
    add_options(parser, ReplyOptions, _DEFAULTS, help=help)
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    # Here, to keep --help fast.
    from edgeinfer.apps.server.host import load_with_room
    from edgeinfer.tools.batch import BatchInput, answer_batch

    if args.parallel < 1:
        raise UsageError(f"--parallel {args.parallel} is out of range.", "Give 1 or more.")
    loading = load_options(args)
    defaults = given_options(args, _DEFAULTS)
    ReplyOptions.of(**defaults)
    requests = BatchInput.open(args.requests)
    _check_output(args.requests, args.output, replaces=args.force)
    _tell_damaged(requests)
    name, loading = prepared(args.model, loading)
    with progress_bar() as progress:
        loaded = load_with_room(name, loading, args.parallel, progress)
    with loaded as model, progress_bar() as progress, _reporting(args.output, requests):
        parallel = model.plan.parallel
        summary = answer_batch(model, requests, args.output, parallel=parallel, defaults=defaults, progress=progress)
    if args.json:
        print_json(summary.to_dict())
    failed = f", {summary.failed} of them errors" if summary.failed else ""
    resumed = f", {summary.resumed} of them by former runs" if summary.resumed else ""
    print_note(f"{summary.requests} replies in {args.output}{failed}{resumed}, after {summary.seconds:.1f} s")
    return 0


def _check_output(requests: Path, output: Path, *, replaces: bool) -> None:
    from edgeinfer.tools.batch import ReplyFile

    partial = ReplyFile.partial_of(output)
    if requests.resolve() in (output.resolve(), partial.resolve()) or (output.exists() and requests.samefile(output)):
        raise UsageError("The replies would overwrite the requests.", "Choose another file for -o.")
    if output.is_dir() or not output.parent.is_dir():
        raise StorageError(f"{output} cannot be written.", "Name a file in a folder that exists.")
    # If the partial file exists too, a run was killed just after it had finished the output.
    if output.exists() and not partial.exists() and not replaces:
        raise UsageError(f"{output} exists already.", "Choose another file for -o, or add --force to replace it.")


def _tell_damaged(requests: BatchInput) -> None:
    damaged = [line for line in requests.lines if line.error is not None]
    for line in damaged[:_MOST_SHOWN]:
        print_note(f"Line {line.number}: {line.error}")
    if len(damaged) > _MOST_SHOWN:
        print_note(f"{len(damaged) - _MOST_SHOWN} more lines hold no request; theirs in the output say why.")


@contextmanager
def _reporting(output: Path, requests: BatchInput) -> Iterator[None]:
    """Report what an unfinished run keeps."""
    from edgeinfer.tools.batch import ReplyFile

    try:
        yield
    except UsageError:  # raised before the first reply
        raise
    except BaseException:
        partial = ReplyFile.partial_of(output)
        if partial.exists():
            kept = f"Of {len(requests.lines)} replies, {partial} keeps those that are done"
            print_note(f"{kept}; the same command goes on from there.")
        raise
