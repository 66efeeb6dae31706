"""What users ask a model for: text after a prompt, answers to messages, conversations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from edgeinfer.async_replies import AsyncTokenStream
from edgeinfer.batching import ReplyBatch
from edgeinfer.chat import Chat
from edgeinfer.config import GenerationConfig
from edgeinfer.contexts import Context, Placement
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelLifecycle
from edgeinfer.loaded import LoadedModel
from edgeinfer.option_types import (
    ComputeOption,
    GenerationOptions,
    JsonSchema,
    Prompt,
    RareGenerationOptions,
    SamplingOption,
    SearchOption,
    SpeculationOption,
    given_by,
)
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.reply_thread import ReplyThread
from edgeinfer.results import Result
from edgeinfer.runtime.text.stopping import CallMark
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.tokenizing import token_ids

if TYPE_CHECKING:
    from edgeinfer.openai.wire import ChatCompletionChunk, ChatCompletionObject, ChatRequestFields


class Replying(LoadedModel):
    """A model that answers.

    Attributes:
        reply_thread: where replies for event loops are made.
    """

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        super().__init__(lifecycle, template)
        self.reply_thread = ReplyThread(self._open_batch)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        choices: Sequence[str] | None = None,
        json_schema: JsonSchema | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        logprobs: int | None = None,
        sampling: SamplingOption | None = None,
        speculation: SpeculationOption | None = None,
        search: SearchOption | None = None,
        compute: ComputeOption | None = None,
        **rare: Unpack[RareGenerationOptions],
    ) -> Result:
        """Continues a prompt and returns the whole reply.

        Args:
            prompt: text, or token ids.
            max_tokens: most tokens to generate; None is until the context is full.
            temperature: 0, the default, takes the likeliest token each time; 0.7 is lively, above 1 is wild.
            top_p: choose among the likeliest tokens that together have this probability.
            top_k: choose among this many of the likeliest tokens.
            seed: the same seed gives the same text.
            stop: end the reply before this text, or before any of several.
            choices: the reply must be one of these texts.
            json_schema: the reply must be JSON that this schema allows; `Result.parsed` reads it. A class of pydantic's
                gives an instance.
            regex: the reply must match this regular expression from end to end.
            grammar: the reply must be a text of this grammar, in Lark's notation or GBNF.
            logprobs: give log-probabilities (True), and those of this many of the likeliest tokens at each place.
            sampling: how tokens are drawn, all of it; the parameters above go first.
            speculation: who drafts ahead: "auto", "off", or drafters of the model such as "copy,ngram".
            search: decode in another way than token by token, such as "beam" or "vote".
            compute: use less than the whole model, such as "exit"; all but "full" are lossy.
            rare: options that few need, and those of the four above by themselves, such as min_p=0.05 or beams=4.

        Raises:
            PromptError: the prompt is empty, or neither text nor token ids.
            ContextLengthError: it leaves no room for a reply.
            UsageError: an option is unknown or out of range, or another reply is running.
        """
        return self._stream(prompt, given_by(locals())).complete()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        choices: Sequence[str] | None = None,
        json_schema: JsonSchema | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        logprobs: int | None = None,
        sampling: SamplingOption | None = None,
        speculation: SpeculationOption | None = None,
        search: SearchOption | None = None,
        compute: ComputeOption | None = None,
        **rare: Unpack[RareGenerationOptions],
    ) -> TokenStream:
        """Continues a prompt, chunk by chunk: `for chunk in model.stream("Once"): print(chunk.text, end="")`.

        Args:
            prompt: text, or token ids.
            max_tokens: most tokens to generate; None is until the context is full.
            temperature: 0, the default, takes the likeliest token each time; 0.7 is lively, above 1 is wild.
            top_p: choose among the likeliest tokens that together have this probability.
            top_k: choose among this many of the likeliest tokens.
            seed: the same seed gives the same text.
            stop: end the reply before this text, or before any of several.
            choices: the reply must be one of these texts.
            json_schema: the reply must be JSON that this schema allows; `Result.parsed` reads it. A class of pydantic's
                gives an instance.
            regex: the reply must match this regular expression from end to end.
            grammar: the reply must be a text of this grammar, in Lark's notation or GBNF.
            logprobs: give log-probabilities (True), and those of this many of the likeliest tokens at each place.
            sampling: how tokens are drawn, all of it; the parameters above go first.
            speculation: who drafts ahead: "auto", "off", or drafters of the model such as "copy,ngram".
            search: decode in another way than token by token, such as "beam" or "vote".
            compute: use less than the whole model, such as "exit"; all but "full" are lossy.
            rare: options that few need, and those of the four above by themselves, such as min_p=0.05 or beams=4.

        Raises:
            PromptError, ContextLengthError, UsageError: as `generate`.
        """
        return self._stream(prompt, given_by(locals()))

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Result:
        """`generate` for asynchronous programs: the event loop goes on meanwhile, and a cancelled task ends the reply.

        Args:
            prompt: text, or token ids.
            options: as `generate` takes them: max_tokens, temperature, ... Errors are the same, too.
        """
        return await self.astream(prompt, **options).complete()

    def astream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncTokenStream:
        """`stream` for asynchronous programs: `async for chunk in model.astream("Once"): print(chunk.text, end="")`.

        As many replies as the model was loaded for with `parallel` share passes; more, and those of one conversation,
        wait for each other. Leaving the loop early ends the reply; `async with` does so at once.

        Args:
            prompt: text, or token ids.
            options: as `generate` takes them: max_tokens, temperature, ... Errors are the same, when first awaited.
        """
        given = dict(options)
        return AsyncTokenStream(self.reply_thread, lambda: self._stream(prompt, given))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        begun: str = "",
        tokens: Sequence[int] | None = None,
        calls: CallMark | None = None,
        on_finish: Callable[[Result], None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TokenStream:
        """Answers OpenAI-style messages, chunk by chunk.

        Args:
            messages: mappings with "role" and "content".
            tools: functions that the model's chat template tells it of, as OpenAI shapes them.
            variables: further names for the template, such as enable_thinking.
            begun: what the reply already says; the stream goes on behind it.
            tokens: what `tokenize_chat` gives for all that, where it was asked before.
            calls: what calls of functions begin with in the reply; stop strings are looked for in the text before them.
            on_finish: called once with the result, also when the reply is cut short.
            options: as `generate` takes them: max_tokens, temperature, ... Sampling options that are left out are those
                that the model's makers recommend (`Model.sampling`).

        Raises:
            TemplateError: the model has no chat template, or its template rejects the messages.
            UsageError, PromptError, ContextLengthError: as `generate`.
        """
        started = time.perf_counter()
        config = GenerationConfig.for_chat(self.sampling, options)
        asked: dict[str, Any] = {"tools": tools, "variables": variables, "begun": begun, "fitting": True}
        asked["parse_special"] = config.parses_content
        if tokens is None:
            tokens = self.tokenize_chat(messages, **asked)
        lame = [] if config.lame_prompt is None else self.tokenize_chat(_asking(messages, config.lame_prompt), **asked)
        return self._start(
            GenerationRequest(
                prompt=list(tokens),
                config=config,
                started=started,
                continues=bool(begun),
                lame=tuple(lame),
                calls=calls,
                on_finish=on_finish,
            )
        )

    def chat(self, system: str | None = None, *, history: Sequence[Mapping[str, Any]] = ()) -> Chat:
        """A conversation: `chat = model.chat("You are a pirate."); chat.send("Hello").text`.

        Args:
            system: text of the system message, if any.
            history: what was said before, as messages with "role" and "content". A system message may come first.

        Raises:
            UsageError: a message of the history is malformed.
        """
        return Chat(self, system, history)

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        n: int | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **rare: Unpack[ChatRequestFields],
    ) -> ChatCompletionObject: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        n: int | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **rare: Unpack[ChatRequestFields],
    ) -> Iterator[ChatCompletionChunk]: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        n: int | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **rare: Unpack[ChatRequestFields],
    ) -> ChatCompletionObject | Iterator[ChatCompletionChunk]: ...

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        n: int | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **rare: Unpack[ChatRequestFields],
    ) -> ChatCompletionObject | Iterator[ChatCompletionChunk]:
        """OpenAI's chat completion: a dictionary, or an iterator of chunks with `stream=True`.

        Args:
            messages: OpenAI-style messages.
            stream: give chunks.
            tools: functions that the reply may call, as OpenAI shapes them.
            tool_choice: "auto", "none", "required" or one function.
            parallel_tool_calls: whether one reply may hold several calls.
            response_format: the form of the reply: {"type": "json_object"}, or "json_schema" with a schema.
            max_tokens: most tokens of a reply.
            temperature: 0 takes the likeliest token each time; 0.7 is lively, above 1 is wild. Left out, it is what the
                model's makers recommend, or 0.
            top_p: choose among the likeliest tokens that together have this probability.
            seed: the same seed gives the same text.
            stop: end the reply before this text, or before any of several.
            n: replies to the same messages.
            logprobs: tell log-probabilities.
            top_logprobs: and those of this many of the likeliest tokens at each place.
            rare: OpenAI's other fields, and all options of `generate`.

        Raises:
            UsageError: a field that edgeinfer does not support, besides what `stream_chat` raises.
        """
        request = given_by(locals())
        from edgeinfer.openai import chat_completion  # which programs that send no messages in this form do without

        return chat_completion(self, messages, stream=stream, **request)

    def check(self, **options: Unpack[GenerationOptions]) -> None:
        """Refuses generation options that no reply can be given. A hostile schema or grammar takes some seconds to be
        found out, which a reply with the same options then need not take again. Safe from any thread.

        Args:
            options: as `generate` takes them.

        Raises:
            UsageError: an option is unknown or out of range, or a schema or grammar is too large, or takes too much.
        """
        from edgeinfer.runtime.sampling.grammar import check_grammar

        check_grammar(GenerationConfig.of(**options))

    def _stream(self, prompt: Prompt, options: Mapping[str, Any]) -> TokenStream:
        started = time.perf_counter()
        config = GenerationConfig.of(**options)
        ids = self._prompt_ids(prompt, config)
        return self._start(GenerationRequest(prompt=ids, config=config, started=started, continues=True))

    def _prompt_ids(self, prompt: Prompt, config: GenerationConfig) -> list[int]:
        ids = self.tokenize_prompt(prompt, parse_special=config.parses_prompt) if isinstance(prompt, str) else prompt
        return token_ids(ids)

    def with_contexts(
        self, contexts: Sequence[Context | str | Path], *, placement: Placement = "sequence", temperature: float = 1.0
    ) -> Any:
        """The model with texts before every prompt, as `Model` has it."""
        raise NotImplementedError

    def _open_batch(self) -> ReplyBatch | None:
        """What replies for event loops share passes by; None where they are made one after the other."""
        raise NotImplementedError

    def _start(self, request: GenerationRequest) -> TokenStream:
        """Begins a reply."""
        raise NotImplementedError


def _asking(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The same conversation with this in the place of the user's last message."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=len(messages))
    return [*messages[:last], {"role": "user", "content": text}, *messages[last + 1 :]]
