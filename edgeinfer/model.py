"""A loaded model: its facts, its tokenizer, and the text that it makes. `stream` turns a prompt into tokens and hands
them to a `TokenStream`, which the model's scheduler makes."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from edgeinfer.async_replies import AsyncTokenStream
from edgeinfer.batching import Replies, ReplyBatch, can_share
from edgeinfer.chat import Chat
from edgeinfer.core.contexts import Context
from edgeinfer.core.errors import ModelError, UnshareableError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.options.types import Prompt, ReplyDict
from edgeinfer.core.results import ExpertUse, LoadCosts, ModelInfo, Placement, Result
from edgeinfer.embedding import embed_texts, rank_documents
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelLifecycle, ModelParts, resume, save
from edgeinfer.model_thread import ModelThread
from edgeinfer.reply_decoding import GenerationRequest, require_plain
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.kv_cache.session_file import SessionFile, open_session
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.text.streaming import CallMark
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.tokenizing import TextEncoder, several, token_ids
from edgeinfer.verification_round import VerificationStream

if TYPE_CHECKING:
    from edgeinfer.context_model import ContextModel
    from edgeinfer.openai.contract import ChatCompletionChunk, ChatCompletionObject, ChatRequest
    from edgeinfer.runtime.tuning.measure import TokenScores

StreamT = TypeVar("StreamT", bound=TokenStream)


class Model:
    """A loaded model. It holds one KV cache, so it makes one reply at a time, and others wait (`TokenStream.pause`);
    the part that a prompt shares with the one before is not evaluated again.

    Attributes:
        reply_thread: the thread that makes replies for event loops.
    """

    def __init__(
        self, lifecycle: ModelLifecycle, template: ChatTemplate | None, inter_token_latency: float | None
    ) -> None:
        self._lifecycle, self._template = lifecycle, template
        self._texts = TextEncoder(lifecycle, template)
        self._replies = Replies(lifecycle, inter_token_latency)
        parallel = self.plan.parallel if self.can_batch else 1
        self.reply_thread = ModelThread(parallel, weakref.ref(self), daemon=False)
        self._context_models: dict[tuple[object, ...], ContextModel] = {}

    def generate(self, prompt: Prompt, **options: Unpack[ReplyDict]) -> Result:
        """Continue a prompt and return the whole reply.

        Args:
            prompt: text, or token ids.
            options: max_tokens=100, temperature=0.7, stop="." and the other keys of `ReplyDict`, which
                documents each.

        Raises:
            PromptError: the prompt is empty, or neither text nor token ids.
            ContextLengthError: it leaves no room for a reply.
            UsageError: an option is unknown or out of range, or another reply is running.
        """
        return self.stream(prompt, **options).complete()

    def stream(self, prompt: Prompt, **options: Unpack[ReplyDict]) -> TokenStream:
        """Continue a prompt chunk by chunk: `for chunk in model.stream("Once"): print(chunk.text, end="")`.

        Arguments and errors are those of `generate`.
        """
        started = time.perf_counter()
        config = ReplyOptions.of(**options)
        ids = self._prompt_ids(prompt, config)
        return self._replies.start(GenerationRequest(prompt=ids, config=config, started=started, continues=True))

    async def agenerate(self, prompt: Prompt, **options: Unpack[ReplyDict]) -> Result:
        """`generate` for asynchronous programs, with its arguments and errors: the event loop keeps running, and a
        cancelled task ends the reply."""
        return await self.astream(prompt, **options).complete()

    def astream(self, prompt: Prompt, **options: Unpack[ReplyDict]) -> AsyncTokenStream:
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
        **options: Unpack[ReplyDict],
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
        config = ReplyOptions.for_chat(self.sampling, options)
        asked: dict[str, Any] = {"tools": tools, "variables": variables, "prefill": prefill, "fitting": True}
        asked["parse_special"] = config.parses_content
        if tokens is None:
            tokens = self.tokenize_chat(messages, **asked)
        return self._replies.start(
            GenerationRequest(
                prompt=list(tokens),
                config=config,
                started=started,
                continues=bool(prefill),
                calls=calls,
                template=self.tool_template_text,
                prefill=prefill,
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

    def check(self, **options: Unpack[ReplyDict]) -> None:
        """Validate options of `generate` without generating. Safe from any thread. A hostile schema or grammar takes
        some seconds to recognize, which a reply with the same options then saves.

        Raises:
            UsageError: an option is unknown or out of range, or a schema or grammar is too large or too expensive.
        """
        from edgeinfer.runtime.sampling.grammar import check_grammar

        check_grammar(ReplyOptions.of(**options))

    def _prompt_ids(self, prompt: Prompt, config: ReplyOptions) -> list[int]:
        ids = self.tokenize_prompt(prompt, parse_special=config.parses_prompt) if isinstance(prompt, str) else prompt
        return token_ids(ids)

    def unload(self) -> None:
        """Free the model's memory; the next request loads it again by the same plan and continues the same text.

        Raises:
            UsageError: another thread is running a reply, or one is paused.
        """
        with self._replies.turns.work():
            if self._replies.turns.paused:
                raise UsageError("A paused reply needs the model.", "Finish or close its stream first.")
            self._lifecycle.unload()
        if self._template is not None:
            self._template.close()

    def close(self) -> None:
        """Free the model, which is unusable afterwards. Replies of other threads end as "cancelled"; other work of
        theirs ends first, then the memory is freed."""
        self._lifecycle.shut()
        self._replies.turns.close()
        self.reply_thread.cancel_shared()
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
        return self._replies.batch(parallel, streamed)

    def generate_batch(
        self, prompts: Sequence[Prompt], *, parallel: int = 8, **options: Unpack[ReplyDict]
    ) -> list[Result]:
        """Continue several prompts side by side in shared passes; each reply is the one that `generate` gives.

        A common start of prompts is evaluated once. Drafts are unnecessary: a pass over several rows costs little more
        than one over a single row.

        Args:
            prompts: texts, or token ids.
            parallel: replies side by side at most.
            options: as `generate` takes them, except those that take less than the whole model.

        Raises:
            PromptError, ContextLengthError, UsageError: as `generate`.
            CapabilityError, UnshareableError: replies of this model, or of these options, cannot share passes.
        """
        config = ReplyOptions.of(**options)
        return self._replies.all([self._prompt_ids(prompt, config) for prompt in several(prompts)], config, parallel)

    def chat_batch(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        parallel: int = 8,
        **options: Unpack[ReplyDict],
    ) -> list[Result]:
        """Answer several conversations side by side, as `generate_batch` continues prompts.

        Args:
            conversations: OpenAI-style messages of each.
            parallel: replies side by side at most.
            options: as `stream_chat` takes them, except those that take less than the whole model.

        Raises:
            TemplateError: the model has no chat template, or its template rejects some messages.
        """
        config = ReplyOptions.for_chat(self.sampling, options)
        special = config.parses_content
        ids = [self.tokenize_chat(each, fitting=True, parse_special=special) for each in conversations]
        return self._replies.all(ids, config, parallel)

    embed, rerank = embed_texts, rank_documents

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

        made = ContextModel(self._texts, self.reply_thread, self._replies, contexts, placement, temperature)
        return remembered(self._context_models, made)

    def verify_draft(
        self,
        prompt: Sequence[int],
        reply: Sequence[int] = (),
        draft: Sequence[int] = (),
        *,
        further: int = 0,
        acceptance: float = 0.7,
        **options: Unpack[ReplyDict],
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
        config = ReplyOptions.of(**options)
        require_plain(config)
        request = GenerationRequest(prompt=token_ids(prompt), config=config, reply=tuple(reply), draft=tuple(draft))
        make = functools.partial(VerificationStream, further=further, acceptance=acceptance)
        return self._replies.start_as(make, request)

    def __repr__(self) -> str:
        info = self.info
        kept = f"{info.bits_per_weight:.1f} bits, context {self.context}, {info.backend} on {info.device}"
        return f"<{type(self).__name__} {info.name}: {kept}>"

    @property
    def _parts(self) -> ModelParts:
        return self._lifecycle.parts()

    @property
    def plan(self) -> MemoryPlan:
        """The current memory plan."""
        return self._lifecycle.facts.plan

    @property
    def info(self) -> ModelInfo:
        """Which model this is."""
        return self._lifecycle.facts.info

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""
        return self._lifecycle.facts.plan.context

    @property
    def digest(self) -> str:
        """The sha256 of weights and decoder, in hexadecimal digits: it identifies the model wherever it is stored."""
        return self._lifecycle.facts.digest

    @property
    def vocabulary_digest(self) -> str:
        """The sha256 of the text of each token id: equal for models with the same vocabulary."""
        return self._parts.vocabulary_digest

    @property
    def in_memory(self) -> bool:
        """Whether the model is in memory now; if not, the next request loads it again."""
        return self._lifecycle.in_memory

    def reload(self) -> None:
        """Load the model again now, if it was unloaded, as the next request would; that tries again after an error."""
        self._lifecycle.parts()

    @property
    def threads(self) -> int:
        """How many threads a pass uses."""
        return self._lifecycle.facts.threads

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that replies can be made with."""
        return self._lifecycle.facts.adapters

    def require_contexts(self) -> None:
        """Refuse a model that cannot evaluate contexts separately (CapabilityError), before any text is read."""
        from edgeinfer.runtime.decoding.contexts import require_contexts

        with self._lifecycle.acquire(verified=False) as parts:
            require_contexts(parts.sequence, parts.decoder)

    @property
    def experts(self) -> ExpertUse | None:
        """How the tokens so far used experts since the model was last loaded; None where it has none."""
        watched = self._parts.watched
        return None if watched is None else watched.use()

    @property
    def load_costs(self) -> LoadCosts:
        """The time and memory that loading took."""
        return self._lifecycle.facts.load

    @property
    def begin_ids(self) -> list[int]:
        """The begin token, in a list; empty where the model has none."""
        return list(self._lifecycle.facts.begin_ids)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Generation options that the model's makers recommend. Chats use them unless the caller gives others."""
        return self._lifecycle.facts.sampling

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens that `tokenize` puts before every text: the begin token, or nothing where it adds none."""
        return self._texts.prefix_ids

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply, ascending."""
        return sorted(self._lifecycle.facts.end_ids)

    def logits(self, tokens: Sequence[int], adapter: str | None = None) -> Iterator[Floats]:
        """The logits after each token of a text, in arrays of a few rows (R, V); each overwrites the one before.
        Empties the cache; the model must not be used for anything else before the last array."""
        if self._replies.seated is not None:
            raise UnshareableError("Logits need the model to themselves.", "Ask for them when no reply is running.")
        self._replies.turns.require_idle()

        def rows(logits: Iterator[Floats]) -> Iterator[Floats]:
            with self._replies.idle():
                yield from logits

        with self._lifecycle.acquire() as parts:
            from edgeinfer.runtime.tuning.measure import token_logits

            parts.sequence.use_adapter(adapter)
            return rows(token_logits(parts.sequence, tokens))

    def score(self, tokens: Sequence[int], adapter: str | None = None) -> TokenScores:
        """Log-probabilities of a text, and the likeliest token after each of its tokens; empties the cache."""
        from edgeinfer.runtime.tuning.measure import score_tokens

        with self._replies.idle() as parts:
            parts.sequence.use_adapter(adapter)
            return score_tokens(parts.sequence, tokens)

    def save_session(self, path: str | Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
        """Write the contents of the cache to a file, from which `load_session` continues without evaluating it again.

        Args:
            tokens: write only the common prefix with these; None writes all.
            text: any text to keep in the file.

        Raises:
            StorageError: the path cannot be written.
        """
        with self._replies.idle() as parts:
            save(parts, Path(path), tokens, text)

    def load_session(self, path: str | Path) -> list[int]:
        """Take over what `save_session` wrote and return its token ids. Rows from other settings are computed again.
        UsageError where the file is missing, damaged or no session file; ModelError where it is another model's."""
        with open_session(Path(path)) as session, self._replies.idle() as parts:
            if session.origin.model != parts.origin.model:
                message = f"{path} was written by another model than {self.info.name}."
                raise ModelError(message, "Load the model it was written by.")
            resume(parts, session)
            return list(session.tokens)

    def resume(self, session: SessionFile) -> bool:
        """Take over the rows of an open session file, if they are this model's; return whether they were."""
        with self._replies.idle() as parts:
            return resume(parts, session)

    @property
    def tokenizes_concurrently(self) -> bool:
        """Whether other threads may tokenize texts while a reply is made."""
        return self._lifecycle.facts.tokenizes_concurrently

    @property
    def chat_template_text(self) -> str | None:
        """The source of the model's chat template; None where it has none."""
        return None if self._template is None else self._template.source

    @property
    def tool_template_text(self) -> str | None:
        """The source of the template for conversations with tools, which may be a separate one."""
        return self._texts.template_text

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: add the tokens that the tokenizer puts around a text, such as a begin token.
            parse_special: special tokens spelled out in the text become those tokens; False takes it as plain text.

        Raises:
            PromptError: the text is no string, or no valid Unicode.
        """
        return self._texts.tokenize(text, add_special, parse_special)

    def tokenize_data(self, text: str, *, fitting: str = "") -> list[int]:
        """Token ids of a text inside another: without a begin token, and without special tokens that it spells out.
        With a name for errors in `fitting`, ContextLengthError where it is far too long for the context."""
        return self._texts.data(text, fitting)

    def tokenize_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text to continue; PromptError or ContextLengthError where it is empty, or far too long."""
        return self._texts.prompt(text, add_special, parse_special)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        prefill: str = "",
        parse_special: bool = False,
        fitting: bool = False,
    ) -> list[int]:
        """Token ids of OpenAI-style messages in the model's chat template, up to the start of the reply.

        Args:
            tools, variables, prefill: as `Model.stream_chat` takes them.
            parse_special: special tokens spelled out in these become those tokens, and not only the template's own.
            fitting: refuse messages that are far too long for the context before all of them are tokenized.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`, the latter for what is not `fitting`.
        """
        return self._texts.chat(messages, tools, variables, prefill, parse_special=parse_special, fitting=fitting)

    def split_chat(self, messages: Sequence[Mapping[str, Any]], prefill: str = "") -> tuple[list[int], list[int]]:
        """Token ids of messages and prefill, split where the text of the first user message starts; TemplateError where
        the template does not write that text as it is."""
        return self._texts.split(messages, prefill)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render OpenAI-style messages with the model's chat template.

        Used as a prompt, special tokens spelled out in messages become those tokens; `tokenize_chat` and `stream_chat`
        keep them text.

        Args:
            variables: as `Model.stream_chat` takes them; with "add_generation_prompt": False the text ends with the
                last message.

        Raises:
            TemplateError, ContextLengthError: as `Model.stream_chat`.
        """
        return self._texts.render(messages, tools, variables)

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `special`. PromptError where one is no id of the
        vocabulary."""
        return self._texts.detokenize(ids, special)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, with special tokens spelled out; errors as `detokenize`."""
        return self._texts.pieces(ids)
