"""What a caller gets back: text with its timings, memory, speculation and model facts.

Field names are those of `edgeinfer run --json` (DESIGN section 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, field
from typing import Any, Literal

from edgeinfer.adaptive import ComputeUse
from edgeinfer.contexts import ContextUse
from edgeinfer.records import dataclass, listed
from edgeinfer.remote_options import RemoteUse
from edgeinfer.schema_classes import SchemaClass, read_reply
from edgeinfer.searching import SearchUse
from edgeinfer.version import SAMPLING

FinishReason = Literal["stop", "length", "cancelled"]
# Called with what is being done, how many steps are done and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Durations in milliseconds, measured around this request.

    Attributes:
        load_ms: loading the model, once per process.
        prompt_ms: evaluating the uncached part of the prompt.
        ttft_ms: from the request to the first token.
        per_token_ms: mean time per token after the first.
        per_token_p50_ms, per_token_p95_ms: percentiles of the same.
        tokens_per_second: decoded tokens after the first per second; 0 with fewer than two tokens.
        cached_prompt_tokens: prompt tokens whose KV was reused.
    """

    load_ms: float
    prompt_ms: float
    ttft_ms: float
    per_token_ms: float
    per_token_p50_ms: float
    per_token_p95_ms: float
    tokens_per_second: float
    cached_prompt_tokens: int


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the whole process in bytes.

    Attributes:
        pss_bytes: resident at the end, each page divided by how many processes share it; None where nothing tells.
        terms: the plan's.
        used: held at the end of the reply by the model's parts, by the plan's terms, and by the process in all.
        given_up: what the plan gave up to fit, then what had to be spared while the reply ran, in order.
    """

    budget_bytes: int | None
    planned_bytes: int
    peak_rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    terms: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()
    pss_bytes: int | None = None


@dataclass(frozen=True)
class DrafterUse:
    """What one drafter did in a reply.

    Attributes:
        rounds: passes that verified at least one of its tokens.
        drafted, accepted: its tokens.
        accepted_per_position: accepted tokens by place in the draft, the first at index 0.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpeculationUse:
    """What drafting did; all zero when decoding was plain.

    Attributes:
        mode: as it was asked for.
        verification: how drafts were verified.
        lossless: whether the text is distributed as the target's own.
        exact: whether it is the very text of plain decoding, bit for bit of the logits; None where that is not known.
        rounds: passes of the target that verified a draft or none, after the prompt's.
        drafted, accepted: tokens.
        recovered: tokens that replaced the first rejected one of a draft.
        bonus: tokens that followed a fully accepted draft, or an empty one.
        rechecked: choices that were within rounding of a tie and taken again by a plain pass.
        accepted_per_position: accepted tokens by place in the draft, the first at index 0.
        acceptance_rate: accepted / drafted; 0 without drafts.
        mean_accepted_length: tokens committed per pass of the target; 1 is plain decoding.
        draft_ms, verify_ms, overhead_ms: where the time of the rounds went; the last is choosing and bookkeeping.
        choices: rounds by what the governor chose: names of the drafters in the draft joined by "+", or "none".
        per_drafter: what each did.
        plain_ms: a plain step, its median in this process; None before the first was timed.
        speedup_vs_plain: plain_ms over the reply's mean milliseconds per token.
    """

    mode: str
    verification: str = "keyed"
    lossless: bool = True
    exact: bool | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    rechecked: int = 0
    accepted_per_position: tuple[int, ...] = ()
    acceptance_rate: float = 0.0
    mean_accepted_length: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    choices: dict[str, int] = field(default_factory=dict)
    per_drafter: dict[str, DrafterUse] = field(default_factory=dict)
    plain_ms: float | None = None
    speedup_vs_plain: float | None = None


@dataclass(frozen=True)
class ExpertUse:
    """How the tokens of a model with experts used them.

    Attributes:
        experts: of a layer.
        top_k: that a token uses at most.
        tokens: that were counted: those of prompt and reply whose keys and values were computed.
        token_sparsity: 1 less the mean share of a layer's experts that a token uses.
        chunk_sparsity: the same of the union over 2, 4 and 8 consecutive tokens; lengths that no text had are left out.
        expert_bytes: of all experts' weights; 0 where that is not known, as below.
        resident_bytes: of those that were in memory at the end, where only some of them stay.
        hit_rate: share of the experts that passes used which were in memory already; None where all stay.
    """

    experts: int
    top_k: int
    tokens: int
    token_sparsity: float
    chunk_sparsity: dict[int, float]
    expert_bytes: int = 0
    resident_bytes: int = 0
    hit_rate: float | None = None


@dataclass(frozen=True)
class Overflow:
    """What the cache had lost of a text when its reply was finished, because both had outgrown the context.

    Attributes:
        policy: what makes room, one of config.OVERFLOWS.
        events: how often it made room since the text began; of turns before this one too, as the reply rests on them.
        dropped: tokens of the text that the cache holds nothing of.
        merged: tokens whose keys and values are held as a mean with others'. Where heads differ, both are means.
        lossless: whether the reply is the one that a larger context would have given, as it is without an event.
    """

    policy: str = "stop"
    events: int = 0
    dropped: float = 0.0
    merged: float = 0.0
    lossless: bool = True


@dataclass(frozen=True)
class ModelInfo:
    """Which model answered.

    Attributes:
        kernel: what multiplied: an instruction set of the native kernel, else the operator or library.
        device: that ran it, as `edgeinfer devices` names them.
        device_note: why it is not the one that was asked for; empty where it is.
        verified: when its files were compared with their digests: "now", "before" where large ones have not changed
            since, "first" where a file without a digest was taken as the right one, "pending" before the first token.
    """

    name: str
    architecture: str
    parameters: int
    bits_per_weight: float
    backend: str
    kernel: str
    device: str = "cpu"
    device_note: str = ""
    verified: str = ""


@dataclass(frozen=True)
class DeviceFacts:
    """A device that models may run on.

    Attributes:
        name: as `--device` takes it.
        provider: onnxruntime's name of it, or "llama.cpp".
        package, beside: of pip that brings the provider; whether it is installed beside onnxruntime, else in its place.
        installed, hardware: whether the provider is there; whether it sees hardware, None where it is not installed.
        bundles: "all"; "static", those exported with --static; or "gguf", GGUF files alone.
        traits: what its kernels can do with other bundles than static ones, by name.
        memory: where its arrays live; "cpu" is ordinary memory.
        check: "ok" where small models gave on it what they give on the CPU, else why not; empty where it was not tried.
        tried: where edgeinfer was run on it before it was released.
        kernels: instruction sets that the native kernel can use there, the best first; empty without the kernel.
        description: of the hardware, where the provider has one.
    """

    name: str
    provider: str
    package: str
    beside: bool
    installed: bool
    hardware: bool | None
    bundles: str
    traits: dict[str, bool]
    memory: str
    check: str
    tried: str
    kernels: tuple[str, ...] = ()
    description: str = ""


@dataclass(frozen=True)
class LoadCosts:
    """What loading a model took: milliseconds in all, and the tokenizer's part of them and of the anonymous memory."""

    total_ms: float
    tokenizer_ms: float
    tokenizer_bytes: int


@dataclass(frozen=True)
class PassWork:
    """The least that one or several passes have to do; attention counts where the tokens before the pass are known.

    Attributes:
        weight_bytes: stored bytes of the weights, each read once per pass; of the embedding only single rows are.
        multiply_adds: of the weights with the rows that go through them, and of attention.
        cache_bytes: stored bytes of the keys and values that the rows see, each read once per pass.
    """

    weight_bytes: int
    multiply_adds: int
    cache_bytes: int = 0

    def __add__(self, other: PassWork) -> PassWork:
        weights, adds = self.weight_bytes + other.weight_bytes, self.multiply_adds + other.multiply_adds
        return PassWork(weights, adds, self.cache_bytes + other.cache_bytes)


@dataclass(frozen=True)
class DeviceLimits:
    """What a machine can do at best.

    Attributes:
        kernel: the instruction set that multiplies.
        threads: that worked together.
        read_bytes_per_s: bytes of memory, beyond all caches, that they read in a second.
        multiply_adds_per_s: of int8 values; None where the instruction set has no instruction for them.
    """

    kernel: str
    threads: int
    read_bytes_per_s: float
    multiply_adds_per_s: float | None

    def floor_ms(self, work: PassWork) -> tuple[float, float | None]:
        """Milliseconds that reading alone and multiplying alone take; a pass takes no less than the longer."""
        rate, read = self.multiply_adds_per_s, work.weight_bytes + work.cache_bytes
        return read / self.read_bytes_per_s * 1e3, work.multiply_adds / rate * 1e3 if rate else None


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was by the model itself: before bias, penalties, constraints, temperature and truncation.

    Attributes:
        bytes: that it adds to the text, maybe a part of a character.
        logprob: natural logarithm of its probability.
        alternatives: the likeliest tokens at its place, best first, itself among them where it is one.
    """

    token_id: int
    bytes: bytes
    logprob: float
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of streamed text: whole characters only, possibly of several tokens, possibly empty.

    Attributes:
        logprobs: of tokens whose text begins to show here, where they were asked for; none of a stop string's.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Result:
    """One finished reply.

    Attributes:
        experts: of models that have any.
        compute: what computing less did; None where the whole model made every token.
        search: what searching did; None where nothing was searched.
        remote: what the server did that decided the text; None where this machine's model did.
        stop_string: of those that were asked for, the one that ended the reply; None where none did.
        contexts: that were evaluated apart from the prompt; None where there were none.
        logprobs: of the text's tokens, where they were asked for.
        sampling: version of how a seed makes text: the same seed gives the same text by the same version.
        schema_class: that `json_schema` was; None where it was none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    memory: MemoryUse
    speculation: SpeculationUse
    model: ModelInfo
    overflow: Overflow = field(default_factory=Overflow)
    experts: ExpertUse | None = None
    compute: ComputeUse | None = None
    search: SearchUse | None = None
    remote: RemoteUse | None = None
    stop_string: str | None = None
    contexts: ContextUse | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    sampling: int = SAMPLING
    schema_class: type[SchemaClass] | None = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """What the reply says where it was asked for as JSON (`json_schema`): dictionaries, lists, texts and numbers,
        or an instance where a class was given.

        Raises:
            UsageError: the reply ended before its JSON did, is none, or is refused by the class.
        """
        return read_reply(self.text, self.finish_reason, self.schema_class)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `edgeinfer run --json` prints."""
        data: dict[str, Any] = listed(asdict(self))
        del data["schema_class"]
        data["usage"]["total_tokens"] = self.usage.total_tokens
        return data if self.logprobs else {name: value for name, value in data.items() if name != "logprobs"}
