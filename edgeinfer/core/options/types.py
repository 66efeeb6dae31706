"""Types of the options that callers give, for type checkers and editors; each key has its option's help. Made from the
declarations by `python -m tests.tools.option_types`; a test holds the two equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from edgeinfer.core.options.decoding import Answer, ReducedCompute, Search, SkipCache, Speculation
from edgeinfer.core.options.load import Cache, CountedPages, KvType, OverflowPolicy, RemoteApi, RemoteLoss, WeightsMode
from edgeinfer.core.options.reply import Sampling, SchemaClass

Prompt: TypeAlias = str | Sequence[int]
JsonSchema: TypeAlias = Mapping[str, Any] | str | type[SchemaClass]


class _Sampling(TypedDict, total=False):
    temperature: float | None
    """Sampling temperature: 0 always picks the likeliest token, 0.7 is lively, above 1 is wild (default: what the
    model's makers recommend for chats, else 0)."""
    top_k: int | None
    """Sample from the K likeliest tokens (default: 0, all)."""
    top_p: float | None
    """Sample from the likeliest tokens whose probabilities add up to P (default: 1, all)."""
    min_p: float | None
    """Drop tokens less likely than P times the likeliest one (default: 0, none)."""
    top_n_sigma: float | None
    """Drop tokens whose logits are more than X standard deviations below the largest (default: 0, none)."""
    xtc_probability: float | None
    """Chance with which XTC excludes top choices (default: 0)."""
    xtc_threshold: float | None
    """Probability from which XTC excludes tokens, all but the least likely of them (default: 0.1)."""
    dynatemp_range: float | None
    """How far the temperature goes down where few tokens are likely, and up where many are (default: 0)."""
    dynatemp_exponent: float | None
    """Exponent of the entropy that dynatemp_range follows (default: 1)."""
    repetition_penalty: float | None
    """Penalty for tokens that already occurred; above 1 makes them less likely (default: 1)."""
    frequency_penalty: float | None
    """Subtract X from a token's logit for each time it occurred in the reply (default: 0)."""
    presence_penalty: float | None
    """Subtract X once from the logit of every token that occurred in the reply (default: 0)."""
    dry_multiplier: float | None
    """Penalty on tokens that would repeat what the text said before, such as 0.8 (default: 0, none)."""
    dry_base: float | None
    """Factor by which that penalty grows with each token of the repeat (default: 1.75)."""
    dry_allowed_length: int | None
    """Tokens of a repeat that the penalty still allows (default: 2)."""
    dry_penalty_last_n: int | None
    """Tokens of prompt and reply in which repeats are looked for; -1 is all, 0 none (default: -1)."""
    dry_sequence_breakers: Sequence[str] | None
    """A text that no repeat goes across; can be repeated (default: a line end, a colon, a quotation mark, a star)."""
    seed: int | None
    """Random seed; the same seed gives the same text (default: random)."""


class SamplingDict(_Sampling, total=False):
    """`Sampling` as a dictionary."""

    logit_bias: Mapping[int, float] | None
    """Values to add to the logits of the given token ids before anything else."""


class _Search(TypedDict, total=False):
    samples: int | None
    """Number of replies for samples, first-finish, best-of and vote, and in a round of aligned (default: 4)."""
    rounds: int | None
    """Rounds of samples that aligned learns from (default: 8)."""
    answer: Answer | None
    """What vote compares: the whole text of a reply, its last line, or its last number (default: text)."""
    voters: int | None
    """Number of replies whose answers vote counts, those of the most lines (default: all)."""
    beams: int | None
    """Number of beams (default: 4)."""
    beam_groups: int | None
    """Number of beam groups; each avoids the tokens of earlier ones (default: 1, ordinary beam search)."""
    diversity: float | None
    """Penalty on a token's log-probability for each earlier beam group that chose it (default: 0.5)."""
    length_penalty: float | None
    """Exponent of the length in a beam's score, log-probability / length^X (default: 1)."""
    candidates: int | None
    """Number of candidate tokens for momentum (default: 5)."""
    passage: str | None
    """Text of which extract finds the likeliest span."""
    resistance: Sequence[float] | None
    """Momentum's penalties for repeating 1, 2, ... tokens, comma-separated (default: 0,0,0,5)."""
    resistance_weight: float | None
    """Weight of momentum's penalties against a token's probability (default: 0.2)."""


class SearchDict(_Search, total=False):
    """`Search` as a dictionary."""

    method: str | None
    """Samples, several replies at once; first-finish, the first of several to end; best-of, the likeliest of several;
    vote, the most common answer of several; momentum, less repetition; extract, the likeliest span of a passage;
    aligned, replies of a form as likely as the model finds them; beam, beam search; all but samples are lossy
    (edgeinfer methods lists more; default: off)."""


class _Compute(TypedDict, total=False):
    compute_speedup: float | None
    """Target speedup of a pass that skips layers (default: 1.5)."""
    compute_share: float | None
    """Share of tokens that the large model generates, for entropy (default: 0.5)."""
    entropy_threshold: float | None
    """Entropy in bits above which the large model generates a token (default: derived from the share)."""
    entropy_stay: int | None
    """Minimum number of tokens before the other model takes over (default: 4)."""
    exit_layer: int | None
    """Number of layers after which a pass may end (default: as tuned, else the bundle's exit, else two thirds)."""
    exit_confidence: float | None
    """Probability of the likeliest token above which a pass ends early (default: 0.9)."""
    skip_cache: SkipCache | None
    """Keys and values of layers that an early exit left out: computed later (exact), or copied from the layer below
    (default: exact)."""
    quality_floor: float | None
    """Divergence from the full model's predictions above which the full model takes over (default: not checked)."""


class ReducedComputeDict(_Compute, total=False):
    """`ReducedCompute` as a dictionary."""

    method: str | None
    """How much of the model each token uses: full, all of it; entropy, the draft model writes the easy parts;
    calibrated, some layers are skipped; exit, a pass ends early once the first layers are sure of the token (edgeinfer
    methods lists more; default: full)."""


class _DraftLength(TypedDict, total=False):
    draft_max: int | None
    """Maximum number of draft tokens (default: 15, or fewer if memory is short)."""


class _LoadDrafting(_DraftLength, total=False):
    draft_experts: int | None
    """Experts per token when the model drafts for itself (default: half the usual number)."""
    remember: bool | None
    """False: do not keep what drafters learn from your texts (token ids and counts) for the next session."""


class _ReplyDrafting(_DraftLength, total=False):
    draft_width: int | None
    """Candidates per drafter and position; more than 1 drafts a tree (default: 1)."""
    verification: str | None
    """How drafts are verified: keyed gives the text of plain decoding, rejection gives its distribution (edgeinfer
    methods lists more; default: keyed)."""


class SpeculationDict(_ReplyDrafting, _LoadDrafting, total=False):
    """`Speculation` as a dictionary."""

    drafters: str | None
    """Speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle (edgeinfer methods
    lists them; default: auto)."""


class CacheDict(TypedDict, total=False):
    """`Cache` as a dictionary."""

    kv: KvType | None
    """KV cache data type: float32, float16, int8 or int4, for GGUF models float32, float16, q8_0 or q4_0; 8 and 4 bits
    are lossy (default: floats, or 8 bits if memory is short)."""
    overflow: OverflowPolicy | None
    """What to do when a conversation outgrows the context: stop; or drop (window) or merge (cluster) older tokens,
    which is lossy; auto takes what edgeinfer tune --cache found (default: stop)."""
    prefix_cache: int | str | None
    """Memory for the KV caches of other conversations, such as 50MB (default: none)."""


SamplingOption: TypeAlias = Sampling | SamplingDict
SpeculationOption: TypeAlias = str | Speculation | SpeculationDict
SearchOption: TypeAlias = str | Search | SearchDict
ComputeOption: TypeAlias = str | ReducedCompute | ReducedComputeDict
CacheOption: TypeAlias = Cache | CacheDict


class RequestDict(_Sampling, _Search, _Compute, _ReplyDrafting, total=False):
    """Options of replies that requests of OpenAI's shape give in the same form."""

    max_tokens: int | None
    """Maximum number of tokens to generate (default: until the context is full)."""
    stop: str | Sequence[str] | None
    """End the reply before this text; can be repeated."""
    stop_token_ids: Sequence[int] | None
    """Comma-separated token ids that end the reply, in addition to the model's own."""
    ignore_eos: bool | None
    """Do not stop at the model's end-of-text tokens."""
    choices: Sequence[str] | None
    """Restrict the reply to this text; can be repeated for more choices."""
    json_schema: JsonSchema | None
    """JSON schema that the reply must match, as a mapping or as text."""
    json_object: bool | None
    """Restrict the reply to a JSON object."""
    regex: str | None
    """Regular expression that the whole reply must match."""
    grammar: str | None
    """Grammar that the reply must match, in Lark's notation or GBNF."""
    checker: Callable[[str, bool], bool] | None
    """Function of a text and whether it has ended, which tells whether the reply may begin with it, or be it."""
    thinking_budget: int | None
    """Maximum number of tokens of a thought, such as between <think> and </think>; then its end is forced (default:
    none)."""
    thinking_message: str | None
    """Text to write at the end of a thought that is cut short (default: none)."""
    reasoning_format: str | None
    """None leaves the thoughts of a chat's reply in its text (default: auto, which tells them apart)."""
    parse_special: bool | None
    """Treat special tokens spelled out in the prompt as special tokens (default: only with --raw)."""
    search: SearchOption | None
    """Samples, several replies at once; first-finish, the first of several to end; best-of, the likeliest of several;
    vote, the most common answer of several; momentum, less repetition; extract, the likeliest span of a passage;
    aligned, replies of a form as likely as the model finds them; beam, beam search; all but samples are lossy
    (edgeinfer methods lists more; default: off)."""
    compute: ComputeOption | None
    """How much of the model each token uses: full, all of it; entropy, the draft model writes the easy parts;
    calibrated, some layers are skipped; exit, a pass ends early once the first layers are sure of the token (edgeinfer
    methods lists more; default: full)."""
    speculation: SpeculationOption | None
    """Speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle (edgeinfer methods
    lists them; default: auto)."""
    adapter: str | None
    """Name of the adapter to use, of those that --lora names (default: none)."""
    steering: str | None
    """Steering vectors of the model's bundle to add to its logits, and how strongly, such as story:1.5,terse (default:
    none)."""
    sampling: SamplingOption | None
    """How tokens are drawn, all of it; options given by themselves take precedence."""


class ReplyDict(RequestDict, total=False):
    """All options of replies."""

    logit_bias: Mapping[int, float] | None
    """Values to add to the logits of the given token ids before anything else."""
    logprobs: int | None
    """Return the log-probabilities of the reply's tokens (`Result.logprobs`) and of this many of the likeliest tokens
    at each position; True is 0, the reply's tokens alone (default: none)."""


class LoadDictButContext(CacheDict, _LoadDrafting, total=False):
    """Options of loading where the context is given in another way."""

    memory: int | str | None
    """Memory budget for the whole process, such as 600MB or 1.5GiB; options that are left out are chosen for the
    highest speed within it (default: none)."""
    bits: int | None
    """Bits per weight when a checkpoint is converted on first use, on average: 2, 3, 4, 5, 6, 8 or 32 (default: as many
    as the model needs, or as fit in memory)."""
    calibration: bool | None
    """False: convert a checkpoint in seconds, without running it over a text to see which weights matter; it takes more
    space or loses more."""
    threads: int | None
    """Number of CPU threads (default: as found by edgeinfer tune, else one per fast core it may use)."""
    exact: bool | None
    """False: skip the padding that keeps the text the same however it is computed; up to 20% faster on some models."""
    prefill_chunk: int | None
    """Prompt tokens processed per pass (default: as found by edgeinfer tune, else 64, or fewer if memory is short)."""
    backend: str | None
    """Inference backend: onnx, llamacpp or reference (default: the model's own)."""
    native: bool | None
    """Run on the native kernel, or with --no-native on ONNX Runtime's own operators, which are slower (default: the
    kernel where it works)."""
    speculation: SpeculationOption | None
    """Speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle (edgeinfer methods
    lists them; default: auto)."""
    draft_model: str | Path | None
    """Draft model, a small model with the same tokenizer: bundle directory, .gguf file or hub id; or off (default: the
    one in the bundle, if any)."""
    weights: WeightsMode | None
    """Where the weights are kept: packed in memory, mapped from their file, mapped with experts loaded on demand
    (experts), or streamed a few layers at a time (default: the fastest that fits)."""
    expert_memory: int | str | None
    """Memory for the experts of a mixture-of-experts model, such as 200MB (default: all of them, or what fits)."""
    counted: CountedPages | None
    """Pages that count against the memory budget: all resident pages, or only anonymous ones, which have no file behind
    them (default: resident)."""
    idle_unload: float | None
    """Unload the model after this many seconds without a request (default: never)."""
    profile: str | Path | None
    """Tuned settings: a file written by edgeinfer tune --out, or off (default: those kept for this user)."""
    parallel: int | None
    """Number of replies side by side to plan memory for (default: 1)."""
    structured: bool | None
    """Plan memory for replies by a schema, an expression or a grammar from the start (default: when one comes)."""
    inter_token_latency: float | None
    """Milliseconds between tokens of replies while the prompt of another is evaluated with them (default: twice as many
    as without it)."""
    adapters: Mapping[str, str | Path] | None
    """Folders of LoRA adapters in PEFT's layout that replies may be made with, by name."""
    device: str | None
    """Device to run on: auto, or one listed by `edgeinfer devices`, such as openvino:NPU, or Vulkan0 for GGUF models
    (default: auto)."""
    gpu_layers: int | str | None
    """Layers of a GGUF model to run on a graphics processor, the last first: a number, or auto for as many as fit into
    its memory (default: none, or auto on such a device)."""
    remote: str | None
    """URL of a server whose model decides the text while the local one drafts; prompts and replies leave this machine,
    and the server's API key is read from EDGEINFER_REMOTE_KEY (default: none)."""
    remote_api: RemoteApi | None
    """What the server speaks: edgeinfer, which verifies drafts, or openai, which any server with /v1/completions speaks
    and which streams alone (default: as its list of models says)."""
    remote_model: str | None
    """Name of the server's model to ask for (default: the first that it lists)."""
    remote_key: str | None
    """API key of that server."""
    remote_digest: str | None
    """Sha256 that the server's model must have, as its first answer says (default: any)."""
    remote_loss: RemoteLoss | None
    """What to do when the server cannot be reached any more: stop, or let the local model write the rest (local), which
    is lossy (default: stop)."""
    remote_draft_price: float | None
    """Milliseconds of waiting that a drafted token must save, for the energy it takes here (default: 0)."""
    remote_kilobyte_price: float | None
    """Milliseconds of waiting that a kilobyte sent or received must save, for the energy it takes (default: 0)."""
    rpc: str | None
    """RPC servers of llama.cpp that hold layers of a GGUF model, without encryption or keys (default: none)."""
    rpc_public: bool | None
    """Allow RPC servers outside this machine and private networks, where anyone can read and change what is sent
    (default: no)."""
    cache: CacheOption | None
    """The KV cache: `Cache`, or a dictionary such as {'kv': 'int8'}; options given by themselves take precedence."""


class LoadDict(LoadDictButContext, total=False):
    """All options of loading."""

    context: int | None
    """Context window for prompt and reply together, in tokens (default: 8192, or less if the model or memory is
    smaller)."""
