"""Types of the options that callers write as dictionaries or by themselves, for type checkers and editors.

Each key is an option that is declared once elsewhere (`edgeinfer/options.py`); tests/edgeinfer/test_option_types.py
holds names and types equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from edgeinfer.adaptive import ReducedCompute, SkipCache
from edgeinfer.config import Cache, CountedPages, KvType, OverflowPolicy, WeightsMode
from edgeinfer.drafting import Speculation
from edgeinfer.remote_options import RemoteApi, RemoteLoss
from edgeinfer.reply_options import Sampling
from edgeinfer.schema_classes import SchemaClass
from edgeinfer.searching import Answer, Search

Prompt: TypeAlias = str | Sequence[int]
JsonSchema: TypeAlias = Mapping[str, Any] | str | type[SchemaClass]


class _RareSampling(TypedDict, total=False):
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float


class SamplingDict(_RareSampling, total=False):
    """`Sampling` as a dictionary."""

    logit_bias: Mapping[int, float]
    temperature: float
    top_p: float
    top_k: int
    seed: int | None


class _SearchSettings(TypedDict, total=False):
    samples: int
    rounds: int
    answer: Answer
    voters: int | None
    beams: int
    beam_groups: int
    diversity: float
    length_penalty: float
    candidates: int | None
    passage: str | None
    anchor_budget: float
    anchor_debt: int
    resistance: Sequence[float]
    resistance_weight: float


class SearchDict(_SearchSettings, total=False):
    """`Search` as a dictionary."""

    method: str


class _ComputeSettings(TypedDict, total=False):
    compute_speedup: float
    compute_share: float
    entropy_threshold: float | None
    entropy_stay: int
    exit_layer: int | None
    exit_confidence: float
    skip_cache: SkipCache
    quality_floor: float | None


class ReducedComputeDict(_ComputeSettings, total=False):
    """`ReducedCompute` as a dictionary."""

    method: str


class _DraftLength(TypedDict, total=False):
    draft_max: int | None


class _ReplyDrafting(_DraftLength, total=False):
    draft_width: int
    verification: str


class _LoadDrafting(_DraftLength, total=False):
    draft_experts: int | None
    remember: bool


class SpeculationDict(_ReplyDrafting, _LoadDrafting, total=False):
    """`Speculation` as a dictionary."""

    drafters: str


class CacheDict(TypedDict, total=False):
    """`Cache` as a dictionary."""

    kv: KvType | None
    overflow: OverflowPolicy
    prefix_cache: int | str


SamplingOption: TypeAlias = Sampling | SamplingDict
SpeculationOption: TypeAlias = str | Speculation | SpeculationDict
SearchOption: TypeAlias = str | Search | SearchDict
ComputeOption: TypeAlias = str | ReducedCompute | ReducedComputeDict
CacheOption: TypeAlias = Cache | CacheDict


class RareReplyOptions(_RareSampling, _SearchSettings, _ComputeSettings, _ReplyDrafting, total=False):
    """Options of replies that few need, and those of `sampling`, `search`, `compute` and `speculation` by themselves.

    Attributes:
        stop_token_ids: token ids that end the reply, in addition to the model's own.
        ignore_eos: do not stop at the model's end-of-text tokens.
        json_object: the reply must be a JSON object.
        parse_special: whether special tokens spelled out in the prompt become those tokens; None: in prompts, but not
            in messages.
        checker: function of a text and whether it has ended: whether the reply may begin so, or be that.
        thinking_budget: maximum number of tokens of a thought, whose end tag is forced then; None: no limit.
        adapter: name of the adapter that the reply is made with, of those that the model was loaded with; None: none.
        steering: steering vectors of the model's bundle and how strongly they move its text: "story:1.5,terse".
        method_options: options of a chosen method that are not listed here, by name.
    """

    adapter: str | None
    steering: str | None
    method_options: Mapping[str, Any]
    checker: Callable[[str, bool], bool] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_object: bool
    thinking_budget: int | None
    parse_special: bool | None


class RareGenerationOptions(RareReplyOptions, total=False):
    """The same with what requests over HTTP spell in another way."""

    logit_bias: Mapping[int, float]


class GenerationOptions(RareGenerationOptions, total=False):
    """All options of replies; `Model.generate` tells what each is."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    choices: Sequence[str] | None
    json_schema: JsonSchema | None
    regex: str | None
    grammar: str | None
    logprobs: int | None
    sampling: SamplingOption | None
    speculation: SpeculationOption | None
    search: SearchOption | None
    compute: ComputeOption | None


class RareLoadOptions(CacheDict, _LoadDrafting, total=False):
    """Options of loading that few need, and those of `cache` and `speculation` by themselves.

    Attributes:
        adapters: folders of LoRA adapters in PEFT's layout, by the names that replies choose them by.
        gpu_layers: layers of a GGUF model to run on a graphics processor, the last first, or "auto".
        inter_token_latency: milliseconds between tokens of replies side by side while the prompt of another is
            evaluated, of which each pass takes as much as there is time for; None is twice as many as without it.
        structured: plan memory for replies by a schema, an expression or a grammar from the start, not when the first
            is asked for.
        remote: URL of a server whose model decides the text while the loaded one drafts; prompts and replies leave this
            machine.
        remote_api: what the server speaks: "edgeinfer", "sglang", "vllm" or "openai"; None is as it says itself.
        remote_model: name of the server's model; None is the first that it lists.
        remote_key: API key of that server.
        remote_digest: sha256 that the server's model must have; None is any.
        remote_loss: what to do when the server is lost: "stop", the default, or "local", which is lossy.
        remote_draft_price: milliseconds of waiting that a drafted token must save, for its energy.
        remote_kilobyte_price: milliseconds of waiting that a kilobyte sent or received must save, for its energy.
        rpc: RPC servers of llama.cpp that hold layers of a GGUF model, as "HOST:PORT,..."; they have no encryption.
        rpc_public: allow such servers outside this machine and private networks.
    """

    adapters: Mapping[str, str | Path]
    gpu_layers: int | str | None
    inter_token_latency: float | None
    structured: bool | None
    remote: str | None
    remote_api: RemoteApi | None
    remote_model: str | None
    remote_key: str | None
    remote_digest: str | None
    remote_loss: RemoteLoss
    remote_draft_price: float
    remote_kilobyte_price: float
    rpc: str | None
    rpc_public: bool


class LoadOptionsButContext(RareLoadOptions, total=False):
    """Options of loading for what chooses the context itself; `edgeinfer.load` tells what each is."""

    memory: int | str | None
    bits: int | None
    threads: int | None
    device: str | None
    draft_model: str | Path | None
    speculation: SpeculationOption | None
    cache: CacheOption | None
    backend: str | None
    weights: WeightsMode | None
    expert_memory: int | str | None
    counted: CountedPages | None
    exact: bool | None
    native: bool | None
    prefill_chunk: int | None
    parallel: int | None
    profile: str | Path | None
    idle_unload: float | None


class LoadOptions(LoadOptionsButContext, total=False):
    """All options of loading."""

    context: int | None
