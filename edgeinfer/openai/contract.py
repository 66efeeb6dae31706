"""What requests need of a model, what a completion offers, and the types of chat requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NotRequired, Protocol, Self, TypedDict, TypeVar

from edgeinfer.core.contexts import Context
from edgeinfer.core.options.types import RequestDict
from edgeinfer.core.results import Chunk, ModelInfo, Result


class ChatRequest(RequestDict, total=False):
    """Fields of a request: OpenAI's, those that change nothing here, and options of `Model.generate`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    n: int | None
    logprobs: bool | None
    top_logprobs: int | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    model: str
    max_completion_tokens: int | None
    stream_options: Mapping[str, Any] | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    add_generation_prompt: bool
    repeat_penalty: float
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
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class FunctionDelta(TypedDict, total=False):
    """A piece of what a tool call calls."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A piece of the tool call number `index`."""

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
    reasoning_content: str
    reasoning: str


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
    completion_tokens_details: NotRequired[dict[str, int]]


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


Event = dict[str, Any]


class ReplyStream(Protocol):
    """A reply while it is made."""

    @property
    def result(self) -> Result: ...

    def __iter__(self) -> Iterator[Chunk]: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def close(self) -> None: ...

    def answer_now(self) -> bool: ...


StreamT = TypeVar("StreamT", bound=ReplyStream)
StreamT_co = TypeVar("StreamT_co", bound=ReplyStream, covariant=True)


class ChatModel(Protocol[StreamT_co]):
    """The part of `edgeinfer.Model` that requests use. Methods that take options are properties here, so that models
    may type their options."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def context(self) -> int: ...

    @property
    def begin_ids(self) -> list[int]: ...

    @property
    def chat_template_text(self) -> str | None: ...

    @property
    def sampling(self) -> Mapping[str, Any]: ...

    @property
    def tool_template_text(self) -> str | None: ...

    @property
    def check(self) -> Callable[..., None]: ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def tokenize_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    @property
    def tokenize_chat(self) -> Callable[..., list[int]]: ...

    @property
    def render_chat(self) -> Callable[..., str]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Sequence[int]) -> list[bytes]: ...

    def logits(self, tokens: Sequence[int], adapter: str | None = None) -> Iterator[Any]: ...

    def with_contexts(self, contexts: Sequence[Context]) -> Any: ...

    @property
    def stream(self) -> Callable[..., StreamT_co]: ...

    @property
    def stream_chat(self) -> Callable[..., StreamT_co]: ...


class Completion(Protocol):
    """One request. Its replies may be made in any order, even a chunk of each in turn. A streaming client is sent the
    events of `opening`, `chunk`, `finished` and `closing`, in order; others get `whole`, after `chunk` and `finished`
    were called for every reply too."""

    @property
    def n(self) -> int:
        """How many replies there are."""

    @property
    def stream(self) -> bool:
        """Whether the client wants events instead of the whole answer."""

    @property
    def ignored(self) -> Sequence[str]:
        """Fields of the request that other servers support and that are ignored here."""

    def check(self, model: ChatModel[Any]) -> None:
        """Validate the form of the reply, which may take seconds that `start` then saves. Safe from any thread."""

    def prepare(self, model: ChatModel[Any]) -> None:
        """Tokenize the prompts, which `start` then need not do. Call it once at most; from any thread where the model
        can tokenize while a reply runs."""

    def start(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None) -> StreamT:
        """Start a reply, on the model's thread."""

    def opening(self) -> list[Event]:
        """Events before any text."""

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        """Events of a chunk of a reply; may be empty."""

    def finished(self, index: int, result: Result) -> list[Event]:
        """Events of a reply's end, after its last chunk."""

    def closing(self) -> list[Event]:
        """Events after every reply's end."""

    def whole(self) -> Event:
        """The answer as one object, after every reply's end."""
