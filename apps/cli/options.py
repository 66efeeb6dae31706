"""Options that several subcommands share, and their way into keyword arguments; knows nothing of any one command."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.apps.cli.compute_options import add_compute_options
from edgeinfer.apps.cli.search_options import add_search_options
from edgeinfer.config import (
    COUNTED,
    DRAFTERS,
    KV_TYPES,
    OVERFLOWS,
    VERIFICATIONS,
    WEIGHTS_MODES,
    GenerationConfig,
    LoadConfig,
    format_size,
    parse_size,
)
from edgeinfer.errors import PromptError, UsageError
from edgeinfer.searching import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    Subparsers = argparse._SubParsersAction["Parser"]

__all__ = [
    "PLANNED",
    "Parser",
    "add_command",
    "add_device_option",
    "add_drafting_options",
    "add_generation_options",
    "add_json_option",
    "add_load_options",
    "add_model_option",
    "add_native_option",
    "command_line",
    "generation_options",
    "load_options",
    "read_paragraphs",
    "read_stream",
    "read_text",
    "utf8",
]

# The longest contexts, ten million tokens, hold less text.
_MOST_PROMPT_BYTES = 64 * 1000**2


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one UsageError instead of a page and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", f"See: {self.prog} --help")


def add_command(
    commands: Subparsers, name: str, execute: Callable[[argparse.Namespace], int], help: str, description: str
) -> Parser:
    """Adds a subcommand; its description ends in an example and is shown as written."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, description=description, formatter_class=layout, allow_abbrev=False)
    parser.set_defaults(execute=execute)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_json_option(parser: Parser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def add_model_option(parser: Parser) -> None:
    """Adds -m."""
    text = (
        "bundle directory, .gguf file, or hub id: ORG/NAME, of a repository of GGUF files ORG/NAME:TYPE (default: the "
        "small built-in story model)"
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help=text)


def add_memory_options(parser: argparse._ArgumentGroup | Parser) -> None:
    """Adds --memory, -c and what else decides how much a model takes."""
    text = "the whole process must stay within this, such as 600MB or 1.5GiB (default: no limit)"
    parser.add_argument("--memory", type=parse_size, metavar="SIZE", help=text)
    text = "room for prompt and reply together, in tokens (default: 2048, or less if model or memory have less)"
    parser.add_argument("-c", "--context", type=int, metavar="N", help=text)
    text = (
        "numbers of the cache: float32, int8, int4, of GGUF models float16, q8_0, q4_0; 8 and 4 bits are lossy "
        "(default: floats, or 8 bits where memory is short)"
    )
    parser.add_argument("--kv", choices=KV_TYPES, help=text)
    text = "when a conversation outgrows the context: stop, or forget some of it, which is lossy (default: stop)"
    parser.add_argument("--overflow", choices=OVERFLOWS, help=text)
    text = (
        "packed into memory, mapped from their file, experts mapped until they are chosen, or streamed a few layers "
        "at a time (default: fastest that fits)"
    )
    parser.add_argument("--weights", choices=WEIGHTS_MODES, help=text)
    text = "experts of the model that may be in memory at once, such as 200MB (default: all, or what fits)"
    parser.add_argument("--expert-memory", type=parse_size, metavar="SIZE", help=text)
    text = "what counts against --memory: resident pages, or only those without a file behind them (default: resident)"
    parser.add_argument("--counted", choices=COUNTED, help=text)
    text = "prompt tokens per pass (default: 64, or fewer where memory is short)"
    parser.add_argument("--prefill-chunk", type=int, metavar="N", help=text)
    text = "settings that edgeinfer tune --out wrote to FILE, or off (default: those that edgeinfer tune kept, if any)"
    parser.add_argument("--profile", metavar="FILE|off", help=text)
    text = "memory for conversations other than the current one, such as 50MB (default: none)"
    parser.add_argument("--prefix-cache", type=parse_size, metavar="SIZE", help=text)


def add_device_option(parser: argparse._ArgumentGroup | Parser) -> None:
    """Adds --device."""
    text = "where the model runs: auto, or one that `edgeinfer devices` lists, such as openvino:NPU (default: auto)"
    parser.add_argument("--device", metavar="NAME", help=text)


def add_native_option(parser: argparse._ArgumentGroup | Parser) -> None:
    """Adds --no-native."""
    text = "run on onnxruntime's own operators instead of the native kernel; slower"
    parser.add_argument("--no-native", action="store_true", help=text)


def add_load_options(parser: Parser) -> None:
    """Adds the options of LoadConfig."""
    add_model_option(parser)
    group = parser.add_argument_group("resources")
    add_memory_options(group)
    group.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    text = "skip the padding that makes text independent of how it was computed; up to 20%% faster on some models"
    group.add_argument("--no-exact", action="store_true", help=text)
    group.add_argument("--backend", metavar="NAME", help="engine that runs the model (default: the bundle's own)")
    add_native_option(group)
    add_device_option(group)
    add_drafting_options(parser)


def add_drafting_options(parser: Parser) -> None:
    """Adds the options of LoadConfig about speculation."""
    group = parser.add_argument_group("drafting ahead (the text stays the same)")
    text = (
        f"auto: draft tokens ahead where that is faster; off; or drafters such as copy,recycle: {', '.join(DRAFTERS)}"
    )
    group.add_argument("--spec", dest="speculation", metavar="WHO", help=text)
    text = "a small model with the same tokenizer that drafts: bundle directory or hub id; off: not the model's own"
    group.add_argument("--draft-model", metavar="MODEL", help=text)
    text = "tokens in a draft at most (default: 15, or fewer where memory is short)"
    group.add_argument("--spec-draft-n-max", dest="draft_max", type=int, metavar="N", help=text)
    text = "experts per token where the model itself drafts with fewer (default: half of its own number)"
    group.add_argument("--draft-experts", type=int, metavar="N", help=text)
    text = "keep nothing of what drafters learn from your texts (token ids and counts) for the next session"
    group.add_argument("--no-remember", action="store_true", help=text)


PLANNED = (
    "memory",
    "context",
    "kv",
    "overflow",
    "weights",
    "expert_memory",
    "counted",
    "prefill_chunk",
    "prefix_cache",
    "profile",
    "device",
    "speculation",
    "draft_model",
    "draft_max",
    "draft_experts",
)
_LOADING = (*PLANNED, "threads", "backend")


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of edgeinfer.load that the user gave, checked before anything is loaded.

    Raises:
        UsageError: a value is out of range.
    """
    given = {name: getattr(args, name) for name in _LOADING}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"exact": False} if args.no_exact else {}
    options |= {"native": False} if args.no_native else {}
    options |= {"remember": False} if args.no_remember else {}
    LoadConfig(**options)
    return options


def add_generation_options(parser: Parser, max_tokens: int | None) -> None:
    """Adds the options of GenerationConfig; each is None when absent, so that defaults stay with the model."""
    group = parser.add_argument_group("text")
    limit = "until the context is full" if max_tokens is None else str(max_tokens)
    text = f"most tokens to generate (default: {limit})"
    group.add_argument("-n", "--max-tokens", type=int, default=max_tokens, metavar="N", help=text)
    text = "0 takes the likeliest token each time; 0.7 is lively, above 1 is wild (default: 0)"
    group.add_argument("--temp", "--temperature", dest="temperature", type=float, metavar="T", help=text)
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens only")
    text = "choose among the likeliest tokens that together have probability P"
    group.add_argument("--top-p", type=float, metavar="P", help=text)
    text = "drop tokens less likely than P times the likeliest"
    group.add_argument("--min-p", type=float, metavar="P", help=text)
    text = "above 1 makes tokens that occurred less likely"
    group.add_argument("--repeat-penalty", dest="repetition_penalty", type=float, metavar="X", help=text)
    text = "subtract X from a token's score for each time it occurred in the reply"
    group.add_argument("--frequency-penalty", type=float, metavar="X", help=text)
    text = "subtract X once from the score of every token that occurred in the reply"
    group.add_argument("--presence-penalty", type=float, metavar="X", help=text)
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)")
    text = "end the reply before this text; may be given several times"
    group.add_argument("--stop", action="append", metavar="TEXT", help=text)
    text = "keyed: the text of plain decoding; rejection, k-seq: its distribution; typical: lossy (default: keyed)"
    group.add_argument("--spec-verify", dest="verification", choices=VERIFICATIONS, help=text)
    text = "guesses per drafter and place; above 1 drafts are trees (default: 1)"
    group.add_argument("--spec-tree-width", dest="draft_width", type=int, metavar="N", help=text)
    text = "the reply must be one of the texts given by this option; may be given several times"
    group.add_argument("--choice", dest="choices", action="append", metavar="TEXT", help=text)
    text = "special tokens spelled out in the prompt become those tokens (default: of -p and -f, not of chats)"
    group.add_argument("--parse-special", action=argparse.BooleanOptionalAction, help=text)
    add_compute_options(parser)
    add_search_options(parser)


_GENERATION = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "speculation",
    "draft_width",
    "verification",
    "choices",
    "parse_special",
    *(f.name for f in (*fields(ComputeOptions), *fields(SearchOptions))),
)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Generation options that the user gave, checked before anything is loaded.

    Raises:
        UsageError: a value is out of range.
        PromptError: a stop string is not UTF-8.
    """
    options = {name: getattr(args, name) for name in _GENERATION if getattr(args, name) is not None}
    if "stop" in options:
        options["stop"] = tuple(utf8(text, "--stop") for text in options["stop"])
    if "choices" in options:
        options["choices"] = tuple(utf8(text, "--choice") for text in options["choices"])
    GenerationConfig(**options)
    return options


def command_line() -> str:
    """The running command as a shell takes it, for figures that are to be had again."""
    return shlex.join(["edgeinfer", *sys.argv[1:]])


def utf8(text: str, source: str) -> str:
    """`text`, if the bytes it came from were UTF-8; Python hides others in surrogates.

    Raises:
        PromptError: they were not.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{source} is not UTF-8 text.", "Convert it, for example with iconv -t UTF-8.") from error
    return text


def read_text(path: Path) -> str:
    """A UTF-8 file without a byte order mark and without the newline that editors put at its end.

    Raises:
        PromptError: it cannot be read, or is not UTF-8.
    """
    try:
        # A pipe that nobody writes into is empty, where opening it as usual would wait for somebody.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(handle, True)
            return read_stream(file, str(path))
    except OSError as error:
        raise PromptError(f"Cannot read {path}: {error.strerror}.", "Give an existing text file.") from error


def read_paragraphs(path: Path) -> list[str]:
    """The paragraphs of a text file, which empty lines part.

    Raises:
        PromptError: as `read_text`, or there is no text in it.
    """
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", read_text(path)) if p.strip()]
    if not paragraphs:
        raise PromptError(f"{path} has no text.", "Give a file with some paragraphs.")
    return paragraphs


def read_stream(file: BinaryIO, source: str) -> str:
    """The text of an open file, as `read_text`; `source` names it."""
    data = file.read(_MOST_PROMPT_BYTES + 1)
    if len(data) > _MOST_PROMPT_BYTES:
        raise PromptError(f"{source} is larger than {format_size(_MOST_PROMPT_BYTES)}.", "Shorten the prompt.")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        hint = "Convert it, for example with iconv -t UTF-8."
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start}).", hint) from error
