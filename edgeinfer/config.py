"""What a caller may ask for: how a model is loaded and how it generates, validated on construction."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, get_args

from edgeinfer.adapting import LoadAdapters, ReplyAdapter
from edgeinfer.adaptive import ComputeOptions, ReducedCompute
from edgeinfer.device_options import DeviceOptions, LoadReplies
from edgeinfer.drafting import (
    DRAFTING_GROUP,
    SPECULATION,
    LoadDrafting,
    ReplyDrafting,
    Speculation,
    check_drafters,
    drafters_in,
)
from edgeinfer.errors import Setting, UsageError, one_of, shown
from edgeinfer.methods import DeclaredMethod, check_method_options, find_method
from edgeinfer.option_groups import OptionGroup, flat_options, require_known
from edgeinfer.options import LARGEST_COUNT, check_options, option, options_of, require, require_alone
from edgeinfer.records import dataclass
from edgeinfer.remote_options import RemoteOptions
from edgeinfer.reply_options import ReplyOptions, Sampling
from edgeinfer.searching import Search, SearchOptions

# Bits of a quantized weight, of a float, and what a checkpoint is converted to.
BITS, FLOAT_BITS = (2, 3, 4, 8), 32
CONVERTED_BITS = (*BITS, FLOAT_BITS)
# How the KV cache stores numbers; edgeinfer/bundle/geometry.py describes them.
KvType = Literal["float32", "int8", "int4", "float16", "q8_0", "q4_0"]
ONNX_KV_TYPES: tuple[KvType, ...] = ("float32", "float16", "int8", "int4")
KV_TYPES: tuple[str, ...] = get_args(KvType)
# What happens when a conversation outgrows the context (runtime/kv_cache/context_shift). All but "stop" are lossy.
OverflowPolicy = Literal["stop", "window", "merge", "cluster", "auto"]
OVERFLOWS: tuple[str, ...] = get_args(OverflowPolicy)
# Of them, those that let a row stand for several tokens.
MERGING = ("merge", "cluster")
# Where the weights are while a model runs: packed into memory, mapped from a file, mapped but for experts that wait to
# be chosen, or dropped behind each pass.
WeightsMode = Literal["packed", "mapped", "experts", "streamed"]
WEIGHTS_MODES: tuple[str, ...] = get_args(WeightsMode)
# Which pages count against a budget: all that are resident, or those without a file behind them.
CountedPages = Literal["resident", "anonymous"]
COUNTED: tuple[str, ...] = get_args(CountedPages)
_UNITS = {"": 1, "B": 1, "K": 1000, "KB": 1000, "M": 1000**2, "MB": 1000**2, "G": 1000**3, "GB": 1000**3}
_UNITS |= {"T": 1000**4, "TB": 1000**4, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Bytes of a size such as ``600MB``, ``1.5GiB`` or ``400000000``."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{value!r} is not a size.", "Write it like 600MB or 1.5GiB.")
    # Python writes no integers of thousands of digits.
    match = _SIZE.fullmatch(value if isinstance(value, str) else str(min(max(value, 0), _LARGEST_SIZE + 1)))
    unit = match and _UNITS.get(match.group(2).upper())
    size = float(match.group(1)) * unit if match and unit else 0.0
    if not 0 < round(min(size, 2 * _LARGEST_SIZE)) <= _LARGEST_SIZE:
        raise UsageError(f"{shown(value)} is not a positive size.", "Write it like 600MB or 1.5GiB.")
    return round(size)


def format_size(size: int, *, up: bool = False) -> str:
    """A size in bytes as people read it, in decimal units: ``412.3 MB``."""
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(size) >= factor:
            return f"{math.ceil(size * 10 / factor) / 10 if up else size / factor:.1f} {unit}"
    return f"{size} B"


_LARGEST_SIZE = 2**63 - 1
# Nothing that a size limits fits into less.
_SMALLEST_SIZE = 100_000
# The heading of help.
_RESOURCES = "resources"


# The size of the prefix cache, which callers may write as a text.
_PREFIX_CACHE: dict[str, Any] = {
    "help": "memory for the KV caches of other conversations, such as 50MB (default: none)",
    "low": 0,
    "high": _LARGEST_SIZE,
    "cli": "--prefix-cache",
    "metavar": "SIZE",
    "group": _RESOURCES,
    "size": True,
}


def _size_in_earnest(name: str, value: int | str) -> int:
    """Bytes of a size. A small number without a unit is a mistake: 400 is surely meant to be 400MB."""
    size = parse_size(value)
    if size < _SMALLEST_SIZE and str(value).strip().isdigit():
        raise UsageError(Setting(name, size) + f" means {size} bytes.", f"Did you mean {size}MB?")
    return size


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV cache."""

    # Floats are float32, of GGUF models float16; where the budget needs it, float16 and int8, or q8_0.
    kv: KvType | None = option(
        None,
        help="KV cache data type: float32, float16, int8 or int4, for GGUF models float32, float16, q8_0 or q4_0; 8 "
        "and 4 bits are lossy (default: floats, or 8 bits if memory is short)",
        choices=KV_TYPES,
        cli="--kv",
        group=_RESOURCES,
    )
    overflow: OverflowPolicy = option(
        "stop",
        help="what to do when a conversation outgrows the context: stop; or drop (window) or merge (merge, "
        "cluster) older tokens, which is lossy; auto takes what edgeinfer tune --cache found (default: stop)",
        choices=OVERFLOWS,
        cli="--overflow",
        group=_RESOURCES,
    )


@dataclass(frozen=True, kw_only=True)
class Cache(CacheOptions, OptionGroup):
    """The KV cache: `edgeinfer.load(cache=Cache(kv="int8", overflow="window"))`.

    Attributes:
        kv: data type: "float32", "float16", "int8" or "int4", for GGUF models also "q8_0" and "q4_0"; 8 and 4 bits
            are lossy. None means floats, or 8 bits if memory is short.
        overflow: what to do when a conversation outgrows the context: "stop", or one of three lossy ways: "window"
            keeps the first and the latest tokens, "merge" and "cluster" merge the others into them; "auto" is the one
            that `edgeinfer tune --cache` found to lose least, "window" where it was not measured.
        prefix_cache: memory for the KV caches of other conversations, such as "50MB", or bytes; 0 means none.
    """

    prefix_cache: int | str = option(0, **_PREFIX_CACHE)

    def __post_init__(self) -> None:
        if self.prefix_cache != 0:
            object.__setattr__(self, "prefix_cache", parse_size(self.prefix_cache))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadReplies, CacheOptions, LoadDrafting, LoadAdapters, DeviceOptions, RemoteOptions):
    """How a model is loaded. Each option is declared with its help, range and names (`options_of`)."""

    context: int | None = option(
        None,
        help="context window for prompt and reply together, in tokens (default: 8192, or less if the model or "
        "memory is smaller)",
        low=2,
        high=LARGEST_COUNT,
        cli=("-c", "--context"),
        metavar="N",
        group=_RESOURCES,
        basic=True,
        brief="context window in tokens (default: 8192)",
    )
    memory: int | None = option(
        None,
        help="memory budget for the whole process, such as 600MB or 1.5GiB (default: none)",
        low=1,
        high=_LARGEST_SIZE,
        cli="--memory",
        metavar="SIZE",
        group=_RESOURCES,
        basic=True,
        brief="memory budget, such as 600MB or 1.5GiB (default: none)",
        size=True,
    )
    # The conversion is kept; without this what is there is taken, or 4 bits, or 2 where memory has no room for 4.
    bits: int | None = option(
        None,
        help=f"bits per weight when a checkpoint is converted on first use: {one_of(CONVERTED_BITS)} (default: 4, or "
        "what fits in memory)",
        low=2,
        high=32,
        cli="--bits",
        metavar="N",
        group=_RESOURCES,
    )
    threads: int | None = option(
        None,
        help="number of CPU threads (default: as found by edgeinfer tune, else one per fast core it may use)",
        low=1,
        high=1024,
        cli=("-t", "--threads"),
        metavar="N",
        group=_RESOURCES,
        basic=True,
        brief="CPU threads (default: one per core)",
    )
    # DESIGN section 4.
    exact: bool = option(
        True,
        help="skip the padding that keeps the text the same however it is computed; up to 20% faster on some models",
        cli="--no-exact",
        group=_RESOURCES,
    )
    prefill_chunk: int | None = option(
        None,
        help="prompt tokens processed per pass (default: as found by edgeinfer tune, else 64, or fewer if "
        "memory is short)",
        low=1,
        high=LARGEST_COUNT,
        cli="--prefill-chunk",
        metavar="N",
        group=_RESOURCES,
    )
    # "onnx", "llamacpp" or "reference".
    backend: str | None = option(
        None,
        help="inference backend: onnx, llamacpp or reference (default: the model's own)",
        cli="--backend",
        metavar="NAME",
        group=_RESOURCES,
    )
    # None is where it works and the bundle stores its layout; True is always, converting the weights if need be.
    native: bool | None = option(
        None,
        help="run on the native kernel, or with --no-native on ONNX Runtime's own operators, which are slower "
        "(default: the kernel where it works)",
        cli="--native",
        group=_RESOURCES,
    )
    speculation: str = option("auto", **SPECULATION)
    # Without one, the bundle's own drafts where the budget has room for it.
    draft_model: str | None = option(
        None,
        help="draft model, a small model with the same tokenizer: bundle directory, .gguf file or hub id; or "
        "off (default: the one in the bundle, if any)",
        cli="--draft-model",
        metavar="MODEL",
        group=DRAFTING_GROUP,
    )
    weights: WeightsMode | None = option(
        None,
        help="where the weights are kept: packed in memory, mapped from their file, mapped with experts "
        "loaded on demand (experts), or streamed a few layers at a time (default: the fastest that fits)",
        choices=WEIGHTS_MODES,
        cli="--weights",
        group=_RESOURCES,
    )
    # For models with experts in the native layout.
    expert_memory: int | None = option(
        None,
        help="memory for the experts of a mixture-of-experts model, such as 200MB (default: all of them, or what fits)",
        low=1,
        high=_LARGEST_SIZE,
        cli="--expert-memory",
        metavar="SIZE",
        group=_RESOURCES,
        size=True,
    )
    counted: CountedPages = option(
        "resident",
        help="pages that count against --memory: all resident pages, or only anonymous ones, which have no "
        "file behind them (default: resident)",
        choices=COUNTED,
        cli="--counted",
        group=_RESOURCES,
    )
    prefix_cache: int = option(0, **_PREFIX_CACHE)
    # No command but `serve` unloads; timers take no more seconds everywhere.
    idle_unload: float | None = option(
        None,
        help="unload the model after this many seconds without a request (default: never)",
        low=0,
        high=4_000_000,
        above=True,
        metavar="SECONDS",
    )
    profile: str | None = option(
        None,
        help="tuned settings: a file written by edgeinfer tune --out, or off (default: those kept for this user)",
        cli="--profile",
        metavar="FILE|off",
        group=_RESOURCES,
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Options as callers write them: sizes also as text, the draft model also as a path."""
        options = flat_options(options, LOAD_GROUPS)
        require_known("load option", options, options_of(cls), _OF_REPLIES)
        for name in ("memory", "expert_memory"):
            if options.get(name) not in (None, 0):
                options[name] = _size_in_earnest(name, options[name])
        if options.get("prefix_cache", 0) != 0:  # of few tokens of a small model it may be small
            options["prefix_cache"] = parse_size(options["prefix_cache"])
        for name in ("draft_model", "profile"):
            if isinstance(options.get(name), os.PathLike):
                options[name] = os.fspath(options[name])
        return cls(**{name: value for name, value in options.items() if value is not None})

    def __post_init__(self) -> None:
        check_options(self)
        self.check_adapters()
        check_drafters(self.speculation)
        fits = self.expert_memory is None or self.weights in (None, "experts")
        require(fits, "expert_memory", self.expert_memory, "left out unless weights is 'experts'")
        self.check_device()
        self.check_remote()
        self.check_rpc()
        if self.remote is not None:
            require(self.overflow == "stop", "overflow", self.overflow, "'stop' where a server decides the text")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(ReplyOptions, ComputeOptions, SearchOptions, ReplyDrafting, ReplyAdapter):
    """How text is generated: what the reply may be, how tokens are drafted and searched for, and how much of the model
    each takes. Defaults give greedy decoding."""

    speculation: str = option("auto", **SPECULATION)
    method_options: Mapping[str, Any] = option(
        factory=dict,
        help="an option of a chosen method, such as lame_prompt=Hi for --search contrast; can be repeated (edgeinfer "
        "methods lists them)",
        cli="--method-option",
        metavar="NAME=VALUE",
        group="methods",
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Options as callers write them: groups as objects or mappings, their options also by themselves.

        Raises:
            UsageError: an unknown option, or a value out of range.
        """
        options = flat_options(options, REPLY_GROUPS)
        if isinstance(options.get("logprobs"), bool):  # as OpenAI writes it: those of the tokens alone, or none
            options["logprobs"] = 0 if options["logprobs"] else None
        require_known("generation option", options, options_of(cls), _OF_LOADING)
        config = cls(**{name: value for name, value in options.items() if value is not None})
        # An empty list of candidates would give any text at all.
        given = options.get("choices")
        require(given is None or len(config.choices) > 0, "choices", given, "a list of at least one text")
        return config

    @classmethod
    def for_chat(cls, recommended: Mapping[str, Any], options: Mapping[str, Any]) -> Self:
        """Options of a reply to messages: the makers' of the model, and what the caller gives instead. A search has its
        own way to choose tokens and takes none of the makers'."""
        given = {name: value for name, value in flat_options(options, REPLY_GROUPS).items() if value is not None}
        return cls.of(**given) if given.get("search", "off") != "off" else cls.of(**{**recommended, **given})

    def __post_init__(self) -> None:
        check_options(self)
        check_drafters(self.speculation)
        self.check_drafting()
        self.check_reply()
        self.check_compute()
        self.check_search()
        self.check_steering()
        given = self.method_options
        require(isinstance(given, Mapping), "method_options", given, "a mapping of names to values")
        object.__setattr__(self, "method_options", check_method_options(given, self._methods()) if given else {})
        modes = [name for name, usual in (("compute", "full"), ("search", "off")) if getattr(self, name) != usual]
        modes += ["speculation"] if modes and self.speculation not in ("auto", "off") else []
        require_alone(modes)

    def _methods(self) -> Iterator[DeclaredMethod]:
        """The methods that this reply chooses by name."""
        if self.search != "off":
            yield find_method("searches", self.search)
        if self.compute != "full":
            yield find_method("compute", self.compute)
        yield find_method("verifiers", self.verification)
        if self.speculation != "auto":
            yield from (find_method("drafters", name) for name in drafters_in(self.speculation))

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed; errors as `of`."""
        changes = flat_options(changes, REPLY_GROUPS)
        require_known("generation option", changes, options_of(type(self)), _OF_LOADING)
        return dataclasses.replace(self, **changes)


# Groups of options, by the names under which callers give them.
LOAD_GROUPS: dict[str, type[OptionGroup]] = {"speculation": Speculation, "cache": Cache}
REPLY_GROUPS: dict[str, type[OptionGroup]] = {
    "sampling": Sampling,
    "speculation": Speculation,
    "search": Search,
    "compute": ReducedCompute,
}
# What to do with an option of the other kind.
_OF_REPLIES = dict.fromkeys(
    options_of(GenerationConfig), "It is a generation option: pass it to generate() or stream()."
)
_OF_LOADING = dict.fromkeys(options_of(LoadConfig), "It is a load option: pass it to edgeinfer.load().")
