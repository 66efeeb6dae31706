"""Loading a model and asking it for text. The way of the data: `load` has bundles opened and the parts of a model made
(`loading`); `Model.stream` turns a prompt into tokens and hands them to a `TokenStream`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from edgeinfer.async_replies import AsyncTokenStream, ReplyThread
from edgeinfer.batching import ReplyBatch, Seat, Turns, can_share
from edgeinfer.chat import Chat
from edgeinfer.core.contexts import Context
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.core.options.reply import GenerationConfig
from edgeinfer.core.options.types import GenerationOptions, LoadOptions, Prompt
from edgeinfer.core.results import Placement, Progress, Result
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelLifecycle, ModelParts
from edgeinfer.loaded import LoadedModel
from edgeinfer.loading import Bundles, LoadRequest, make_parts, planned_by
from edgeinfer.reply_decoding import GenerationRequest, require_plain, require_shareable
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.system.memory import allocating
from edgeinfer.runtime.text.streaming import CallMark
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.tokenizing import chat_template, several, token_ids
from edgeinfer.verification_round import VerificationStream

if TYPE_CHECKING:
    from edgeinfer.context_model import ContextModel
    from edgeinfer.openai.contract import ChatCompletionChunk, ChatCompletionObject, ChatRequest


StreamT = TypeVar("StreamT", bound=TokenStream)


def load(model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadOptions]) -> Model:
    """Load a model.

    Args:
        model: a bundle or checkpoint directory, a .gguf file, ORG/NAME of the hub or a name of `catalog`; None is the
            built-in model. A model that is not on this machine is fetched, and a checkpoint converted, once.
        progress: called with a stage, steps done and steps in all while weights are converted, once on a device.
        options: memory="600MB", context=4096, threads=4 and the other keys of `LoadOptions`, which documents each.

    Raises:
        ModelError, StorageError: the bundle is missing or damaged; there is no place for converted weights.
        BudgetError: it does not fit `memory`; the error carries the breakdown and the smallest budget that would do.
        UsageError: an option is unknown or out of range.
    """
    config = LoadConfig.of(**options)
    started = time.perf_counter()
    with allocating("The model"):
        bundles = Bundles.open(model, config, progress).within(config)

    def make(started: float, plan: MemoryPlan | None) -> ModelParts:
        return make_parts(LoadRequest(bundles, config, progress if plan is None else None, started, plan))

    lifecycle = ModelLifecycle(make, started, config.idle_unload, aside=config.remember)
    return Model(lifecycle, chat_template(bundles.target), config.inter_token_latency)


def plan(model: str | Path | None = None, **options: Unpack[LoadOptions]) -> MemoryPlan:
    """Plan what `load` with the same arguments would take and how fast it would run, and list the alternatives.

    Nothing is loaded. A plan that does not fit is returned too.

    Args:
        model: as `load` takes it.
        options: as `load` takes them.

    Raises:
        ModelError, UsageError: as `load`.
    """
    config = LoadConfig.of(**options)
    with planned_by(model, config) as found:
        return Bundles.open(found, config).plan(config, all_ways=True)


async def aload(
    model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> Model:
    """`load` for asynchronous programs: the event loop keeps running.

    Args:
        model, progress, options: as `load` takes them; `progress` is called on another thread.
    """
    import asyncio  # 4 MB that programs without an event loop save

    loading = asyncio.get_running_loop().run_in_executor(None, lambda: load(model, progress=progress, **options))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        # Loading cannot be stopped half way.
        loading.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().close())
        raise


class Model(LoadedModel):
    """A loaded model. It holds one KV cache, so it makes one reply at a time, and others wait (`TokenStream.pause`);
    the part that a prompt shares with the one before is not evaluated again.

    Attributes:
        reply_thread: the thread that makes replies for event loops.
    """

    def __init__(
        self, lifecycle: ModelLifecycle, template: ChatTemplate | None, inter_token_latency: float | None
    ) -> None:
        super().__init__(lifecycle, template)
        self.reply_thread = ReplyThread(self._open_batch)
        self._inter_token_latency = inter_token_latency
        self._seat = Seat()
        self._context_models: dict[tuple[object, ...], ContextModel] = {}

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Result:
        """Continue a prompt and return the whole reply.

        Args:
            prompt: text, or token ids.
            options: max_tokens=100, temperature=0.7, stop="." and the other keys of `GenerationOptions`, which
                documents each.

        Raises:
            PromptError: the prompt is empty, or neither text nor token ids.
            ContextLengthError: it leaves no room for a reply.
            UsageError: an option is unknown or out of range, or another reply is running.
        """
        return self.stream(prompt, **options).complete()

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> TokenStream:
        """Continue a prompt chunk by chunk: `for chunk in model.stream("Once"): print(chunk.text, end="")`.

        Args:
            prompt: text, or token ids.
            options: as `generate` takes them.

        Raises:
            PromptError, ContextLengthError, UsageError: as `generate`.
        """
        started = time.perf_counter()
        config = GenerationConfig.of(**options)
        ids = self._prompt_ids(prompt, config)
        return self._start(GenerationRequest(prompt=ids, config=config, started=started, continues=True))

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Result:
        """`generate` for asynchronous programs: the event loop keeps running, and a cancelled task ends the reply.

        Arguments and errors are those of `generate`.
        """
        return await self.astream(prompt, **options).complete()

    def astream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncTokenStream:
        """`stream` for asynchronous programs: `async for chunk in model.astream("Once"): print(chunk.text, end="")`.

        As many replies as the model was loaded for with `parallel` share passes; more, and those of one conversation,
        wait for each other. Leaving the loop early ends the reply; `async with` does so at once. Arguments are those of
        `generate`; errors are raised when the first chunk is awaited.
        """
        return AsyncTokenStream(self.reply_thread, lambda: self.stream(prompt, **options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        prefill: str = "",
        tokens: Sequence[int] | None = None,
        calls: CallMark | None = None,
        on_finish: Callable[[Result], None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TokenStream:
        """Answer OpenAI-style messages, chunk by chunk.

        Args:
            messages: mappings with "role" and "content".
            tools: functions that the chat template describes to the model, in OpenAI's form.
            variables: further variables of the template, such as enable_thinking.
            prefill: the start of the reply; the stream continues after it.
            tokens: the result of `tokenize_chat` for all of this, if it was called before.
            calls: the start of function calls in the reply; stop strings only count before them.
            on_finish: called once with the result, also when the reply is cut short.
            options: as `generate` takes them; sampling options that are left out are those that the model's makers
                recommend (`Model.sampling`).

        Raises:
            TemplateError: the model has no chat template, or its template rejects the messages.
            UsageError, PromptError, ContextLengthError: as `generate`.
        """
        started = time.perf_counter()
        config = GenerationConfig.for_chat(self.sampling, options)
        asked: dict[str, Any] = {"tools": tools, "variables": variables, "prefill": prefill, "fitting": True}
        asked["parse_special"] = config.parses_content
        if tokens is None:
            tokens = self.tokenize_chat(messages, **asked)
        return self._start(
            GenerationRequest(
                prompt=list(tokens),
                config=config,
                started=started,
                continues=bool(prefill),
                rephrased=lambda text: self.tokenize_chat(_asking(messages, text), **asked),
                calls=calls,
                on_finish=on_finish,
            )
        )

    def chat(self, system: str | None = None, *, history: Sequence[Mapping[str, Any]] = ()) -> Chat:
        """Start a conversation: `chat = model.chat("You are a pirate."); chat.send("Hello").text`.

        Args:
            system: text of the system message, if any.
            history: earlier messages with "role" and "content". A system message may come first.

        Raises:
            UsageError: a message of the history is malformed.
        """
        return Chat(self, system, history)

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False, **request: Unpack[ChatRequest]
    ) -> ChatCompletionObject: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **request: Unpack[ChatRequest]
    ) -> Iterator[ChatCompletionChunk]: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool, **request: Unpack[ChatRequest]
    ) -> ChatCompletionObject | Iterator[ChatCompletionChunk]: ...

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **request: Unpack[ChatRequest]
    ) -> ChatCompletionObject | Iterator[ChatCompletionChunk]:
        """Answer as OpenAI's chat completions do: with a dictionary, or an iterator of chunks with `stream=True`.

        Args:
            messages: OpenAI-style messages.
            stream: return chunks.
            request: OpenAI's other fields, such as tools, response_format or max_tokens, and all options of `generate`.

        Raises:
            UsageError: a field that edgeinfer does not support, or as `stream_chat`.
        """
        from edgeinfer.openai import chat_completion  # programs that send no such messages do without

        given = {name: value for name, value in request.items() if value is not None}
        return chat_completion(self, messages, stream=stream, **given)

    def check(self, **options: Unpack[GenerationOptions]) -> None:
        """Validate options of `generate` without generating. Safe from any thread.

        A hostile schema or grammar takes some seconds to recognize, which a reply with the same options then saves.

        Raises:
            UsageError: an option is unknown or out of range, or a schema or grammar is too large or too expensive.
        """
        from edgeinfer.runtime.sampling.grammar import check_grammar

        check_grammar(GenerationConfig.of(**options))

    def _prompt_ids(self, prompt: Prompt, config: GenerationConfig) -> list[int]:
        ids = self.tokenize_prompt(prompt, parse_special=config.parses_prompt) if isinstance(prompt, str) else prompt
        return token_ids(ids)

    def unload(self) -> None:
        """Free the model's memory; the next request loads it again by the same plan and continues the same text.

        Raises:
            UsageError: another thread is running a reply, or one is paused.
        """
        with self._turns.work():
            if self._turns.paused:
                raise UsageError("A paused reply needs the model.", "Finish or close its stream first.")
            self._lifecycle.unload()
        if self._template is not None:
            self._template.close()

    def close(self) -> None:
        """Free the model, which is unusable afterwards.

        Replies of other threads end as "cancelled"; other work of other threads ends first, then the memory is freed.
        """
        self._lifecycle.shut()
        self._turns.close()
        self.reply_thread.close()
        self._lifecycle.close()
        if self._template is not None:
            self._template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def can_batch(self) -> bool:
        """Whether replies can be made side by side in shared passes."""
        return can_share(self._parts)

    def reply_batch(self, parallel: int, *, streamed: bool = True) -> ReplyBatch:
        """Open a batch of replies that are made side by side, each with the text it would have alone. It reserves the
        model until it is closed. `generate_batch` is the simple way.

        Args:
            parallel: replies side by side at most.
            streamed: replies are read as they come; else prompts take precedence over the time between tokens.

        Raises:
            CapabilityError: replies of this model cannot share passes.
            UsageError: another thread runs a reply, or works with the model.
        """
        latency = self._inter_token_latency if streamed or self._inter_token_latency is not None else math.inf
        return ReplyBatch(self._idle(), self._seat, parallel, latency)

    def _open_batch(self) -> ReplyBatch | None:
        parallel = self.plan.parallel
        return self.reply_batch(parallel) if parallel > 1 and self.can_batch else None

    def generate_batch(
        self, prompts: Sequence[Prompt], *, parallel: int = 8, **options: Unpack[GenerationOptions]
    ) -> list[Result]:
        """Continue several prompts side by side in shared passes; each reply is the one that `generate` gives.

        A common start of prompts is evaluated once. Drafts are unnecessary: a pass over several rows costs little more
        than one over a single row.

        Args:
            prompts: texts, or token ids.
            parallel: replies side by side at most.
            options: as `generate` takes them, except those that take less than the whole model.

        Raises:
            PromptError, ContextLengthError: one of the prompts is empty, or leaves no room for a reply.
            CapabilityError: replies of this model cannot share passes.
            UnshareableError: an option takes less than the whole model.
            UsageError: an option is unknown or out of range; another reply is running.
        """
        config = GenerationConfig.of(**options)
        return self._batch([self._prompt_ids(prompt, config) for prompt in several(prompts)], config, parallel)

    def chat_batch(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        parallel: int = 8,
        **options: Unpack[GenerationOptions],
    ) -> list[Result]:
        """Answer several conversations side by side, as `generate_batch` continues prompts.

        Args:
            conversations: OpenAI-style messages of each.
            parallel: replies side by side at most.
            options: as `stream_chat` takes them, except those that take less than the whole model.

        Raises:
            TemplateError: the model has no chat template, or its template rejects some messages.
            PromptError, ContextLengthError, CapabilityError, UnshareableError, UsageError: as `generate_batch`.
        """
        config = GenerationConfig.for_chat(self.sampling, options)
        special = config.parses_content
        ids = [self.tokenize_chat(each, fitting=True, parse_special=special) for each in conversations]
        return self._batch(ids, config, parallel)

    def _batch(self, ids: Sequence[list[int]], config: GenerationConfig, parallel: int) -> list[Result]:
        require_shareable(config)
        if parallel < 1:
            raise UsageError(f"parallel={parallel} is out of range.", "Give 1 or more.")
        with closing(self.reply_batch(parallel, streamed=False)) as batch:
            for tokens in ids:
                batch.check(tokens)

            def reply(place: int) -> Callable[[], TokenStream]:
                return lambda: self._start(GenerationRequest(prompt=ids[place], config=config))

            # Prompts with a common start come one after the other.
            order = sorted(range(len(ids)), key=lambda place: ids[place])
            results = dict(zip(order, batch.run(reply(place) for place in order), strict=True))
        return [results[place] for place in range(len(ids))]

    def load_chat(self, path: str | Path) -> Chat:
        """Open a conversation saved with `Chat.save`, to continue it with this model; errors as `Chat.open`."""
        return Chat.open(self, path)

    def with_contexts(
        self, contexts: Sequence[Context | str | Path], *, placement: Placement = "sequence", temperature: float = 1.0
    ) -> ContextModel:
        """The model with texts before every prompt, each evaluated once, separately, and kept in a file:
        `model.with_contexts(["notes.txt", "report.txt"]).generate("In short,")`.

        Texts do not attend to each other, so replies differ slightly from those to one joined text: `Result.contexts`
        says so.

        Args:
            contexts: text files, in their order before the prompt.
            placement: "sequence" rotates keys so that each text starts where the one before ends; "parallel" starts all
                at one position (APE), so that positions last longer.
            temperature: divisor of the scores of their keys; less than 1 sharpens attention to them.

        Raises:
            UsageError: there are no texts, or too many; an option is out of range.
        """
        from edgeinfer.context_model import ContextModel, remembered  # few programs use it

        idle = functools.partial(self._seat.idle, self._idle)
        made = ContextModel(self, self.reply_thread, self._start, idle, contexts, placement, temperature)
        return remembered(self._context_models, made)

    def verify_draft(
        self,
        prompt: Sequence[int],
        reply: Sequence[int] = (),
        draft: Sequence[int] = (),
        *,
        further: int = 0,
        acceptance: float = 0.7,
        **options: Unpack[GenerationOptions],
    ) -> VerificationStream:
        """Verify tokens that another model drafted for a reply: one pass accepts those that this model would have made
        itself, and adds one.

        Args:
            prompt: token ids.
            reply: tokens that were decided before.
            draft: tokens to verify after them.
            further: tokens that this model makes by itself afterwards.
            acceptance: expected share of accepted tokens; in a pass that other replies share, a smaller share means
                that less of the draft is evaluated.
            options: as `generate` takes them, the same for each round. Without a `seed`, rounds draw independently.

        Raises:
            PromptError, ContextLengthError: the prompt is empty, or text and draft leave no room for a token.
            UsageError: an option is unknown, out of range, or not of text that grows token by token.
        """
        config = GenerationConfig.of(**options)
        require_plain(config)
        request = GenerationRequest(prompt=token_ids(prompt), config=config, reply=tuple(reply), draft=tuple(draft))
        return self._begin(functools.partial(VerificationStream, further=further, acceptance=acceptance), request)

    def _start(self, request: GenerationRequest) -> TokenStream:
        return self._begin(TokenStream, request)

    @allocating("The reply")
    def _begin(
        self, make: Callable[[ModelParts, GenerationRequest, Turns | None], StreamT], request: GenerationRequest
    ) -> StreamT:
        self._turns.require_idle()
        seated = self._seat.parts  # another thread than the batch's was refused

        def finished(result: Result) -> None:
            self._lifecycle.leave()
            if request.on_finish is not None:
                request.on_finish(result)

        parts = self._lifecycle.take()
        try:
            text = [*request.prompt, *request.reply]
            parts.sequence.check(text, request.draft)
            if seated is not None:
                require_shareable(request.config)
                seated.sequence.use_adapter(request.config.adapter)
            turns = self._turns if seated is None else None
            return make(seated or parts, replace(request, on_finish=finished), turns)
        except BaseException:
            self._lifecycle.leave()
            raise


def _asking(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The messages with this text instead of the user's last message."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=len(messages))
    return [*messages[:last], {"role": "user", "content": text}, *messages[last + 1 :]]
