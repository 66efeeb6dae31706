"""What a model shall go on with, a conversation or a text; the one reply to it; and refusals that name the field."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.contexts import Context, UnreadContextError
from edgeinfer.errors import ContextLengthError, GrammarError
from edgeinfer.openai.contract import ChatModel, StreamT
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message
from edgeinfer.openai.replies import PlainReader, Reply, ReplyReader
from edgeinfer.openai.tools import ToolUse
from edgeinfer.records import dataclass

_log = logging.getLogger("edgeinfer")

_SEEDS = 2**64
_OWN_FORMS = ("regex", "grammar")
# Forms that say how a reply begins, too.
_WHOLE_FORMS = ("json_schema", "json_object")


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens.

    Attributes:
        model: whose tokens they are.
    """

    ids: Sequence[int]
    model: ChatModel[Any]

    def of(self, model: ChatModel[Any]) -> Sequence[int]:
        """The ids, for the model that is to go on with them."""
        if model is not self.model:
            message = "The model was changed before the reply began."
            raise RequestError(message, "Ask again.", status=503, code="cancelled")
        return self.ids


@dataclass(frozen=True)
class ChatPrompt:
    """What a reply is asked for with.

    Attributes:
        messages: as they were sent.
        tools: what may be called.
        options: of GenerationConfig, for the first reply.
        variables: further names for the chat template.
        prefill: what the reply already says.
        tokens: of all that, once they are made; messages are kept then only for a worse prompt among them.
        fields: of the request that hold the messages and ask for a form of the reply.
        contexts: texts that the model reads apart, before the messages.
    """

    messages: Sequence[Message]
    tools: ToolUse
    options: Mapping[str, Any]
    variables: Mapping[str, Any] | None = None
    prefill: str = ""
    tokens: PromptTokens | None = None
    fields: tuple[str, str] = ("messages", "response_format")
    contexts: Sequence[Context] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What calls are not held to, once the form of the reply was made."""
        return self.tools.left_out

    def check(self, model: ChatModel[Any]) -> None:
        """Finds out what is wrong with the form of the reply, which may take some seconds. Safe from any thread."""
        with self._naming():
            model.check(**self.tools.options(model, self.options))

    def require_whole(self) -> None:
        """Refuses to go on with a reply that is to have a form from its beginning on."""
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
        """The same with its tokens made, where there are no contexts; errors as `start`."""
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
                parse_special=GenerationConfig.of(**self.options).parses_content,
            )
        if self.options.get("lame_prompt") is not None:
            return replace(self, messages=messages, tokens=PromptTokens(ids, model))
        return replace(self, messages=(), variables=None, tokens=PromptTokens(ids, model))

    def start(
        self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None
    ) -> tuple[StreamT, ReplyReader]:
        """Begins one of the replies."""
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
                _log.warning("%s", error)  # where it lies and what is to be done is for who named the file
                message, hint = f"The context {error.name} cannot be read now.", "Leave it out, or ask again later."
                raise RequestError(message, hint, param="contexts", status=503) from error
        return stream

    def _naming(self) -> AbstractContextManager[None]:
        messages, form = self.fields
        return naming(messages, "tools" if self.tools.calls else form, self.options)


@dataclass(frozen=True)
class TextPrompt:
    """A text to go on with.

    Attributes:
        prompt: the text, token ids, or the text's tokens once they are made.
        options: of GenerationConfig, for the first reply.
        fields: of the request that hold the text and ask for a form of the reply.
    """

    prompt: str | Sequence[int] | PromptTokens
    options: Mapping[str, Any]
    fields: tuple[str, str] = ("prompt", "response_format")
    left_out: tuple[str, ...] = ()

    def check(self, model: ChatModel[Any]) -> None:
        """As `ChatPrompt.check`."""
        with naming(*self.fields, self.options):
            model.check(**self.options)

    def prepared(self, model: ChatModel[Any]) -> TextPrompt:
        """The same with its tokens made; errors as `start`."""
        if not isinstance(self.prompt, str):
            return self
        with naming(*self.fields, self.options):
            parse = GenerationConfig.of(**self.options).parses_prompt
            ids = model.tokenize_prompt(self.prompt, parse_special=parse)
        return replace(self, prompt=PromptTokens(ids, model))

    def start(
        self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None
    ) -> tuple[StreamT, ReplyReader]:
        """As `ChatPrompt.start`."""
        with naming(*self.fields, self.options):
            prompt = self.prompt.of(model) if isinstance(self.prompt, PromptTokens) else self.prompt
            return model.stream(prompt, **reply_options(self.options, index)), PlainReader()


class PromptReplies:
    """What `contract.Completion` asks for of a request for replies to one prompt, but for what a client is sent.

    Args:
        prompt: that is replied to.
        n: replies.
        stream: whether the client wants the events, and not the whole.
        ignored: what the request asks for and does not get.
    """

    def __init__(self, prompt: ChatPrompt | TextPrompt, *, n: int = 1, stream: bool, ignored: Sequence[str]) -> None:
        self.n = n
        self.stream = stream
        self.ignored = tuple(ignored)
        self._prompt = prompt
        self._replies = [Reply() for _ in range(n)]

    def check(self, model: ChatModel[Any]) -> None:
        """Refuses a form of the reply that cannot be had."""
        self._prompt.check(model)
        self._note()

    def prepare(self, model: ChatModel[Any]) -> None:
        """Makes tokens of the prompt."""
        self._prompt = self._prompt.prepared(model)

    def start(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None) -> StreamT:
        """Begins a reply."""
        stream, reader = self._prompt.start(model, index, ended)
        self._replies[index] = Reply(reader)
        self._note()
        return stream

    def _note(self) -> None:
        """Adds what replies are not held to, which shows when their form is made."""
        self.ignored = tuple(dict.fromkeys((*self.ignored, *self._prompt.left_out)))


class OneReply(PromptReplies):
    """The same of a request for a single reply."""

    @property
    def _reply(self) -> Reply:
        return self._replies[0]


@contextmanager
def naming(prompt: str, form: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Names the field at fault in errors about a request.

    Args:
        form: the field that asks for a form of the reply, where none of our own does.
    """
    try:
        yield
    except GrammarError as error:
        param = next((name for name in _OWN_FORMS if name in options), form)
        raise RequestError(error.message, error.hint, param=param, code="unsupported_schema") from error
    except ContextLengthError as error:
        code = "context_length_exceeded"
        raise RequestError(error.message, error.hint, param=prompt, code=code, sizes=error.sizes) from error


def reply_options(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Options for one of several replies to a prompt: each draws by a seed of its own."""
    seed = options.get("seed")
    return dict(options) if seed is None else {**options, "seed": (seed + index) % _SEEDS}
