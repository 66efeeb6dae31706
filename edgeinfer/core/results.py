"""Results of replies: text with its timings, memory, speculation and facts of the model. Field names are those of
`edgeinfer run --json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import SchemaClass
from edgeinfer.core.records import dataclass, listed
from edgeinfer.core.version import SAMPLING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Placement = Literal["parallel", "sequence"]
FinishReason = Literal["stop", "length", "cancelled"]
ThoughtEnd = Literal["model", "budget", "repetition", "request"]
# Called with what is being done, how many steps are done and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0  # of the completion's, those of thoughts and of the tags around them

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Durations in milliseconds, measured around this request."""

    load_ms: float  # loading the model, once per process
    prompt_ms: float  # evaluating the uncached part of the prompt
    ttft_ms: float  # from the request to the first token
    per_token_ms: float  # mean time per token after the first
    # `per_token_p50_ms`, `per_token_p95_ms`: percentiles of the same.
    per_token_p50_ms: float
    per_token_p95_ms: float
    tokens_per_second: float  # decoded tokens after the first per second; 0 with fewer than two tokens
    cached_prompt_tokens: int  # prompt tokens whose KV was reused


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the whole process in bytes."""

    budget_bytes: int | None
    planned_bytes: int
    peak_rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    terms: dict[str, int] = field(default_factory=dict)  # the plan's
    # Held at the end of the reply by the model's parts, by the plan's terms, and by the process in all.
    used: dict[str, int] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()  # what the plan gave up to fit, then what was given up while the reply ran, in order
    # Resident at the end, each page divided by the processes that share it; None where it is unknown.
    pss_bytes: int | None = None


@dataclass
class DrafterUse:
    """What one drafter did in a reply."""

    rounds: int = 0  # passes that verified at least one of its tokens
    # `drafted`, `accepted`: its tokens.
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()  # accepted tokens by place in the draft, the first at index 0


@dataclass
class SpeculationUse:
    """What drafting did, counted while the reply is made; all zero when decoding was plain."""

    mode: str  # the option
    verification: str = "keyed"  # how drafts were verified
    lossless: bool = True  # whether the text has the distribution of the target model
    # Whether it is the text of plain decoding, bit for bit of the logits; None where that is unknown.
    exact: bool | None = None
    rounds: int = 0  # passes of the target that verified a draft or none, after the prompt's
    # `drafted`, `accepted`: tokens.
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0  # tokens that replaced the first rejected one of a draft
    bonus: int = 0  # tokens that followed a fully accepted draft, or an empty one
    rechecked: int = 0  # choices that were within rounding of a tie and repeated by a plain pass
    accepted_per_position: tuple[int, ...] = ()  # accepted tokens by place in the draft, the first at index 0
    acceptance_rate: float = 0.0  # accepted / drafted; 0 without drafts
    mean_accepted_length: float = 0.0  # tokens committed per pass of the target; 1 is plain decoding
    # `draft_ms`, `verify_ms`, `overhead_ms`: the time of the rounds; the last is choosing and bookkeeping.
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    # Rounds by the drafters chosen for them, joined by "+", or "none".
    choices: dict[str, int] = field(default_factory=dict)
    per_drafter: dict[str, DrafterUse] = field(default_factory=dict)  # statistics of each
    plain_ms: float | None = None  # a plain step, its median in this process; None before the first was timed
    speedup_vs_plain: float | None = None  # plain_ms over the reply's mean milliseconds per token

    def add_rounds(self, drafters: str, count: int = 1, *, accepted: int = 0, bonus: int = 0) -> None:
        """Count rounds with drafts of these drafters, and their tokens."""
        self.rounds += count
        self.accepted += accepted
        self.bonus += bonus
        self.recovered += count - bonus
        self.choices[drafters] = self.choices.get(drafters, 0) + count
        self.acceptance_rate = self.accepted / self.drafted if self.drafted else 0.0
        self.mean_accepted_length = 1 + self.accepted / self.rounds

    def add_round(self, sources: Sequence[str], accepted: Sequence[int], *, bonus: bool) -> None:
        """Count a round: the drafter of each drafted token, and the accepted ones."""
        self.drafted += len(sources)
        names = dict.fromkeys(sources)
        self.add_rounds("+".join(names) or "none", accepted=len(accepted), bonus=bonus)
        self.accepted_per_position = _raised(self.accepted_per_position, range(len(accepted)))
        for name in names:
            use = self.per_drafter.get(name)
            if use is None:
                use = self.per_drafter[name] = DrafterUse()
            mine = [place for place, node in enumerate(accepted) if sources[node] == name]
            use.rounds += 1
            use.drafted += sources.count(name)
            use.accepted += len(mine)
            use.accepted_per_position = _raised(use.accepted_per_position, mine)


def _raised(counts: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    """Counts by place with one more at each of some ascending places."""
    raised = [*counts, *[0] * (places[-1] + 1 - len(counts) if places else 0)]
    for place in places:
        raised[place] += 1
    return tuple(raised)


@dataclass(frozen=True)
class ExpertUse:
    """How the tokens of a model with experts used them."""

    experts: int  # experts of a layer
    top_k: int  # how many a token uses at most
    tokens: int  # counted tokens: those of prompt and reply whose keys and values were computed
    token_sparsity: float  # 1 minus the mean share of a layer's experts that a token uses
    # Likewise for the union over 2, 4 and 8 consecutive tokens; lengths without a text are left out.
    chunk_sparsity: dict[int, float]
    expert_bytes: int = 0  # size of all experts' weights; 0 where it is unknown, as below
    resident_bytes: int = 0  # size of those in memory at the end, where only some of them stay
    hit_rate: float | None = None  # share of the used experts that were in memory already; None where all stay


@dataclass(frozen=True)
class Overflow:
    """Tokens that context shift had removed from the cache when the reply was finished."""

    policy: str = "stop"  # the option `overflow`
    events: int = 0  # how often it made room since the start of the text, earlier turns included
    dropped: float = 0.0  # tokens without rows in the cache, a mean over heads
    merged: float = 0.0  # tokens whose keys and values were averaged with others', a mean over heads
    lossless: bool = True  # whether the reply is the one that a larger context would have given: true without an event


@dataclass(frozen=True)
class ModelInfo:
    """Which model answered."""

    name: str
    architecture: str
    parameters: int
    bits_per_weight: float
    backend: str
    kernel: str  # what multiplied matrices: an instruction set of the native kernel, else the operator or library
    device: str = "cpu"  # the device that ran it, as `edgeinfer devices` names them
    device_note: str = ""  # why it is not the requested device; empty where it is
    # When its files were compared with their digests: "now", "before" where large ones have not changed since, "first"
    # where a file without a digest was trusted, "pending" before the first token.
    verified: str = ""


@dataclass(frozen=True)
class Embeddings:
    """Vectors of texts."""

    vectors: NDArray[np.float32]  # (N, D)
    tokens: int  # of all texts, with those that the tokenizer adds


@dataclass(frozen=True)
class RankedDocument:
    """A document and how well it answers a query."""

    index: int  # among the documents that were given
    score: float  # from 0 to 1


@dataclass(frozen=True)
class Ranking:
    """Documents by how well they answer a query."""

    documents: tuple[RankedDocument, ...]  # the best first
    tokens: int  # of all that was read


@dataclass(frozen=True)
class DeviceFacts:
    """A device that models may run on."""

    name: str  # as `--device` takes it
    provider: str  # onnxruntime's name of it, or "llama.cpp"
    package: str  # the pip package with the provider
    plugin: bool  # the package is installed in addition to onnxruntime, not instead of it
    # `installed`, `hardware`: whether the provider is there; whether it sees hardware, None where it is not installed.
    installed: bool
    hardware: bool | None
    bundles: str  # "all"; "static", those exported with --static; or "gguf", only GGUF files
    traits: dict[str, bool]  # capabilities of its kernels with bundles that are not static, by name
    memory: str  # where its arrays live; "cpu" is ordinary memory
    check: str  # "ok" where small models gave the results of the CPU, else why not; empty where it was not tried
    tried: str  # where edgeinfer was tested on it before its release
    # Instruction sets that the native kernel can use there, best first; empty without the kernel.
    kernels: tuple[str, ...] = ()
    description: str = ""  # the provider's description of the hardware, if any


@dataclass(frozen=True)
class LoadCosts:
    """The time of loading a model, and the tokenizer's part of it and of the anonymous memory."""

    total_ms: float
    tokenizer_ms: float
    tokenizer_bytes: int


@dataclass(frozen=True)
class PassWork:
    """The minimum work of one or several passes; attention counts where the tokens before the pass are known."""

    weight_bytes: int  # stored bytes of the weights, each read once per pass; only single rows of the embedding
    multiply_adds: int  # those of weights and of attention
    cache_bytes: int = 0  # stored bytes of the keys and values that the rows attend to, each read once per pass

    def __add__(self, other: PassWork) -> PassWork:
        weights, adds = self.weight_bytes + other.weight_bytes, self.multiply_adds + other.multiply_adds
        return PassWork(weights, adds, self.cache_bytes + other.cache_bytes)


@dataclass(frozen=True)
class DeviceLimits:
    """The peak rates of a machine."""

    kernel: str  # the instruction set that multiplies
    threads: int  # how many threads were used
    read_bytes_per_s: float  # memory read rate, beyond all caches
    # Rate for int8 values; None where the instruction set has no instruction for them.
    multiply_adds_per_s: float | None

    def floor_ms(self, work: PassWork) -> tuple[float, float | None]:
        """Milliseconds of only reading and of only multiplying; a pass takes at least the longer."""
        rate, read = self.multiply_adds_per_s, work.weight_bytes + work.cache_bytes
        return read / self.read_bytes_per_s * 1e3, work.multiply_adds / rate * 1e3 if rate else None


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token by the model itself, before bias, penalties, constraints, temperature, truncation."""

    token_id: int
    bytes: bytes  # its part of the text, maybe a part of a character
    logprob: float  # natural logarithm of its probability
    alternatives: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at its place, best first, maybe including itself


class Chunk(NamedTuple):
    """A piece of streamed text: whole characters only, possibly of several tokens, possibly empty. `logprobs` are of
    the tokens whose text starts here, if requested; none of a stop string or a thought."""

    text: str  # of the answer
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""  # of the thought that a chat's model writes before its answer
    thinking: bool = False  # whether the token belongs to a thought


@dataclass
class RemoteUse:
    """What a reply took of the model that decided it."""

    url: str  # of its server
    model: str = ""  # its name
    digest: str = ""  # sha256 of its weights and decoder, in hexadecimal digits
    rounds: int = 0  # drafts that it verified
    # `drafted`, `accepted`: tokens of these drafts, and those of them that it agreed with.
    drafted: int = 0
    accepted: int = 0
    streamed: int = 0  # tokens that it made without drafts
    # Tokens at the end that this machine's model made alone, as the server was lost: not the server's text.
    local: int = 0
    retries: int = 0  # requests that were sent again
    link_ms: float = 0.0  # median milliseconds of a round that the way took
    server_ms: float = 0.0  # median milliseconds of a round in the server


@dataclass(frozen=True)
class ContextUse:
    """The contexts that a reply was made with."""

    contexts: int  # how many
    tokens: int  # of all of them
    evaluated: int  # of these, those that were evaluated, as no file kept them
    edited: int  # contexts with rows that were turned to where an edit left them
    placement: Placement  # "parallel" or "sequence"
    temperature: float  # that scores of their keys were divided by
    # Whether the text is what evaluating all in one would give: of one context alone that was not edited.
    lossless: bool


@dataclass(frozen=True)
class SearchedText:
    """One of several texts that were looked at to the end."""

    text: str
    token_ids: tuple[int, ...]
    score: float  # mean natural log-probability of its tokens by the model itself, a stop token included
    finish_reason: str  # "stop" where it ended by itself, else "length"


@dataclass
class SearchUse:
    """What searching did in a reply."""

    search: str  # as it was asked for
    lossless: bool  # whether the text is the one that plain decoding with these options and this seed gives
    passes: int = 0  # over the model, those of the prompt not counted
    rows: int = 0  # tokens that were fed in them
    branches: int = 0  # continuations that were started
    # Continuations among which was chosen; of searches token by token, tokens that were chosen differently from plain
    # decoding.
    trials: int = 0
    chosen: int = 0  # index in `texts` of the reply
    # Whole texts that were looked at; empty where a way only looks at a part at a time.
    texts: tuple[SearchedText, ...] = ()


@dataclass
class ComputeUse:
    """What computing less did in a reply."""

    compute: str  # as it was asked for
    lossless: bool = False  # whether every token was made by the whole model after all
    tokens: int = 0  # of the reply after its first, which the prompt's pass gives
    reduced: int = 0  # of them, made with less than the whole model
    # Blocks that ran for reduced tokens, [2i] and [2i+1] of layer i; of "entropy" empty.
    layer_mask: tuple[bool, ...] = ()
    skipped_share: float = 0.0  # of all blocks of the tokens after the first, those that did not run for them
    large_share: float | None = None  # of "entropy": tokens that the large model made, over all
    switches: int = 0  # of the same: how often the other model took over
    caught_up: int = 0  # tokens that were fed later, for the cache of a model or layer that had not seen them
    # Of the same: parameters that the tokens went through, over those of the large model for each; catching up left
    # out.
    parameter_share: float | None = None
    decide_ms: float = 0.0  # deciding what to leave out, after the prompt
    predicted_ms: float | None = None  # of a reduced pass, by measured costs of blocks; None where these are not known
    predicted_speedup: float | None = None  # of such a pass over the whole model's, by the same costs
    per_token_ms: float | None = None  # measured time per token
    plain_ms: float | None = None  # of a pass of the whole model over one token; None where that is not known
    saved_ms: float | None = None  # by the reply as a whole against `plain_ms` for each token; below 0 it cost more
    # Nats from the whole model's predictions, mean over all tokens, by those sampled; None without any.
    divergence: float | None = None
    sampled: int = 0  # tokens that tell it
    quality_floor: float | None = None  # as it was asked for
    stopped_at: int | None = None  # tokens after which the floor ended it; None where it did not


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
        reasoning: the thoughts of a chat's reply, which are not part of `text`.
        thought_end: what ended the thought; "repetition" where it went in circles, "request" where it was asked to.
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
    reasoning: str = ""
    thought_end: ThoughtEnd | None = None

    @property
    def parsed(self) -> Any:
        """The value of a reply in JSON (`json_schema`), an instance where a class was given. UsageError where the reply
        is no JSON, ended before its JSON did, or is refused by the class."""
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
