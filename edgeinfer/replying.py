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
from edgeinfer.option_types import GenerationOptions, Prompt
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.reply_thread import ReplyThread
from edgeinfer.results import Result
from edgeinfer.runtime.text.stopping import CallMark
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.tokenizing import token_ids

if TYPE_CHECKING:
    from edgeinfer.openai.wire import ChatCompletionChunk, ChatCompletionObject, ChatRequest


class Replying(LoadedModel):
    """A model that answers.

    Attributes:
        reply_thread: where replies for event loops are made.
    """

    def __init__(self, lifecycle: ModelLifecycle, template: ChatTemplate | None) -> None:
        super().__init__(lifecycle, template)
        self.reply_thread = ReplyThread(self._open_batch)

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
        return AsyncTokenStream(self.reply_thread, lambda: self.stream(prompt, **options))

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
        """Refuses generation options that no reply can be given. A hostile schema or grammar takes some seconds to be
        found out, which a reply with the same options then need not take again. Safe from any thread.

        Args:
            options: as `generate` takes them.

        Raises:
            UsageError: an option is unknown or out of range, or a schema or grammar is too large, or takes too much.
        """
        from edgeinfer.runtime.sampling.grammar import check_grammar

        check_grammar(GenerationConfig.of(**options))

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
