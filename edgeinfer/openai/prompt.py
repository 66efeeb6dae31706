"""The prompt of a request, messages or a text; replies to it; and errors that name the field at fault."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from edgeinfer.core.contexts import Context, UnreadContextError
from edgeinfer.core.errors import ContextLengthError, GrammarError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.openai.calls import PlainReader, ReplyReader
from edgeinfer.openai.contract import ChatModel, Event, ReplyStream, StreamT
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import FINGERPRINT, Fields
from edgeinfer.openai.infill import Gap
from edgeinfer.openai.messages import Message
from edgeinfer.openai.replies import Reply, timings, usage
from edgeinfer.openai.tools import ToolUse

_log = logging.getLogger("edgeinfer")

_SEEDS = 2**64
_OWN_FORMS = ("regex", "grammar")
# Forms that also constrain the start of a reply.
_WHOLE_FORMS = ("json_schema", "json_object")


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens, made by a model's tokenizer."""

    ids: Sequence[int]
    model: ChatModel[Any]

    def of(self, model: ChatModel[Any]) -> Sequence[int]:
        """The ids; refuse where another model is to continue them."""
        if model is not self.model:
            message = "The model was changed before the reply started."
            raise RequestError(message, "Ask again.", status=503, code="cancelled")
        return self.ids


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to answer, with tools and options."""

    messages: Sequence[Message]
    tools: ToolUse
    options: Mapping[str, Any]  # of ReplyOptions, for the first reply
    variables: Mapping[str, Any] | None = None  # further variables of the chat template
    prefill: str = ""  # the start of the reply
    # Of the rendered prompt, once they are made; messages are then kept only for an option that needs them.
    tokens: PromptTokens | None = None
    # Names of the request's fields that hold the messages and the form of the reply.
    fields: tuple[str, str] = ("messages", "response_format")
    contexts: Sequence[Context] = ()  # texts that are evaluated separately, before the messages

    @property
    def left_out(self) -> tuple[str, ...]:
        """Constraints on calls that are not enforced; known once the form of the reply was made."""
        return self.tools.left_out

    def check(self, model: ChatModel[Any]) -> None:
        """Validate the form of the reply, which may take some seconds. Safe from any thread."""
        with self._naming():
            model.check(**self.tools.options(model, self.options))

    def require_whole(self) -> None:
        """Refuse a prefill where the reply must follow a form from its start."""
        if not self.prefill:
            return
        messages, form = self.fields
        if self.tools.choice.mode == "required":
            form = "tool_choice"
        elif not any(name in self.options for name in _WHOLE_FORMS):
            return
        message = f"A reply that {messages} began cannot have the form that {form} asks for."
        raise RequestError(message, "End with a message of the user's, or leave that field out.", param=form)

    def prepared(self, model: ChatModel[Any]) -> ChatPrompt:
        """A copy with its tokens, where there are no contexts; errors as `start`."""
        if self.contexts:
            return self
        if model.chat_template_text is None:
            message, hint = f"{model.info.name} has no chat template.", "Send a text to /v1/completions instead."
            raise RequestError(message, hint, param=self.fields[0], code="template_rejected")
        with self._naming():
            messages = self.tools.messages(self.messages)
            ids = model.tokenize_chat(
                messages,
                tools=self.tools.template_tools,
                variables=self.variables,
                prefill=self.prefill,
                fitting=True,
                parse_special=ReplyOptions.of(**self.options).parses_content,
            )
        return replace(self, messages=(), variables=None, tokens=PromptTokens(ids, model))

    def start(
        self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None
    ) -> tuple[StreamT, ReplyReader]:
        if self.contexts:
            return self._start_behind(model, index, ended), self.tools.reader(model)
        prepared = self if self.tokens is not None else self.prepared(model)
        assert prepared.tokens is not None, "it was just prepared"
        with self._naming():
            stream = model.stream_chat(
                prepared.messages,
                tools=self.tools.template_tools,
                variables=prepared.variables,
                prefill=self.prefill,
                tokens=prepared.tokens.of(model),
                calls=self.tools.mark(model),
                **reply_options(self.tools.options(model, self.options), index),
            )
        return stream, self.tools.reader(model)

    def _start_behind(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None) -> StreamT:
        def look(_: int) -> None:
            if ended is not None and ended():
                message = "The reply was cut short while its contexts were read."
                raise RequestError(message, "Ask again in a moment.", status=503, code="cancelled")

        with self._naming():
            options = reply_options(self.tools.options(model, self.options), index)
            behind = model.with_contexts(self.contexts)
            try:
                stream: StreamT = behind.stream_chat(self.messages, prefill=self.prefill, progress=look, **options)
            except UnreadContextError as error:
                _log.warning("%s", error)  # the path and the remedy are for the person who named the file
                message, hint = f"The context {error.name} cannot be read now.", "Leave it out, or ask again later."
                raise RequestError(message, hint, param="contexts", status=503) from error
        return stream

    def _naming(self) -> AbstractContextManager[None]:
        messages, form = self.fields
        return naming(messages, "tools" if self.tools.calls else form, self.options)


@dataclass(frozen=True)
class TextPrompt:
    """A text to continue; `ChatPrompt` describes the fields and methods."""

    prompt: str | Sequence[int] | PromptTokens
    options: Mapping[str, Any]
    fields: tuple[str, str] = ("prompt", "response_format")
    left_out: tuple[str, ...] = ()
    gap: Gap | None = None  # to fill, instead of a text to continue

    def check(self, model: ChatModel[Any]) -> None:
        with naming(*self.fields, self.options):
            model.check(**self.options)

    def prepared(self, model: ChatModel[Any]) -> TextPrompt:
        if self.gap is not None:
            filled, ends = self.gap.ids(model)
            stops = {"stop_token_ids": [*self.options.get("stop_token_ids", ()), *ends]}
            return replace(self, prompt=PromptTokens(filled, model), options={**self.options, **stops}, gap=None)
        if not isinstance(self.prompt, str):
            return self
        with naming(*self.fields, self.options):
            parse = ReplyOptions.of(**self.options).parses_prompt
            ids = model.tokenize_prompt(self.prompt, parse_special=parse)
        return replace(self, prompt=PromptTokens(ids, model))

    def start(
        self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None
    ) -> tuple[StreamT, ReplyReader]:
        if self.gap is not None:
            return self.prepared(model).start(model, index, ended)
        with naming(*self.fields, self.options):
            prompt = self.prompt.of(model) if isinstance(self.prompt, PromptTokens) else self.prompt
            return model.stream(prompt, **reply_options(self.options, index)), PlainReader()


class PromptReplies:
    """The part of `contract.Completion` that makes `each` replies to prompts; subclasses write events and answers."""

    def __init__(
        self, *prompts: ChatPrompt | TextPrompt, each: int = 1, stream: bool, ignored: Sequence[str] = ()
    ) -> None:
        self.n = each * len(prompts)
        self.stream = stream
        self.ignored = tuple(ignored)
        self._each = each
        self._prompts = list(prompts)
        self._replies = [Reply() for _ in range(self.n)]
        self._streams: list[ReplyStream] = []
        self._head: dict[str, Any] = {}  # of every answer; its id is the request's

    def check(self, model: ChatModel[Any]) -> None:
        self._prompts[0].check(model)
        self._note()

    def prepare(self, model: ChatModel[Any]) -> None:
        self._prompts = [prompt.prepared(model) for prompt in self._prompts]

    def start(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None) -> StreamT:
        place, reply = divmod(index, self._each)
        stream, reader = self._prompts[place].start(model, reply, ended)
        self._replies[index] = Reply(reader)
        self._streams.append(stream)
        self._note()
        return stream

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first prompt, once it is prepared."""
        tokens = self._prompts[0].tokens if isinstance(self._prompts[0], ChatPrompt) else self._prompts[0].prompt
        assert isinstance(tokens, PromptTokens), "it was prepared"
        return len(tokens.ids)

    @property
    def id(self) -> str:
        """The id of the answer; empty where it has none."""
        return str(self._head.get("id", ""))

    def answer_now(self) -> int:
        """End the thoughts of the replies; return how many were inside one."""
        return sum(stream.answer_now() for stream in self._streams)

    def _note(self) -> None:
        """Add constraints that are not enforced, which are known once the form of the reply is made."""
        self.ignored = tuple(dict.fromkeys((*self.ignored, *self._prompts[0].left_out)))

    @property
    def _reply(self) -> Reply:
        return self._replies[0]


class CompletionReplies(PromptReplies):
    """Replies in the form of OpenAI's completions: choices with a head, token counts and times."""

    def __init__(
        self,
        *prompts: ChatPrompt | TextPrompt,
        each: int,
        fields: Fields,
        model: ChatModel[Any],
        kind: str,
        prefix: str,
        stream: bool,
        usage_wanted: bool,
    ) -> None:
        super().__init__(*prompts, each=each, stream=stream, ignored=fields.ignored)
        self._usage_wanted = usage_wanted
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model.info.name,
            "system_fingerprint": FINGERPRINT,
        }

    def closing(self) -> list[Event]:
        return [{**self._head, "choices": [], **self._figures()}] if self._usage_wanted else []

    def _piece(self, choice: dict[str, Any]) -> Event:
        # OpenAI's chunks say null where the tokens come at the end.
        return {**self._head, "choices": [choice]} | ({"usage": None} if self._usage_wanted else {})

    def _figures(self) -> dict[str, Any]:
        results = [reply.result for reply in self._replies if reply.result is not None]
        return {"usage": usage(results, per_prompt=self._each), "timings": timings(results)}


@contextmanager
def naming(prompt: str, form: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Name the field at fault in errors about a request; `form` is the field for the form of the reply."""
    try:
        yield
    except GrammarError as error:
        param = next((name for name in _OWN_FORMS if name in options), form)
        raise RequestError(error.message, error.hint, param=param, code="unsupported_schema") from error
    except ContextLengthError as error:
        code = "context_length_exceeded"
        raise RequestError(error.message, error.hint, param=prompt, code=code, sizes=error.sizes) from error


def reply_options(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Options for one of several replies to a prompt: each has its own seed."""
    seed = options.get("seed")
    return dict(options) if seed is None else {**options, "seed": (seed + index) % _SEEDS}
