"""What a caller may ask for: how a model is loaded and how it generates, validated on construction."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.errors import UsageError
from edgeinfer.options import LARGEST_COUNT, check_options, option, require, require_alone, shown
from edgeinfer.reply_options import ReplyOptions
from edgeinfer.searching import SearchOptions

__all__ = [
    "COUNTED",
    "DEVICES",
    "DRAFTERS",
    "GGUF_KV_TYPES",
    "KV_TYPES",
    "NO_DRAFT_MODEL",
    "ONNX_KV_TYPES",
    "OVERFLOWS",
    "VERIFICATIONS",
    "WEIGHTS_MODES",
    "GenerationConfig",
    "LoadConfig",
    "drafters_in",
    "format_size",
    "parse_size",
]

# Who can draft, as options name them; runtime/speculation/registry.py makes them, a test holds the two equal.
DRAFTERS = (
    "forced", "copy", "ngram", "recycle", "model", "hierarchical", "exit", "skip", "bits", "experts", "resident",
    "medusa", "hydra", "prompt",
)  # fmt: skip
# How drafts can be verified; runtime/speculation/verification has them.
VERIFICATIONS = ("keyed", "rejection", "k-seq", "typical")
# Where models run; runtime/devices has them, a test holds the two equal.
DEVICES = (
    "cpu", "cuda", "directml", "webgpu", "qnn", "coreml", "openvino", "openvino:NPU", "openvino:GPU", "openvino:CPU",
    "xnnpack",
)  # fmt: skip
# How the KV cache stores numbers; edgeinfer/bundle/kv_types.py describes them.
ONNX_KV_TYPES = ("float32", "int8", "int4")
GGUF_KV_TYPES = ("float32", "float16", "q8_0", "q4_0")
KV_TYPES = tuple(dict.fromkeys((*ONNX_KV_TYPES, *GGUF_KV_TYPES)))
# What happens when a conversation outgrows the context (runtime/kv_cache/context_shift). All but "stop" are lossy.
OVERFLOWS = ("stop", "window", "merge", "cluster")
# Where the weights are while a model runs: packed into memory, mapped from a file, mapped but for experts that wait to
# be chosen, or dropped behind each pass.
WEIGHTS_MODES = ("packed", "mapped", "experts", "streamed")
# Which pages count against a budget: all that are resident, or those without a file behind them.
COUNTED = ("resident", "anonymous")
# As a draft model: none, not even the one that a bundle brings.
NO_DRAFT_MODEL = "off"
# Tokens in a draft unless told otherwise: more rarely pay (docs/LOG.md), and each takes a row of logits.
MOST_DRAFTED = 15

_UNITS = {"": 1, "B": 1, "K": 1000, "KB": 1000, "M": 1000**2, "MB": 1000**2, "G": 1000**3, "GB": 1000**3}
_UNITS |= {"T": 1000**4, "TB": 1000**4, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Bytes of a size such as ``600MB``, ``1.5GiB`` or ``400000000``.

    Raises:
        UsageError: the text is not a positive size.
    """
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
    """A size in bytes as people read it, in decimal units: ``412.3 MB``.

    Args:
        up: rounds up, for sizes that are to be given as a budget.
    """
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(size) >= factor:
            return f"{math.ceil(size * 10 / factor) / 10 if up else size / factor:.1f} {unit}"
    return f"{size} B"


_LARGEST_SIZE = 2**63 - 1
# Headings of help.
_RESOURCES, _DRAFTING = "resources", "drafting ahead (the text stays the same)"


def drafters_in(speculation: str) -> tuple[str, ...]:
    """The drafters that an option such as "copy,ngram" names; none for "off", all that a model has for "auto".

    Raises:
        UsageError: an unknown name.
    """
    if speculation == "off":
        return ()
    if speculation == "auto":
        return DRAFTERS
    names = tuple(dict.fromkeys(name.strip() for name in speculation.split(",")))
    for name in names:
        if name not in DRAFTERS:
            known = f"auto, off, or some of {', '.join(DRAFTERS)}"
            raise UsageError(f"Unknown drafter {name!r}.", f"speculation must be {known}, separated by commas.")
    return names


@dataclass(frozen=True)
class LoadConfig:
    """How a model is loaded. Each option is declared with its help, range and names (`options_of`)."""

    context: int | None = option(
        None,
        help="room for prompt and reply together, in tokens (default: 2048, or less if model or memory have less)",
        low=2,
        high=LARGEST_COUNT,
        cli=("-c", "--context"),
        metavar="N",
        group=_RESOURCES,
    )
    memory: int | None = option(
        None,
        help="the whole process must stay within this, such as 600MB or 1.5GiB (default: no limit)",
        low=1,
        high=_LARGEST_SIZE,
        cli="--memory",
        metavar="SIZE",
        group=_RESOURCES,
        size=True,
    )
    threads: int | None = option(
        None,
        help="CPU threads (default: what edgeinfer tune found, else the physical cores)",
        low=1,
        high=1024,
        cli=("-t", "--threads"),
        metavar="N",
        group=_RESOURCES,
    )
    # DESIGN section 4.
    exact: bool = option(
        True,
        help="skip the padding that makes text independent of how it was computed; up to 20% faster on some models",
        cli="--no-exact",
        group=_RESOURCES,
    )
    prefill_chunk: int | None = option(
        None,
        help="prompt tokens per pass (default: what edgeinfer tune found, else 64, or fewer where memory is short)",
        low=1,
        high=LARGEST_COUNT,
        cli="--prefill-chunk",
        metavar="N",
        group=_RESOURCES,
    )
    # "onnx", "llamacpp" or "reference".
    backend: str | None = option(
        None,
        help="engine that runs the model (default: the bundle's own)",
        cli="--backend",
        metavar="NAME",
        group=_RESOURCES,
    )
    # None is where it works and the bundle stores its layout; True is always, converting the weights if need be.
    native: bool | None = option(
        None,
        help="run on onnxruntime's own operators instead of the native kernel; slower",
        cli="--no-native",
        group=_RESOURCES,
    )
    speculation: str = option(
        "auto",
        help="auto: draft tokens ahead where that is faster; off; or drafters such as copy,recycle: "
        + ", ".join(DRAFTERS),
        cli="--spec",
        metavar="MODE",
        group=_DRAFTING,
    )
    # Without one, the bundle's own drafts where the budget has room for it.
    draft_model: str | None = option(
        None,
        help="a small model with the same tokenizer that drafts: bundle directory, .gguf file or hub id; off: not even "
        "the model's own",
        cli="--draft-model",
        metavar="MODEL",
        group=_DRAFTING,
    )
    # Memory is planned for this many; only `speculation="auto"` takes fewer where the budget needs it.
    draft_max: int | None = option(
        None,
        help="tokens in a draft at most (default: 15, or fewer where memory is short)",
        low=1,
        high=63,
        cli="--spec-draft-n-max",
        metavar="N",
        group=_DRAFTING,
    )
    # Also of a draft model in a GGUF file, where the default is all of its experts.
    draft_experts: int | None = option(
        None,
        help="experts per token where the model itself drafts with fewer (default: half of its own number)",
        low=1,
        high=4096,
        cli="--draft-experts",
        metavar="N",
        group=_DRAFTING,
    )
    remember: bool = option(
        True,
        help="keep nothing of what drafters learn from your texts (token ids and counts) for the next session",
        cli="--no-remember",
        group=_DRAFTING,
    )
    # Floats are float32, of GGUF models float16; where the budget needs it, int8 (if the bundle has scales) or q8_0.
    kv: str | None = option(
        None,
        help="type of the KV cache: float32, int8, int4, of GGUF models float16, q8_0, q4_0; 8 and 4 bits are lossy "
        "(default: floats, or 8 bits where memory is short)",
        choices=KV_TYPES,
        cli="--kv",
        group=_RESOURCES,
    )
    overflow: str = option(
        "stop",
        help="when a conversation outgrows the context: stop, or forget some of it, which is lossy (default: stop)",
        choices=OVERFLOWS,
        cli="--overflow",
        group=_RESOURCES,
    )
    weights: str | None = option(
        None,
        help="packed into memory, mapped from their file, experts mapped until they are chosen, or streamed a few "
        "layers at a time (default: fastest that fits)",
        choices=WEIGHTS_MODES,
        cli="--weights",
        group=_RESOURCES,
    )
    # For models with experts in the native layout.
    expert_memory: int | None = option(
        None,
        help="experts of the model that may be in memory at once, such as 200MB (default: all, or what fits)",
        low=1,
        high=_LARGEST_SIZE,
        cli="--expert-memory",
        metavar="SIZE",
        group=_RESOURCES,
        size=True,
    )
    counted: str = option(
        "resident",
        help="what counts against --memory: resident pages, or only those without a file behind them (default: "
        "resident)",
        choices=COUNTED,
        cli="--counted",
        group=_RESOURCES,
    )
    prefix_cache: int = option(
        0,
        help="memory for conversations other than the current one, such as 50MB (default: none)",
        low=0,
        high=_LARGEST_SIZE,
        cli="--prefix-cache",
        metavar="SIZE",
        group=_RESOURCES,
        size=True,
    )
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
        help="settings that edgeinfer tune --out wrote to FILE, or off (default: what it kept for this user)",
        cli="--profile",
        metavar="FILE|off",
        group=_RESOURCES,
    )
    # Where a device fails, the CPU runs the model.
    device: str = option(
        "auto",
        help="where the model runs: auto, or one that `edgeinfer devices` lists, such as openvino:NPU (default: auto)",
        cli="--device",
        metavar="NAME",
        group=_RESOURCES,
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Options as callers write them: sizes also as text, the draft model also as a path.

        Raises:
            UsageError: an unknown option, or a value out of range.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(f"Unknown load option {name!r}.", f"Known options: {', '.join(sorted(known))}.")
        for name in ("memory", "expert_memory"):
            if options.get(name) is not None:
                options[name] = parse_size(options[name])
        if options.get("prefix_cache", 0) != 0:
            options["prefix_cache"] = parse_size(options["prefix_cache"])
        for name in ("draft_model", "profile"):
            if isinstance(options.get(name), Path):
                options[name] = str(options[name])
        return cls(**options)

    def __post_init__(self) -> None:
        check_options(self)
        drafters_in(self.speculation)
        fits = self.expert_memory is None or self.weights in (None, "experts")
        require(fits, "expert_memory", self.expert_memory, "left out where weights are not 'experts'")
        if self.device not in ("auto", *DEVICES):
            raise UsageError(f"There is no device {self.device!r}.", f"Choose auto or one of {', '.join(DEVICES)}.")


@dataclass(frozen=True)
class GenerationConfig(ReplyOptions, ComputeOptions, SearchOptions):
    """How text is generated: what the reply may be, how tokens are drafted and searched for, and how much of the model
    each takes. Defaults give greedy decoding."""

    speculation: str = option(
        "auto",
        help="who may draft, of the drafters the model was loaded with: auto, off, or some names",
        wire=True,
    )
    draft_max: int | None = option(
        None, help="tokens in a draft at most (default: what the model was loaded with)", low=1, high=63, wire=True
    )
    draft_width: int = option(
        1,
        help="guesses per drafter and place; above 1 drafts are trees (default: 1)",
        low=1,
        high=8,
        cli="--spec-tree-width",
        metavar="N",
        group=_DRAFTING,
    )
    # rejection: Leviathan and Chen; k-seq: SpecTr; typical: Medusa.
    verification: str = option(
        "keyed",
        help="keyed: the text of plain decoding; rejection, k-seq: its distribution; typical: lossy (default: keyed)",
        choices=VERIFICATIONS,
        cli="--spec-verify",
        group=_DRAFTING,
        wire=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        drafters_in(self.speculation)
        self.check_reply()
        self.check_compute()
        self.check_search()
        modes = [name for name, usual in (("compute", "full"), ("search", "off")) if getattr(self, name) != usual]
        modes += ["speculation"] if modes and self.speculation not in ("auto", "off") else []
        require_alone(modes)

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed.

        Raises:
            UsageError: an unknown option or a value out of range.
        """
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(f"Unknown generation option {name!r}.", f"Known options: {', '.join(sorted(known))}.")
        return dataclasses.replace(self, **changes)
