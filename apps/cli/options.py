"""Options that several commands share, and their way into keyword arguments and a loaded model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.adaptive import COMPUTES, SKIP_CACHES, ComputeOptions
from edgeinfer.apps.cli.output import progress_bar
from edgeinfer.apps.cli.text_files import utf8
from edgeinfer.config import (
    COUNTED,
    DRAFTERS,
    KV_TYPES,
    OVERFLOWS,
    VERIFICATIONS,
    WEIGHTS_MODES,
    GenerationConfig,
    LoadConfig,
    parse_size,
)
from edgeinfer.searching import ANSWERS, SEARCHES, SearchOptions

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser

    Subparsers = argparse._SubParsersAction["Parser"]
    from edgeinfer import Model

__all__ = [
    "PLANNED",
    "add_device_option",
    "add_drafting_options",
    "add_generation_options",
    "add_load_options",
    "add_memory_options",
    "add_model_option",
    "add_native_option",
    "generation_options",
    "load_model",
    "load_options",
]


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
    _add_compute_options(parser)
    _add_search_options(parser)


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


def _add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ComputeOptions, by its names."""
    group = parser.add_argument_group("less compute (lossy)")
    text = (
        "how much of the model each token takes: all of it; entropy: the draft model writes where the text is easy; "
        "unified, calibrated, importance, routers: some layers are skipped; exit: sure tokens leave (default: full)"
    )
    group.add_argument("--compute", choices=COMPUTES, help=text)
    text = "how many times faster a pass with skipped layers is to be (default: 1.5)"
    group.add_argument("--compute-speedup", type=float, metavar="X", help=text)
    text = "share of tokens that the large model makes, of --compute entropy (default: 0.5)"
    group.add_argument("--compute-share", type=float, metavar="X", help=text)
    text = "bits of entropy above which it makes them (default: what gives that share)"
    group.add_argument("--entropy-threshold", type=float, metavar="BITS", help=text)
    text = "tokens that a model makes at least before the other one takes over (default: 4)"
    group.add_argument("--entropy-stay", type=int, metavar="N", help=text)
    text = "layers after which a pass may be left (default: the bundle's, or two thirds)"
    group.add_argument("--exit-layer", type=int, metavar="N", help=text)
    text = "probability from which on the first layers are believed (default: 0.9)"
    group.add_argument("--exit-confidence", type=float, metavar="P", help=text)
    text = "deeper layers run later for tokens that left, or take keys and values of the layer below (default: exact)"
    group.add_argument("--skip-cache", choices=SKIP_CACHES, help=text)
    text = "leave nothing more out where predictions diverge this far from the whole model's (default: not checked)"
    group.add_argument("--quality-floor", type=float, metavar="NATS", help=text)


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of SearchOptions, by its names."""
    group = parser.add_argument_group("search")
    text = (
        "samples: several replies side by side; first-finish, vote: of several the first to end, or the commonest; "
        "cautious, lookahead, contrast: more care where the next token is uncertain; momentum: resist repetition; "
        "beam: beam search. All are lossy but samples (default: off)"
    )
    group.add_argument("--search", choices=SEARCHES, help=text)
    text = "replies drawn by samples, first-finish and vote (default: 4)"
    group.add_argument("--samples", type=int, metavar="N", help=text)
    text = "what of a reply vote counts: the text, its last line, its last number (default: text)"
    group.add_argument("--answer", choices=ANSWERS, help=text)
    group.add_argument("--beams", type=int, metavar="N", help="beginnings that beam keeps (default: 4)")
    text = "groups of beams that avoid each other's tokens (default: 1)"
    group.add_argument("--beam-groups", type=int, metavar="N", help=text)
    text = "log-probability a token loses for each earlier group that chose it (default: 0.5)"
    group.add_argument("--diversity", type=float, metavar="X", help=text)
    text = "beam compares log-probability / length to the power of X (default: 1)"
    group.add_argument("--length-penalty", type=float, metavar="X", help=text)
    group.add_argument("--look-ahead", type=int, metavar="N", help="tokens that lookahead looks ahead (default: 5)")
    text = "tokens that lookahead and momentum choose among (default: 3 and 5)"
    group.add_argument("--candidates", type=int, metavar="N", help=text)
    text = "entropy in nats above which lookahead and contrast take care (default: 1.5)"
    group.add_argument("--uncertainty", type=float, metavar="X", help=text)
    text = "of contrast: a worse prompt, whose reply is to be avoided"
    group.add_argument("--lame-prompt", metavar="TEXT", help=text)
    text = "how far contrast moves away from it (default: 0.5)"
    group.add_argument("--contrast-strength", type=float, metavar="X", help=text)
    text = "what momentum takes off for repeating 1, 2, ... tokens, with commas (default: 0,0,0,5)"
    group.add_argument("--resistance", type=_numbers, metavar="X,X", help=text)
    text = "by which momentum multiplies it (default: 0.2)"
    group.add_argument("--resistance-weight", type=float, metavar="X", help=text)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def load_model(model: str | None, options: Mapping[str, Any]) -> Model:
    """Loads a model; a bar shows when its weights have to be converted first. Errors as `edgeinfer.load`."""
    with progress_bar() as progress:
        shown: dict[str, Any] = {} if progress is None else {"progress": progress}
        return edgeinfer.load(model, **options, **shown)
