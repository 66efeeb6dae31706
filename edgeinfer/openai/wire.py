"""Types of a chat completion's request and answers, which are plain dictionaries of OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from edgeinfer.option_types import (
    ComputeOption,
    JsonSchema,
    RareReplyOptions,
    SamplingOption,
    SearchOption,
    SpeculationOption,
)


class ChatRequest(RareReplyOptions, total=False):
    """Fields of a request: OpenAI's, those that change nothing here, and options of `Model.generate`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    n: int | None
    logprobs: bool | None
    top_logprobs: int | None
    model: str
    max_completion_tokens: int | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    stream_options: Mapping[str, Any] | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    add_generation_prompt: bool
    repeat_penalty: float
    top_k: int
    choices: Sequence[str]
    json_schema: JsonSchema
    regex: str
    grammar: str
    sampling: SamplingOption
    speculation: SpeculationOption
    search: SearchOption
    compute: ComputeOption
    metadata: Mapping[str, str] | None
    modalities: Sequence[Literal["text"]]
    prediction: Mapping[str, Any] | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: str | None
    store: bool | None
    user: str
    verbosity: str | None


class FunctionObject(TypedDict):
    """What a tool call calls; the arguments are JSON."""

    name: str
    arguments: str


class ToolCallObject(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: FunctionObject


class MessageObject(TypedDict):
    """The answer's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallObject]]


class FunctionDelta(TypedDict, total=False):
    """A piece of what a tool call calls."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A piece of a tool call; `index` tells of which."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """A piece of the answer's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallDelta]


class LogprobsObject(TypedDict):
    """Log-probabilities of tokens."""

    content: list[dict[str, Any]]
    refusal: None


class ChoiceObject(TypedDict):
    """One of the replies."""

    index: int
    message: MessageObject
    logprobs: LogprobsObject | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChoiceDelta(TypedDict):
    """A piece of one of the replies."""

    index: int
    delta: MessageDelta
    logprobs: LogprobsObject | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class UsageObject(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class _Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    timings: NotRequired[dict[str, Any]]
    warnings: NotRequired[list[str]]


class ChatCompletionObject(_Head):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChoiceObject]
    usage: UsageObject


class ChatCompletionChunk(_Head):
    """A piece of an answer; `usage` is in the last where `stream_options` ask for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChoiceDelta]
    usage: NotRequired[UsageObject | None]
