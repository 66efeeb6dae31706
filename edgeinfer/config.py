"""What a caller may ask for: load and generation options, validated on construction; knows nothing of models."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.errors import UsageError
from edgeinfer.option_checks import LARGEST_COUNT, Range, require, require_few, require_ranges, require_short, shown
from edgeinfer.searching import SearchOptions

__all__ = [
    "COUNTED",
    "DEVICES",
    "DRAFTERS",
    "GENERATION_RANGES",
    "GGUF_KV_TYPES",
    "KV_TYPES",
    "LOAD_RANGES",
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


def format_size(size: int) -> str:
    """A size in bytes as people read it, in decimal units: ``412.3 MB``."""
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


# What one request may ask for. OpenAI takes 4 stop strings; peers name no limit, and no program in use has 16.
MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 16, 1000, 1024
# Each choice is made tokens of before a reply begins; characters are of all together.
MOST_CHOICES, MOST_CHOICE_CHARACTERS, MOST_BIASES = 1024, 256_000, 4096

# What the reply must be; one at most.
_FORMS = ("choices", "json_schema", "json_object", "regex", "grammar")
# What OpenAI's, llama.cpp's and vLLM's take in earnest lies inside, and what comes of it stays a number of 32 bits.
GENERATION_RANGES: Mapping[str, Range] = {
    "max_tokens": Range(1, 2**63 - 1, whole=True, optional=True),
    "temperature": Range(0, 100),
    "top_k": Range(0, LARGEST_COUNT, whole=True),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "frequency_penalty": Range(-100, 100),
    "presence_penalty": Range(-100, 100),
    "seed": Range(0, 2**64 - 1, whole=True, optional=True),
    "draft_max": Range(1, 63, whole=True, optional=True),
    "draft_width": Range(1, 8, whole=True),
    "logprobs": Range(0, 20, whole=True, optional=True),
}
_BIAS = Range(-1e6, 1e6)
_TOKEN = Range(0, LARGEST_COUNT, whole=True)
_LARGEST_SIZE = 2**63 - 1
LOAD_RANGES: Mapping[str, Range] = {
    "context": Range(2, LARGEST_COUNT, whole=True, optional=True),
    "memory": Range(1, _LARGEST_SIZE, whole=True, optional=True),
    "threads": Range(1, 1024, whole=True, optional=True),
    "prefill_chunk": Range(1, LARGEST_COUNT, whole=True, optional=True),
    "draft_max": Range(1, 63, whole=True, optional=True),
    "draft_experts": Range(1, 4096, whole=True, optional=True),
    "expert_memory": Range(1, _LARGEST_SIZE, whole=True, optional=True),
    "prefix_cache": Range(0, _LARGEST_SIZE, whole=True),
    "idle_unload": Range(0, 4_000_000, above=True, optional=True),  # seconds; timers hold no more everywhere
}


def _is_bias(value: object) -> bool:
    return _BIAS.holds(value) or (isinstance(value, float) and math.isinf(value))


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
    """How a model is loaded.

    Attributes:
        context: capacity in tokens of prompt plus reply; None takes min(2048, model maximum).
        memory: budget in bytes for the whole process; None sets no budget.
        threads: threads of the linear algebra; None takes what `edgeinfer tune` found, else the physical cores.
        exact: pad passes so that text never depends on how it was chunked or speculated (DESIGN section 4).
        prefill_chunk: tokens of a prompt evaluated per pass; None takes what `edgeinfer tune` found, else 64, or fewer
            where the budget needs it.
        backend: "onnx", "llamacpp" or "reference"; None takes the bundle's own.
        native: whether the native kernel multiplies: None where it works and the bundle stores its layout, False never,
            True always, converting the weights if need be.
        speculation: who may draft: "auto" for all that pay, "off", or names of DRAFTERS separated by commas.
        draft_model: bundle directory, GGUF file or hub id of a small model with the same tokenizer that drafts; None
            takes the one that the bundle brings, if any and where the budget has room for it, and "off" none.
        draft_max: tokens in a draft at most, for which memory is planned; None takes 15, or fewer where the budget
            needs it and `speculation` is "auto".
        draft_experts: experts of a layer that a token of a draft uses where the model itself drafts with fewer, or a
            draft model in a GGUF file has experts; None is half of the model's own number, and all of a draft model's.
        remember: keep what drafters learn (ids of tokens and counts) in the user's cache for the next session.
        kv: one of ONNX_KV_TYPES, of a GGUF model one of GGUF_KV_TYPES; None takes float32, or int8 where the budget
            needs it and the bundle has scales for it; of a GGUF model float16, or q8_0.
        overflow: one of OVERFLOWS.
        weights: one of WEIGHTS_MODES; None takes the fastest that fits.
        expert_memory: bytes of experts that may be in memory at once, for models with experts in the native layout;
            None is all, or what fits.
        counted: one of COUNTED.
        prefix_cache: bytes kept of conversations other than the current one, so that going back to them is cheap.
        idle_unload: seconds without a request after which the model leaves memory until the next; None never does.
        profile: a file that `edgeinfer tune --out` wrote, whose settings are used where none are given here; "off" uses
            none, and None those kept for this user by `edgeinfer tune`, if any.
        device: "auto" for the fastest that is installed and runs the bundle's graphs, or one of DEVICES. Where it
            fails, the CPU runs the model.
    """

    context: int | None = None
    memory: int | None = None
    threads: int | None = None
    exact: bool = True
    prefill_chunk: int | None = None
    backend: str | None = None
    native: bool | None = None
    speculation: str = "auto"
    draft_model: str | None = None
    draft_max: int | None = None
    draft_experts: int | None = None
    remember: bool = True
    kv: str | None = None
    overflow: str = "stop"
    weights: str | None = None
    expert_memory: int | None = None
    counted: str = "resident"
    prefix_cache: int = 0
    idle_unload: float | None = None
    profile: str | None = None
    device: str = "auto"

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
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            # A truth is an integer to isinstance, and an integer is a number of seconds.
            fits = isinstance(value, kind | int if name == "idle_unload" else kind)
            fits = fits and (isinstance(value, bool) == (bool in (typing.get_args(kind) or (kind,))) or value is None)
            require(fits, name, value, f"of type {kind if typing.get_args(kind) else kind.__name__}")
        drafters_in(self.speculation)
        require_ranges(self, LOAD_RANGES)
        fits = self.expert_memory is None or self.weights in (None, "experts")
        require(fits, "expert_memory", self.expert_memory, "left out where weights are not 'experts'")
        if self.device not in ("auto", *DEVICES):
            raise UsageError(f"There is no device {self.device!r}.", f"Choose auto or one of {', '.join(DEVICES)}.")
        chosen = (("kv", KV_TYPES), ("overflow", OVERFLOWS), ("weights", WEIGHTS_MODES), ("counted", COUNTED))
        for name, known in chosen:
            value = getattr(self, name)
            optional = name in ("kv", "weights")
            require(value in known or (value is None and optional), name, value, f"one of {', '.join(known)}")


@dataclass(frozen=True)
class GenerationConfig(ComputeOptions, SearchOptions):
    """How text is generated. Defaults give greedy decoding. More attributes: ComputeOptions and SearchOptions.

    Attributes:
        max_tokens: reply length in tokens; None means until the context is full.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with this probability mass; 1 keeps all.
        min_p: drop tokens below min_p times the best probability; 0 keeps all.
        repetition_penalty: CTRL's penalty on tokens of prompt and reply; 1 is none.
        frequency_penalty: OpenAI's, per occurrence in the reply.
        presence_penalty: OpenAI's, once per token present in the reply.
        logit_bias: added to the logits of these token ids before anything else.
        stop: strings that end the reply, 16 of 1,000 characters at most; they are not part of its text.
        stop_token_ids: ids that end the reply, added to the model's own.
        ignore_eos: do not stop at the model's end-of-text tokens.
        seed: of the position-keyed generator; None draws one.
        speculation: who may draft, of those the model was loaded with: "auto", "off", or names of DRAFTERS separated by
            commas. The text is the same whatever is chosen, unless `verification` says otherwise.
        draft_max: tokens in a draft at most; None is what the model was loaded with.
        draft_width: guesses per drafter and place; above 1 drafts are trees.
        verification: "keyed" gives the text of plain decoding; "rejection" (Leviathan and Chen) and "k-seq" (SpecTr)
            give text of the same distribution; "typical" (Medusa) accepts more and is lossy.
        choices: the reply must be one of these texts, 1,024 at most; empty leaves it free.
        json_schema: the reply must be a JSON document that this schema allows, given as a mapping or as its text.
        json_object: the reply must be a JSON object.
        regex: the reply must match this regular expression from its first character to its last.
        grammar: the reply must be a text of this grammar, written in Lark's notation. Of these four and `choices`, one
            at most.
        logprobs: tell the log-probabilities of the reply's tokens (`Chunk.logprobs`), and those of this many likeliest
            tokens at each place; None tells none.
        parse_special: special tokens spelled out in texts become those tokens. None has that of a prompt that the
            caller wrote as a whole (`stream`, `generate`, `lame_prompt`) and of nothing else: what messages, tools,
            variables and choices say is plain text. True has it of everything, False of nothing.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    speculation: str = "auto"
    draft_max: int | None = None
    draft_width: int = 1
    verification: str = "keyed"
    choices: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    parse_special: bool | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        require(all(self.stop), "stop", self.stop, "free of empty strings")
        drafters_in(self.speculation)
        known = ", ".join(VERIFICATIONS)
        require(self.verification in VERIFICATIONS, "verification", self.verification, f"one of {known}")
        require(all(self.choices), "choices", self.choices, "free of empty texts")
        self.check_compute()
        self.check_search()
        ways = [name for name, usual in (("compute", "full"), ("search", "off")) if getattr(self, name) != usual]
        ways += ["speculation"] if ways and self.speculation not in ("auto", "off") else []
        forms = [name for name in _FORMS if getattr(self, name) not in (None, False, ())]
        for together in (ways, forms):
            if len(together) > 1:
                raise UsageError(f"{' and '.join(together)} cannot be asked for at once.", "Leave out all but one.")

    def _check_sizes(self) -> None:
        """Nothing is made of what is too large."""
        counts = {"stop": MOST_STOPS, "stop_token_ids": MOST_STOP_IDS, "logit_bias": MOST_BIASES}
        for name, most in (counts | {"choices": MOST_CHOICES}).items():
            require_few(name, getattr(self, name), most)
        require_short("stop", self.stop, MOST_STOP_CHARACTERS)
        require_short("choices", ("".join(self.choices),), MOST_CHOICE_CHARACTERS)

    def _check_types(self) -> None:
        """Options come from HTTP requests as they are; a wrong type must not fail somewhere inside."""
        require_ranges(self, GENERATION_RANGES)
        for name in ("speculation", "verification"):
            require(isinstance(getattr(self, name), str), name, getattr(self, name), "a text")
        for name in ("regex", "grammar"):
            require(isinstance(getattr(self, name), str | None), name, getattr(self, name), "a text")
        schema = self.json_schema
        require(isinstance(schema, Mapping | str | None), "json_schema", schema, "a JSON Schema: an object or its text")
        require(isinstance(self.json_object, bool), "json_object", self.json_object, "true or false")
        choices = self.choices
        texts = isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
        require(texts, "choices", choices, "several texts")
        object.__setattr__(self, "choices", tuple(choices))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        ids, bias = self.stop_token_ids, self.logit_bias
        strings = isinstance(stop, list | tuple) and all(isinstance(s, str) for s in stop)
        require(strings, "stop", stop, "a string or several")
        require(isinstance(ids, list | tuple) and all(map(_TOKEN.holds, ids)), "stop_token_ids", ids, "token ids")
        pairs = isinstance(bias, Mapping) and all(_TOKEN.holds(i) and _is_bias(b) for i, b in bias.items())
        require(pairs, "logit_bias", bias, f"token ids, each with {_BIAS}, or with an infinite one")
        for name, optional in (("ignore_eos", False), ("parse_special", True)):
            value = getattr(self, name)
            require(isinstance(value, bool) or (value is None and optional), name, value, "true or false")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0 or self.top_k == 1

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
