"""`edgeinfer run`: one prompt, streamed text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.options import (
    add_generation_options,
    add_load_options,
    generation_options,
    load_model,
    load_options,
)
from edgeinfer.apps.cli.output import print_json, print_note
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.apps.cli.text_files import read_stream, read_text, utf8
from edgeinfer.apps.terminal.app import cancel_on_interrupt
from edgeinfer.config import format_size
from edgeinfer.errors import PromptError, UsageError

if TYPE_CHECKING:
    from edgeinfer import Result, TokenStream
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Continue a prompt and print the whole text as it is made; with --chat, answer it and print the answer.

examples:
  edgeinfer run -p "Once upon a time"
  edgeinfer run -m my-bundle -p "What is a quark?" --chat --memory 600MB
  cat notes.txt | edgeinfer run -m my-bundle -f - -n 200 --json
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "run", execute, "continue a prompt, or answer it", _DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a UTF-8 file; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    add_load_options(parser)
    add_generation_options(parser, max_tokens=128)
    add_json_option(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="print speed and memory on stderr at the end")


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    if args.system is not None and not args.chat:
        raise UsageError("--system is for chats.", "Add --chat.")
    system = None if args.system is None else utf8(args.system, "--system")
    options = generation_options(args)
    loading = load_options(args)
    prompt = _prompt(args)
    with load_model(args.model, loading) as model:
        source = model.chat(system=system) if args.chat else model
        stream = source.stream(prompt, **options)
        with stream, cancel_on_interrupt(stream) as interrupt:
            if args.json:
                stream.complete()
            else:
                _write(stream, after="" if args.chat else prompt)
            result = stream.result
            if not args.json:
                _write_others(result, after="" if args.chat else prompt)
    if args.json:
        print_json(result.to_dict())
    elif args.verbose or sys.stderr.isatty():
        print_note(_summary(result))
    return 130 if interrupt.pressed else 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return utf8(args.prompt, "--prompt")
    if args.file == "-":
        if sys.stdin is None:
            raise PromptError("stdin is closed.", "Pipe the prompt into it, or name a file.")
        return read_stream(sys.stdin.buffer, "stdin")
    return read_text(Path(args.file))


def _write(stream: TokenStream, after: str) -> None:
    """Writes the reply after the prompt that it continues, so that both read as one text."""
    sys.stdout.write(after)
    last = after
    for chunk in stream:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        last = chunk.text or last
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _lossy(result: Result) -> str:
    """Says what was left out of the reply, if anything."""
    use = result.compute
    if use is None or use.lossless:
        return ""
    what = f"{use.reduced / use.tokens:.0%} of them by {use.compute}"
    measured = "" if use.divergence is None else f", {use.divergence:.3f} nats from the whole model"
    return f", lossy ({what}{measured})"


def _write_others(result: Result, after: str) -> None:
    """Writes the samples that are not the reply, where several were asked for."""
    samples = result.search.texts if result.search is not None and result.search.search == "samples" else ()
    for number, sample in enumerate(samples[1:], 2):
        print(f"\n[sample {number}]\n{after}{sample.text.rstrip()}")


def _summary(result: Result) -> str:
    drafting = result.speculation
    lossy = _lossy(result)
    drafts = f", {drafting.mean_accepted_length:.1f} tokens per pass" if drafting.rounds else ""
    return (
        f"{result.usage.completion_tokens} tokens, {result.timings.tokens_per_second:.1f} tok/s{drafts}{lossy}, "
        f"first token after {result.timings.ttft_ms:.0f} ms, peak memory {format_size(result.memory.peak_rss_bytes)}"
    )
