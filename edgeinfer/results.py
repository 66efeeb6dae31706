"""Results of replies: text with its timings, memory, speculation and facts of the model.

Field names are those of `edgeinfer run --json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, field
from typing import Any, Literal

from edgeinfer.errors import UsageError
from edgeinfer.options.reply import SchemaClass
from edgeinfer.records import dataclass, listed
from edgeinfer.version import SAMPLING

Placement = Literal["parallel", "sequence"]
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
        pss_bytes: resident at the end, each page divided by the processes that share it; None where it is unknown.
        terms: the plan's.
        used: held at the end of the reply by the model's parts, by the plan's terms, and by the process in all.
        given_up: what the plan gave up to fit, then what was given up while the reply ran, in order.
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
        mode: the option.
        verification: how drafts were verified.
        lossless: whether the text has the distribution of the target model.
        exact: whether it is the text of plain decoding, bit for bit of the logits; None where that is unknown.
        rounds: passes of the target that verified a draft or none, after the prompt's.
        drafted, accepted: tokens.
        recovered: tokens that replaced the first rejected one of a draft.
        bonus: tokens that followed a fully accepted draft, or an empty one.
        rechecked: choices that were within rounding of a tie and repeated by a plain pass.
        accepted_per_position: accepted tokens by place in the draft, the first at index 0.
        acceptance_rate: accepted / drafted; 0 without drafts.
        mean_accepted_length: tokens committed per pass of the target; 1 is plain decoding.
        draft_ms, verify_ms, overhead_ms: the time of the rounds; the last is choosing and bookkeeping.
        choices: rounds by the drafters chosen for them, joined by "+", or "none".
        per_drafter: statistics of each.
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
        experts: experts of a layer.
        top_k: how many a token uses at most.
        tokens: counted tokens: those of prompt and reply whose keys and values were computed.
        token_sparsity: 1 minus the mean share of a layer's experts that a token uses.
        chunk_sparsity: likewise for the union over 2, 4 and 8 consecutive tokens; lengths without a text are left out.
        expert_bytes: size of all experts' weights; 0 where it is unknown, as below.
        resident_bytes: size of those in memory at the end, where only some of them stay.
        hit_rate: share of the used experts that were in memory already; None where all stay.
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
    """Tokens that context shift had removed from the cache when the reply was finished.

    Attributes:
        policy: the option `overflow`.
        events: how often it made room since the start of the text, earlier turns included.
        dropped: tokens without rows in the cache, a mean over heads.
        merged: tokens whose keys and values were averaged with others', a mean over heads.
        lossless: whether the reply is the one that a larger context would have given: true without an event.
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
        kernel: what multiplied matrices: an instruction set of the native kernel, else the operator or library.
        device: the device that ran it, as `edgeinfer devices` names them.
        device_note: why it is not the requested device; empty where it is.
        verified: when its files were compared with their digests: "now", "before" where large ones have not changed
            since, "first" where a file without a digest was trusted, "pending" before the first token.
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
        package: the pip package with the provider.
        plugin: the package is installed in addition to onnxruntime, not instead of it.
        installed, hardware: whether the provider is there; whether it sees hardware, None where it is not installed.
        bundles: "all"; "static", those exported with --static; or "gguf", only GGUF files.
        traits: capabilities of its kernels with bundles that are not static, by name.
        memory: where its arrays live; "cpu" is ordinary memory.
        check: "ok" where small models gave the results of the CPU, else why not; empty where it was not tried.
        tried: where edgeinfer was tested on it before its release.
        kernels: instruction sets that the native kernel can use there, best first; empty without the kernel.
        description: the provider's description of the hardware, if any.
    """

    name: str
    provider: str
    package: str
    plugin: bool
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
    """The time of loading a model, and the tokenizer's part of it and of the anonymous memory."""

    total_ms: float
    tokenizer_ms: float
    tokenizer_bytes: int


@dataclass(frozen=True)
class PassWork:
    """The minimum work of one or several passes; attention counts where the tokens before the pass are known.

    Attributes:
        weight_bytes: stored bytes of the weights, each read once per pass; only single rows of the embedding.
        multiply_adds: those of weights and of attention.
        cache_bytes: stored bytes of the keys and values that the rows attend to, each read once per pass.
    """

    weight_bytes: int
    multiply_adds: int
    cache_bytes: int = 0

    def __add__(self, other: PassWork) -> PassWork:
        weights, adds = self.weight_bytes + other.weight_bytes, self.multiply_adds + other.multiply_adds
        return PassWork(weights, adds, self.cache_bytes + other.cache_bytes)


@dataclass(frozen=True)
class DeviceLimits:
    """The peak rates of a machine.

    Attributes:
        kernel: the instruction set that multiplies.
        threads: how many threads were used.
        read_bytes_per_s: memory read rate, beyond all caches.
        multiply_adds_per_s: rate for int8 values; None where the instruction set has no instruction for them.
    """

    kernel: str
    threads: int
    read_bytes_per_s: float
    multiply_adds_per_s: float | None

    def floor_ms(self, work: PassWork) -> tuple[float, float | None]:
        """Milliseconds of only reading and of only multiplying; a pass takes at least the longer."""
        rate, read = self.multiply_adds_per_s, work.weight_bytes + work.cache_bytes
        return read / self.read_bytes_per_s * 1e3, work.multiply_adds / rate * 1e3 if rate else None


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token by the model itself: before bias, penalties, constraints, temperature and truncation.

    Attributes:
        bytes: its part of the text, maybe a part of a character.
        logprob: natural logarithm of its probability.
        alternatives: the likeliest tokens at its place, best first, maybe including itself.
    """

    token_id: int
    bytes: bytes
    logprob: float
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of streamed text: whole characters only, possibly of several tokens, possibly empty.

    Attributes:
        logprobs: of tokens whose text starts here, if requested; none of a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class RemoteUse:
    """What a reply took of the model that decided it.

    Attributes:
        url: of its server.
        model: its name.
        digest: sha256 of its weights and decoder, in hexadecimal digits.
        rounds: drafts that it verified.
        drafted, accepted: tokens of these drafts, and those of them that it agreed with.
        streamed: tokens that it made without drafts.
        local: tokens at the end that this machine's model made alone, as the server was lost: not the server's text.
        retries: requests that were sent again.
        link_ms: median milliseconds of a round that the way took.
        server_ms: median milliseconds of a round in the server.
    """

    url: str
    model: str
    digest: str
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    streamed: int = 0
    local: int = 0
    retries: int = 0
    link_ms: float = 0.0
    server_ms: float = 0.0


@dataclass(frozen=True)
class ContextUse:
    """The contexts that a reply was made with.

    Attributes:
        contexts: how many.
        tokens: of all of them.
        evaluated: of these, those that were evaluated, as no file kept them.
        edited: contexts with rows that were turned to where an edit left them.
        placement: "parallel" or "sequence".
        temperature: that scores of their keys were divided by.
        lossless: whether the text is what evaluating all in one would give: of one context alone that was not edited.
    """

    contexts: int
    tokens: int
    evaluated: int
    edited: int
    placement: Placement
    temperature: float
    lossless: bool


@dataclass(frozen=True)
class SearchedText:
    """One of several texts that were looked at to the end.

    Attributes:
        score: mean natural log-probability of its tokens by the model itself, a stop token included.
        finish_reason: "stop" where it ended by itself, else "length".
        weight: its share of the weight of all particles; None where texts have none.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str
    weight: float | None = None


@dataclass(frozen=True)
class SearchUse:
    """What searching did in a reply.

    Attributes:
        search: as it was asked for.
        lossless: whether the text is the one that plain decoding with these options and this seed gives.
        passes: over the model, those of the prompt not counted.
        rows: tokens that were fed in them.
        branches: continuations that were started.
        trials: continuations among which was chosen; of searches token by token, tokens that were chosen differently
            from plain decoding.
        chosen: index in `texts` of the reply.
        texts: whole texts that were looked at; empty where a way only looks at a part at a time.
        divergence: of "anchored": nats by which the distributions that tokens were drawn from diverge from the draft
            model's, added up.
        divergence_allowed: nats that they might have diverged by.
    """

    search: str
    lossless: bool
    passes: int = 0
    rows: int = 0
    branches: int = 0
    trials: int = 0
    chosen: int = 0
    texts: tuple[SearchedText, ...] = ()
    divergence: float | None = None
    divergence_allowed: float | None = None


@dataclass(frozen=True)
class ComputeUse:
    """What computing less did in a reply.

    Attributes:
        compute: as it was asked for.
        lossless: whether every token was made by the whole model after all.
        tokens: of the reply after its first, which the prompt's pass gives.
        reduced: of them, made with less than the whole model.
        layer_mask: blocks that ran for reduced tokens, [2i] and [2i+1] of layer i; of "entropy" empty.
        skipped_share: of all blocks of the tokens after the first, those that did not run for them.
        large_share: of "entropy" and "steps": tokens that the large model made, over all.
        switches: of the same: how often the other model took over.
        caught_up: tokens that were fed later, for the cache of a model or layer that had not seen them; of "steps",
            those that were read and not taken.
        parameter_share: of the same: parameters that the tokens went through, over those of the large model for each;
            catching up left out.
        decide_ms: deciding what to leave out, after the prompt.
        predicted_ms: of a reduced pass, by measured costs of blocks; None where these are not known.
        predicted_speedup: of such a pass over the whole model's, by the same costs.
        per_token_ms: measured time per token.
        plain_ms: of a pass of the whole model over one token; None where that is not known.
        saved_ms: by the reply as a whole against `plain_ms` for each token; below 0 it cost more.
        divergence: nats from the whole model's predictions, mean over all tokens, by those sampled; None without any.
        sampled: tokens that tell it.
        quality_floor: as it was asked for.
        stopped_at: tokens after which the floor ended it; None where it did not.
    """

    compute: str
    lossless: bool = False
    tokens: int = 0
    reduced: int = 0
    layer_mask: tuple[bool, ...] = ()
    skipped_share: float = 0.0
    large_share: float | None = None
    switches: int = 0
    caught_up: int = 0
    parameter_share: float | None = None
    decide_ms: float = 0.0
    predicted_ms: float | None = None
    predicted_speedup: float | None = None
    per_token_ms: float | None = None
    plain_ms: float | None = None
    saved_ms: float | None = None
    divergence: float | None = None
    sampled: int = 0
    quality_floor: float | None = None
    stopped_at: int | None = None


@dataclass(frozen=True)
class Result:
    """One finished reply.

    Attributes:
        experts: how experts were used; None for models without any.
        compute: how less compute was used; None where the whole model made every token.
        search: statistics of a search; None where there was none.
        remote: statistics of the server that decided the text; None where this machine's model did.
        stop_string: the stop string that ended the reply; None where none did.
        contexts: the contexts before the prompt; None where there were none.
        logprobs: of the text's tokens, if requested.
        sampling: version of sampling: the same seed gives the same text with the same version.
        schema_class: the class given as `json_schema`; None where it was none.
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
        """The value of a reply in JSON (`json_schema`): dictionaries, lists, texts and numbers, or an instance where a
        class was given.

        Raises:
            UsageError: the reply is no JSON, ended before its JSON did, or is refused by the class.
        """
        return read_reply(self.text, self.finish_reason, self.schema_class)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `edgeinfer run --json` prints."""
        data: dict[str, Any] = listed(asdict(self))
        del data["schema_class"]
        data["usage"]["total_tokens"] = self.usage.total_tokens
        return data if self.logprobs else {name: value for name, value in data.items() if name != "logprobs"}


def read_reply(text: str, finish_reason: str, schema_class: type[SchemaClass] | None) -> Any:
    """What a reply says: values of JSON, or an instance of a class."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if finish_reason != "stop":
            message = f"The reply ended ({finish_reason}) before its JSON did."
            raise UsageError(message, "Give it more tokens with max_tokens, or a larger context.") from error
        raise UsageError("The reply is not JSON.", "Ask for JSON with json_schema.") from error
    if schema_class is None:
        return found
    try:
        return schema_class.model_validate_json(text)
    except ValueError as error:  # pydantic's, of checks that no schema has
        message = f"{schema_class.__name__} refuses the reply: {' '.join(str(error).split())[:300]}"
        raise UsageError(message, "Ask again with another seed, or read result.text.") from error
